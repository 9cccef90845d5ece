/* A samples file: safetensors with x float32 [samples, ...] and y int32 [samples] or float32 [samples, ...]. Batches are read
 * into the run's buffers, so a file of any size takes no memory. */
#ifndef TASTE_TRAIN_SAMPLES_H
#define TASTE_TRAIN_SAMPLES_H

#include "trainer.h"
#include "weights.h"

typedef struct samples {
    tensor_file file;
    taste_safetensors_entry x;
    taste_safetensors_entry y;
    int has_y;
    int labels; /* y are int32 labels */
    uint64_t count;
} samples;

/* Opens the file and compares it with the model: INCOMPATIBLE where shapes or types differ, CORRUPT where x or y is missing.
 * y may be missing unless `needs_y`. To be closed with samples_close, whatever the outcome. */
taste_status samples_open(const char *path, const trainer *trainer, int needs_y, samples *out, taste_error *error);
void samples_close(samples *samples);

/* Reads rows [first, first + rows) into the trainer's x and y; the file is a ring. */
taste_status samples_read(const samples *samples, const trainer *trainer, uint64_t first, uint32_t rows,
                          taste_error *error);

/* Made-up rows for `bench`: the same on every board. */
void samples_make_up(const trainer *trainer);

#endif
