/* How much memory a run takes, before it is taken. */
#ifndef TASTE_TRAIN_FOOTPRINT_H
#define TASTE_TRAIN_FOOTPRINT_H

#include "taste.h"

/* Parts of the one block that a run maps, by offset. */
typedef struct footprint {
    uint64_t parameters, pool, session, x[2], y[2], raw[2], logits, staging, beside; /* offsets, each aligned */
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

/* What decides the memory of a run. A program that trains also takes the room for evaluating in between (`eval` at the same
 * batch size) and for a second batch that is read ahead. */
typedef struct footprint_need {
    uint32_t program;
    uint32_t batch_size;
    uint32_t threads;
    uint32_t slots; /* of the optimizer */
    int accumulate;
    uint64_t beside_bytes; /* what the verb keeps beside its batches: streams, a replay buffer */
} footprint_need;

taste_status footprint_of(const taste_model *model, const footprint_need *need, footprint *out, taste_error *error);

/* The line does not look at need->batch_size. Where `train` and `eval` need their arenas for different reasons it lies a
 * little above footprint_of, never below. */
taste_status footprint_line_of(const taste_model *model, const footprint_need *need, footprint_line *out,
                               taste_error *error);

/* The session of such a run: its options, and the programs that it opens (`out_uses` holds two). Returns how many. */
size_t footprint_session(const taste_model *model, const footprint_need *need, taste_session_options *out_options,
                         taste_use *out_uses);

/* Bytes of one sample's targets for this program; labels are kept for `eval` too, which compares with them. */
uint64_t footprint_target_bytes(const taste_model *model, const taste_program_facts *facts);

/* The largest batch size whose planned bytes are at most `limit_bytes`; 0: none. */
uint32_t footprint_largest_batch(const footprint_line *line, uint64_t limit_bytes);

/* Bytes of one sample of a program's tensor; 0 where there is none. */
uint64_t footprint_sample_bytes(const taste_model *model, int32_t tensor);

/* Reads a byte of every page of the program itself, so that no step waits for one; they are in the plan. */
void footprint_touch_program(void);

#endif
