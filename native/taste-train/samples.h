/* A samples file: safetensors with x and y. Packed data (bytes: images with mean and std in the metadata, or windows of tokens
 * with the next token as target) are taken in the keyed order of the epoch; float32 samples in the file's own order. Rows are
 * read one by one into a batch's buffer, so a file of any size takes no memory, and one that shrinks is an error and no
 * signal. */
#ifndef TASTE_TRAIN_SAMPLES_H
#define TASTE_TRAIN_SAMPLES_H

#include "augment.h"
#include "sha256.h"
#include "trainer.h"
#include "weights.h"

typedef struct samples {
    tensor_file file;
    taste_safetensors_entry x;
    taste_safetensors_entry y;
    int has_y;
    taste_safetensors_entry domain; /* int32 a sample, of files that have it */
    int has_domain;
    int labels; /* y are labels: int32, or tokens */
    int packed; /* x are bytes */
    int tokens; /* the program takes int32 */
    uint64_t count;
    uint64_t x_elements, y_elements; /* of one sample */
    augment_image image;             /* of packed images */
    char digest[SHA256_HEX_BYTES];   /* of the data section */
} samples;

/* Which rows: positions [first, first + rows) of an epoch, or, without `keyed`, rows of the file. */
typedef struct samples_request {
    uint64_t first;
    uint32_t rows;
    int keyed;
    const uint32_t *list; /* instead of all that: `rows` rows of the file; NULL: none */
    uint64_t seed, epoch;
    augment_level augment;
} samples_request;

/* Opens the file and compares it with the model: INCOMPATIBLE where shapes or types differ, CORRUPT where x or y is missing,
 * or the data are not those that the metadata's SHA-256 tells. y may be missing unless `needs_y`. `staging` is what files
 * are read through. To be closed with samples_close, whatever the outcome. */
taste_status samples_open(const char *path, const trainer *trainer, int needs_y, samples *out, taste_error *error);
void samples_close(samples *samples);

/* Reads the rows asked for into a batch. */
taste_status samples_read(const samples *samples, const samples_request *request, const batch_buffer *batch,
                          taste_error *error);

/* How many samples a file has, without looking at anything else. CORRUPT: no safetensors file with an x. */
taste_status samples_count(const char *path, uint64_t *out_count, taste_error *error);

/* `count` values of a tensor int32 [N] of the file. */
taste_status samples_read_column(const samples *samples, const taste_safetensors_entry *column, uint64_t first,
                                 size_t count, int32_t *out, taste_error *error);

/* The bytes of one packed row, as they stand in the file. */
taste_status samples_read_bytes(const samples *samples, uint64_t row, unsigned char *out, taste_error *error);

/* Made-up rows for `bench`: the same on every board. */
void samples_make_up(const trainer *trainer);

#endif
