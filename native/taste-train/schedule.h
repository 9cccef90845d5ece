/* The learning rate of every optimizer step. */
#ifndef TASTE_TRAIN_SCHEDULE_H
#define TASTE_TRAIN_SCHEDULE_H

#include "batches.h"

typedef enum schedule_kind {
    SCHEDULE_CONSTANT,
    SCHEDULE_STEP,
    SCHEDULE_COSINE,
    SCHEDULE_LINEAR,
    SCHEDULE_ADABATCH,
} schedule_kind;

typedef struct schedule {
    schedule_kind kind;
    double rate;           /* the highest */
    uint64_t steps;        /* of the whole run */
    uint64_t warmup_steps; /* over which the rate rises linearly */
    double every_epochs;   /* step: the rate is multiplied by `gamma` after every so many epochs */
    double gamma;
    double decay; /* adabatch: the rate of a fixed effective batch is multiplied by it after every interval */
} schedule;

/* Of the step that begins at `at`. After the warm-up, with p the share done of what is left: rate (constant),
 * rate * (1 + cos(pi p)) / 2 (cosine), rate * (1 - p) (linear). adabatch, k intervals done: rate * decay^k times what the
 * effective batch has grown by, so that rate over effective batch falls as with a fixed one; and the warm-up on top. */
float schedule_rate(const schedule *s, const batches *b, const place *at);

#endif
