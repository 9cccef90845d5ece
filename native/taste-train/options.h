/* The command line as one value. */
#ifndef TASTE_TRAIN_OPTIONS_H
#define TASTE_TRAIN_OPTIONS_H

#include "taste.h"

typedef struct options {
    const char *verb;
    const char *program;      /* NULL: the verb's own */
    uint32_t batch_size;      /* 0: not given */
    uint32_t effective_batch; /* samples an optimizer step; 0: batch_size */
    double seconds;
    uint32_t min_steps;
    uint32_t warmup;
    uint32_t threads; /* 0: all cores */
    uint32_t cores[TASTE_MAX_THREADS];
    uint32_t core_count;
    uint64_t memory; /* bytes that may be used; 0: what is free */
    uint64_t seed;
    int seed_given;
    const char *weights;
    const char *samples;
    const char *save;
    const char *dump_gradients;
    const char *logits;
    const char *test;       /* NULL: no evaluation in between */
    uint32_t steps;         /* 0: epochs */
    double epochs;          /* 0: steps */
    uint64_t limit;         /* samples that eval looks at; 0: all */
    int32_t schedule;       /* schedule_kind */
    double warmup_share;    /* of all steps */
    double step_every;      /* epochs */
    double step_gamma;
    taste_hyper hyper;
    int learning_rate_given;
    float label_smoothing;
    uint32_t eval_every; /* epochs; 0: at the end only */
    int32_t augment;     /* augment_level */
    int bn_time_constant; /* running statistics move as with whole effective batches */
    int32_t bn_policy;   /* 0: statistics of the micro-batch */
    const char *checkpoint; /* folder; NULL: none */
    double checkpoint_seconds;
    uint32_t checkpoint_steps; /* instead of seconds, where not 0 */
    int resume;
    double report_rate; /* step events a second, at most */
    const char *system_root; /* put before /proc and /sys: tests hand in a tree of their own */
} options;

/* Reads argv into `out`; USAGE and the reason otherwise. */
taste_status options_parse(int argc, char **argv, options *out, taste_error *error);

#endif
