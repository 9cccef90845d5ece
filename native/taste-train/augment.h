/* Packed images to the program's floats: normalised, and in training shifted, mirrored and cut out. */
#ifndef TASTE_TRAIN_AUGMENT_H
#define TASTE_TRAIN_AUGMENT_H

#include <stdint.h>

enum { AUGMENT_CHANNELS = 16, AUGMENT_BORDER = 4 };

/* In the order of --augment; each does what those before it do. */
typedef enum augment_level { AUGMENT_NONE, AUGMENT_FLIP, AUGMENT_CROP_FLIP, AUGMENT_CROP_FLIP_CUTOUT } augment_level;

/* An image's planes and what makes a float of a byte: byte * scale + shift, rounded twice. */
typedef struct augment_image {
    uint32_t channels, height, width;
    float scale[AUGMENT_CHANNELS], shift[AUGMENT_CHANNELS];
} augment_image;

/* What one sample gets. Rows and columns are moved by `down` and `right`; what comes in from outside is 0, the mean. */
typedef struct augment_draw {
    int32_t down, right;
    int mirrored;
    int32_t cut_top, cut_left, cut_side; /* a square of zeros, cut off at the edges; side 0: none */
} augment_draw;

/* Drawn from (seed, epoch, position in the epoch) alone: the shift of a crop out of the image with a border of 4, a coin for
 * the mirror, the centre of a square with half the image's smaller side (DeVries and Taylor 2017). */
augment_draw augment_choose(augment_level level, const augment_image *image, uint64_t seed, uint64_t epoch,
                            uint64_t position);

void augment_apply(const augment_image *image, const augment_draw *draw, const unsigned char *bytes, float *out);

#endif
