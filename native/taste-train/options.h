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
    uint32_t steps;
    uint32_t warmup_steps;
    taste_hyper hyper;
    int learning_rate_given;
    const char *system_root; /* put before /proc and /sys: tests hand in a tree of their own */
} options;

/* Reads argv into `out`; USAGE and the reason otherwise. */
taste_status options_parse(int argc, char **argv, options *out, taste_error *error);

#endif
