/* The learning rate of every optimizer step. */
#ifndef TASTE_TRAIN_SCHEDULE_H
#define TASTE_TRAIN_SCHEDULE_H

#include <stdint.h>

typedef enum schedule_kind { SCHEDULE_CONSTANT, SCHEDULE_STEP, SCHEDULE_COSINE, SCHEDULE_LINEAR } schedule_kind;

typedef struct schedule {
    schedule_kind kind;
    double rate;           /* the highest */
    uint64_t steps;        /* of the whole run */
    uint64_t warmup_steps; /* over which the rate rises linearly */
    double every_epochs;   /* step: the rate is multiplied by `gamma` after every so many epochs */
    double gamma;
    uint64_t steps_an_epoch;
} schedule;

/* Of step `step`, counted from 0. After the warm-up, with p the share done of what is left: rate (constant),
 * rate * (1 + cos(pi p)) / 2 (cosine), rate * (1 - p) (linear). */
float schedule_rate(const schedule *s, uint64_t step);

#endif
