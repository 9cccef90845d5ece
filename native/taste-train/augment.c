#include "augment.h"

#include <string.h>

#include "generator.h"

/* A fused multiply-add would round once on boards that have it. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum { DRAWS = 8 }; /* counter values of a sample */

static int32_t below(uint64_t bits, uint64_t count) {
    return (int32_t)((bits >> 32) * count >> 32);
}

augment_draw augment_choose(augment_level level, const augment_image *image, uint64_t seed, uint64_t epoch,
                            uint64_t position) {
    uint64_t key = taste_splitmix64(taste_generator_key(seed, "augment") + epoch) + position * DRAWS;
    uint32_t smaller = image->height < image->width ? image->height : image->width;
    augment_draw draw = {0};
    if (level >= AUGMENT_FLIP) draw.mirrored = below(taste_splitmix64(key), 2);
    if (level >= AUGMENT_CROP_FLIP) {
        draw.down = AUGMENT_BORDER - below(taste_splitmix64(key + 1), 2 * AUGMENT_BORDER + 1);
        draw.right = AUGMENT_BORDER - below(taste_splitmix64(key + 2), 2 * AUGMENT_BORDER + 1);
    }
    if (level >= AUGMENT_CROP_FLIP_CUTOUT) {
        draw.cut_side = (int32_t)(smaller / 2);
        draw.cut_top = below(taste_splitmix64(key + 3), image->height) - draw.cut_side / 2;
        draw.cut_left = below(taste_splitmix64(key + 4), image->width) - draw.cut_side / 2;
    }
    return draw;
}

/* One row of one plane; `bytes` is the row that it comes from. */
static void fill_row(const augment_draw *draw, int32_t width, float scale, float shift, const unsigned char *bytes,
                     float *out) {
    if (!draw->mirrored && draw->right == 0) {
        for (int32_t x = 0; x < width; x++) out[x] = (float)bytes[x] * scale + shift;
        return;
    }
    for (int32_t x = 0; x < width; x++) {
        int32_t from = (draw->mirrored ? width - 1 - x : x) - draw->right;
        out[x] = from < 0 || from >= width ? 0.0f : (float)bytes[from] * scale + shift;
    }
}

static void cut_row(const augment_draw *draw, int32_t y, int32_t width, float *out) {
    if (y < draw->cut_top || y >= draw->cut_top + draw->cut_side) return;
    int32_t end = draw->cut_left + draw->cut_side < width ? draw->cut_left + draw->cut_side : width;
    for (int32_t x = draw->cut_left > 0 ? draw->cut_left : 0; x < end; x++) out[x] = 0;
}

void augment_apply(const augment_image *image, const augment_draw *draw, const unsigned char *bytes, float *out) {
    int32_t height = (int32_t)image->height, width = (int32_t)image->width;
    for (uint32_t c = 0; c < image->channels; c++) {
        for (int32_t y = 0; y < height; y++, out += width) {
            int32_t from = y - draw->down;
            if (from < 0 || from >= height)
                memset(out, 0, (size_t)width * sizeof *out);
            else
                fill_row(draw, width, image->scale[c], image->shift[c],
                         bytes + ((int64_t)c * height + from) * width, out);
            cut_row(draw, y, width, out);
        }
    }
}
