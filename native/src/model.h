/* Look-ups in the model's tables. */
#ifndef TASTE_MODEL_H
#define TASTE_MODEL_H

#include "program.h"
#include "taste.h"

/* Rounds up to TASTE_ALIGNMENT. */
static inline uint64_t taste_round_up(uint64_t bytes) {
    return (bytes + TASTE_ALIGNMENT - 1) / TASTE_ALIGNMENT * TASTE_ALIGNMENT;
}

/* The bit of a segment in read_segments and updated_segments. */
static inline uint64_t taste_segment_bit(uint32_t segment) {
    return (uint64_t)1 << (segment < 63 ? segment : 63);
}

static inline int taste_in_parameter_set(const taste_tensor *tensor) {
    return tensor->region <= TASTE_REGION_CONSTANTS;
}

/* Whether some program trains this tensor: a parameter in the updated prefix of its segment. */
static inline int taste_is_trained(const taste_model *model, const taste_tensor *tensor) {
    const taste_segment *segment = &model->segments[tensor->segment];
    return tensor->region == TASTE_REGION_PARAMETERS &&
           tensor->offset_bytes - segment->parameter_offset_bytes < segment->updated_bytes;
}

/* The parameter, state or constant called `name`; TASTE_NO_TENSOR where there is none. */
uint32_t taste_model_find_stored(const taste_model *model, const char *name);

/* The parameter (only) called `name`. */
uint32_t taste_model_find_parameter(const taste_model *model, const char *name);

/* The arena tensor called `name` of a program. */
uint32_t taste_model_find_arena(const taste_model *model, uint32_t program, const char *name);

/* Bytes of the scalars region. */
uint64_t taste_model_scalar_bytes(const taste_model *model);

#endif
