/* A checkpoint: a safetensors file of everything that decides a run's future. Its metadata start with a SHA-256 over the whole
 * file, in which the 64 digits themselves count as zeros; so whatever is damaged is seen before anything is used. */
#ifndef TASTE_TRAIN_CHECKPOINT_H
#define TASTE_TRAIN_CHECKPOINT_H

#include "batches.h"
#include "canonical.h"

enum { CHECKPOINT_FACTS = 32, CHECKPOINT_METADATA_BYTES = 6144 };

/* What must be the same when a run goes on: build, data, options, as text without quotes and backslashes. */
typedef struct checkpoint_fact {
    const char *key;
    char value[80];
} checkpoint_fact;

typedef struct checkpoint_facts {
    uint32_t count;
    checkpoint_fact fact[CHECKPOINT_FACTS];
} checkpoint_facts;

void checkpoint_note(checkpoint_facts *facts, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The optimizer with all of its scalars but the learning rate. */
void checkpoint_note_hyper(checkpoint_facts *facts, const taste_hyper *hyper);

/* Writes the file, whole or not at all. NON_FINITE, and nothing is touched, where a value is NaN or Inf. */
taste_status checkpoint_write(const char *path, const canonical *c, const checkpoint_facts *facts, const place *at,
                              taste_error *error);

/* Checks a file against its hash, and tells where its run stood. CORRUPT: damaged, or not a checkpoint. */
taste_status checkpoint_check(const char *path, const canonical *c, place *out_at, taste_error *error);

/* Fills parameters and slots from a file that was checked. INCOMPATIBLE: another build, data or options; both values are
 * in the text. */
taste_status checkpoint_load(const char *path, const canonical *c, const checkpoint_facts *facts, taste_error *error);

#endif
