/* An epoch cut into optimizer steps, and those into micro-batches. */
#ifndef TASTE_TRAIN_BATCHES_H
#define TASTE_TRAIN_BATCHES_H

#include "taste.h"

typedef struct batches {
    uint64_t samples;     /* of an epoch */
    uint32_t batch_size;  /* of a micro-batch, at most */
    uint32_t effective;   /* of an optimizer step of epoch 0; the last one of an epoch may have fewer */
    uint32_t minimum;     /* that a program which trains needs */
    uint32_t interval;    /* epochs after which the effective batch grows, again and again; 0: it never does */
    double factor;        /* by which it grows, rounded down */
    uint32_t cap;         /* where that ends */
} batches;

/* Where a run stands: whole optimizer steps and epochs done, and samples of the epoch that are done. */
typedef struct place {
    uint64_t step, epoch, position;
} place;

/* USAGE where some micro-batch of the first `steps` optimizer steps would be too small for the model. */
taste_status batches_check(const batches *b, uint64_t steps, taste_error *error);

/* Of a whole optimizer step of that epoch. */
uint32_t batches_whole(const batches *b, uint64_t epoch);

uint64_t batches_steps_an_epoch(const batches *b, uint64_t epoch);

/* Optimizer steps of so many epochs, not rounded. */
double batches_steps(const batches *b, double epochs);

/* Samples of the optimizer step that `at` lies in, and rows of the micro-batch that starts there. */
uint32_t batches_effective(const batches *b, const place *at);
uint32_t batches_rows(const batches *b, const place *at);

/* Goes on behind the micro-batch that starts at `at`. */
void batches_advance(const batches *b, place *at);

#endif
