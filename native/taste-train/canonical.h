/* Weights, states and optimizer slots one after the other in canonical layout: what files hold and hashes are made of. */
#ifndef TASTE_TRAIN_CANONICAL_H
#define TASTE_TRAIN_CANONICAL_H

#include "sha256.h"
#include "taste.h"

/* The tensors of `kinds` (a sum of 1 << taste_kind) in the table's order, then `slots` optimizer slots of the trained
 * parameters: the order of taste_safetensors_header. Values go through `staging`. */
typedef struct canonical {
    const taste_model *model;
    taste_parameters *parameters;
    taste_session *session; /* may be NULL without slots */
    uint32_t kinds, slots;
    float *staging;
    size_t staging_bytes;
    void *run_state; /* bytes of the run that are no tensor of the model; the last of a checkpoint, in no hash of weights */
    uint64_t run_state_bytes; /* 0: there are none */
} canonical;

/* One of them. Starts as {0}. */
typedef struct canonical_item {
    char name[280]; /* in the file */
    taste_tensor_facts facts;
    uint32_t tensor;
    int32_t slot; /* -1: the tensor itself */
    uint32_t next;
} canonical_item;

/* The next one; 0: there are no more. */
int canonical_next(const canonical *c, canonical_item *item);

/* Elements [first, first + count) of it. */
void canonical_get(const canonical *c, const canonical_item *item, uint64_t first, size_t count, float *out_values);
void canonical_put(const canonical *c, const canonical_item *item, uint64_t first, size_t count, const float *values);

/* Hands everything to `visit` in order, a piece at a time. */
typedef taste_status (*canonical_visit)(void *context, const canonical_item *item, const float *values, size_t count,
                                        taste_error *error);
taste_status canonical_walk(const canonical *c, canonical_visit visit, void *context, taste_error *error);

/* Adds everything to a hash. NON_FINITE: a value is NaN or Inf, and which tensor's it is. */
taste_status canonical_hash(const canonical *c, sha256 *hash, taste_error *error);

#endif
