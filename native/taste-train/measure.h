/* Throughput of one batch size: windows of steps on the monotonic clock, their median and spread. */
#ifndef TASTE_TRAIN_MEASURE_H
#define TASTE_TRAIN_MEASURE_H

#include "taste.h"

enum { MEASURE_WINDOWS = 256, MEASURE_STEPS = 2048 };

/* What is measured: does one step, fills in its times. */
typedef taste_status (*measure_step)(void *context, taste_step *out_step);

/* How long: warm-up steps, then at least `seconds` and `min_steps`. Where a step takes half of `seconds` or more, one warm-up
 * step, and the end as soon as two windows in a row agree. */
typedef struct measure_rule {
    double seconds;
    uint32_t min_steps;
    uint32_t warmup;
} measure_rule;

typedef struct measurement {
    uint32_t windows;
    double samples_per_s[MEASURE_WINDOWS];
    uint32_t times; /* steps whose phases were noted: the last MEASURE_STEPS of them */
    float forward_s[MEASURE_STEPS];
    float backward_s[MEASURE_STEPS];
    float update_s[MEASURE_STEPS];
    uint64_t steps;
    double elapsed_s;
    double loss; /* of the last step */
} measurement;

/* Warm-up. Returns the time of the fastest step in `out_step_ns`. INTERRUPTED after Ctrl-C. */
taste_status measure_warm_up(const measure_rule *rule, measure_step step, void *context, uint64_t *out_step_ns);

/* The measured windows; a `counters` event for each. */
taste_status measure_run(const measure_rule *rule, measure_step step, void *context, uint32_t batch_size,
                         uint64_t step_ns, measurement *out);

/* Median, and interquartile range / median; both sort `values`. 0 values: 0. */
double measure_median(double *values, uint32_t count);
double measure_spread(double *values, uint32_t count);
double measure_median_of_floats(float *values, uint32_t count);

#endif
