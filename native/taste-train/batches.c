#include "batches.h"

#include <math.h>

#include "error.h"

/* Rows of the first micro-batch of `remaining` samples: as many as fit, but so that the rest is not too small. */
static uint32_t first_rows(const batches *b, uint32_t remaining) {
    uint32_t rows = remaining < b->batch_size ? remaining : b->batch_size;
    uint32_t rest = remaining - rows;
    uint32_t missing = rest > 0 && rest < b->minimum ? b->minimum - rest : 0;
    return rows > missing ? rows - missing : rows;
}

static int is_divisible(const batches *b, uint32_t samples) {
    while (samples > 0) {
        uint32_t rows = first_rows(b, samples);
        if (rows < b->minimum) return 0;
        samples -= rows;
    }
    return 1;
}

static int may_grow(const batches *b, uint64_t epoch) {
    return b->interval > 0 && batches_whole(b, epoch) < b->cap;
}

taste_status batches_check(const batches *b, uint64_t steps, taste_error *error) {
    for (uint64_t epoch = 0, done = 0; done < steps; epoch += b->interval) {
        uint32_t effective = batches_whole(b, epoch);
        uint32_t whole = b->samples < effective ? (uint32_t)b->samples : effective;
        uint32_t last = (uint32_t)(b->samples % effective);
        if (!is_divisible(b, whole) || !is_divisible(b, last)) {
            return taste_fail(error, TASTE_STATUS_USAGE,
                              "%llu samples in effective batches of %u and micro-batches of %u leave one below the %u "
                              "samples that the model needs. Use another effective batch.",
                              (unsigned long long)b->samples, effective, b->batch_size, b->minimum);
        }
        if (!may_grow(b, epoch)) break;
        done += b->interval * batches_steps_an_epoch(b, epoch);
    }
    return TASTE_STATUS_OK;
}

uint32_t batches_whole(const batches *b, uint64_t epoch) {
    uint32_t effective = b->effective;
    uint64_t times = b->interval > 0 ? epoch / b->interval : 0;
    for (; times > 0 && effective < b->cap; times--) {
        effective = (uint32_t)fmin(floor((double)effective * b->factor), b->cap);
    }
    return effective;
}

uint64_t batches_steps_an_epoch(const batches *b, uint64_t epoch) {
    uint32_t effective = batches_whole(b, epoch);
    return (b->samples + effective - 1) / effective;
}

double batches_steps(const batches *b, double epochs) {
    double steps = 0;
    uint64_t epoch = 0;
    while (may_grow(b, epoch) && (double)epoch + b->interval <= epochs) {
        steps += (double)b->interval * (double)batches_steps_an_epoch(b, epoch);
        epoch += b->interval;
    }
    return steps + (epochs - (double)epoch) * (double)batches_steps_an_epoch(b, epoch);
}

uint32_t batches_effective(const batches *b, const place *at) {
    uint32_t effective = batches_whole(b, at->epoch);
    uint64_t left = b->samples - at->position / effective * effective;
    return left < effective ? (uint32_t)left : effective;
}

uint32_t batches_rows(const batches *b, const place *at) {
    return first_rows(b, batches_effective(b, at) - (uint32_t)(at->position % batches_whole(b, at->epoch)));
}

void batches_advance(const batches *b, place *at) {
    at->position += batches_rows(b, at);
    if (at->position % batches_whole(b, at->epoch) != 0 && at->position != b->samples) return;
    at->step++;
    if (at->position < b->samples) return;
    at->position = 0;
    at->epoch++;
}
