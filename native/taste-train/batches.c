#include "batches.h"

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

taste_status batches_check(const batches *b, taste_error *error) {
    uint32_t whole = b->samples < b->effective ? (uint32_t)b->samples : b->effective;
    uint32_t last = (uint32_t)(b->samples % b->effective);
    if (is_divisible(b, whole) && is_divisible(b, last)) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_USAGE,
                      "%llu samples in effective batches of %u and micro-batches of %u leave one below the %u samples "
                      "that the model needs. Use another effective batch.",
                      (unsigned long long)b->samples, b->effective, b->batch_size, b->minimum);
}

uint64_t batches_steps_an_epoch(const batches *b) {
    return (b->samples + b->effective - 1) / b->effective;
}

uint32_t batches_effective(const batches *b, const place *at) {
    uint64_t left = b->samples - at->position / b->effective * b->effective;
    return left < b->effective ? (uint32_t)left : b->effective;
}

uint32_t batches_rows(const batches *b, const place *at) {
    return first_rows(b, batches_effective(b, at) - (uint32_t)(at->position % b->effective));
}

void batches_advance(const batches *b, place *at) {
    at->position += batches_rows(b, at);
    if (at->position % b->effective != 0 && at->position != b->samples) return;
    at->step++;
    if (at->position < b->samples) return;
    at->position = 0;
    at->epoch++;
}
