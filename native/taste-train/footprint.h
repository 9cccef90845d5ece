/* How much memory a run takes, before it is taken. */
#ifndef TASTE_TRAIN_FOOTPRINT_H
#define TASTE_TRAIN_FOOTPRINT_H

#include "taste.h"

/* Parts of the one block that a run maps, by offset. */
typedef struct footprint {
    uint64_t parameters, pool, session, x, y, logits, staging; /* offsets, each aligned */
    uint64_t session_bytes, parameters_bytes, pool_bytes;
    uint64_t staging_bytes; /* through which files are read and written */
    uint64_t block_bytes;
    uint64_t planned_bytes; /* the peak of resident memory: block, program, stack */
} footprint;

/* The closed form: planned_bytes at batch b = fixed_bytes + b * per_sample_bytes, for one program. */
typedef struct footprint_line {
    uint64_t fixed_bytes;
    uint64_t per_sample_bytes;
} footprint_line;

taste_status footprint_of(const taste_model *model, uint32_t program, uint32_t batch_size, uint32_t threads,
                          int accumulate, footprint *out, taste_error *error);
taste_status footprint_line_of(const taste_model *model, uint32_t program, uint32_t threads, int accumulate,
                               footprint_line *out, taste_error *error);

/* The largest batch size whose planned bytes are at most `limit_bytes`; 0: none. */
uint32_t footprint_largest_batch(const footprint_line *line, uint64_t limit_bytes);

/* Bytes of one sample of a program's tensor; 0 where there is none. */
uint64_t footprint_sample_bytes(const taste_model *model, int32_t tensor);

/* Reads a byte of every page of the program itself, so that no step waits for one; they are in the plan. */
void footprint_touch_program(void);

#endif
