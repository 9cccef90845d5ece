#include "measure.h"

#include <math.h>
#include <stdlib.h>

#include "clock.h"
#include "json.h"
#include "trainer.h"

/* Two windows agree if they differ by less; a tenth of `seconds` is one window. */
static const double agreement = 0.03;
enum { WINDOWS_A_RUN = 10 };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int by_float(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Linear interpolation between the two nearest of sorted values. */
static double quantile(const double *sorted, uint32_t count, double q) {
    double at = q * (count - 1);
    uint32_t low = (uint32_t)at;
    uint32_t high = low + 1 < count ? low + 1 : low;
    return sorted[low] + (at - low) * (sorted[high] - sorted[low]);
}

double measure_median(double *values, uint32_t count) {
    if (count == 0) return 0;
    qsort(values, count, sizeof *values, by_value);
    return quantile(values, count, 0.5);
}

double measure_spread(double *values, uint32_t count) {
    double median = measure_median(values, count);
    return median > 0 ? (quantile(values, count, 0.75) - quantile(values, count, 0.25)) / median : 0;
}

double measure_median_of_floats(float *values, uint32_t count) {
    if (count == 0) return 0;
    qsort(values, count, sizeof *values, by_float);
    return 0.5 * ((double)values[(count - 1) / 2] + (double)values[count / 2]);
}

taste_status measure_warm_up(const measure_rule *rule, measure_step step, void *context, uint64_t *out_step_ns) {
    taste_step ignored;
    *out_step_ns = 0;
    for (uint32_t i = 0; i < rule->warmup || i == 0; i++) {
        if (trainer_interrupted) return TASTE_STATUS_INTERRUPTED;
        uint64_t start = taste_now_ns();
        taste_status status = step(context, &ignored);
        if (status != TASTE_STATUS_OK) return status;
        uint64_t elapsed = taste_now_ns() - start;
        if (i == 0 || elapsed < *out_step_ns) *out_step_ns = elapsed;
        if ((double)elapsed * 1e-9 >= rule->seconds / 2) break;
    }
    return TASTE_STATUS_OK;
}

static void note_step(measurement *m, const taste_step *step) {
    uint32_t slot = (uint32_t)(m->steps % MEASURE_STEPS);
    m->forward_s[slot] = (float)((double)step->forward_ns * 1e-9);
    m->backward_s[slot] = (float)((double)step->backward_ns * 1e-9);
    m->update_s[slot] = (float)((double)step->update_ns * 1e-9);
    if (m->times < MEASURE_STEPS) m->times++;
    m->steps++;
    m->loss = step->loss;
}

static void report_window(const measurement *m, uint32_t window, uint64_t steps) {
    json_begin("counters");
    json_count("window", window);
    json_count("steps", steps);
    json_real("samples_per_s", m->samples_per_s[window % MEASURE_WINDOWS]);
    json_real("elapsed_s", m->elapsed_s);
    json_count("t_ns", taste_now_ns());
    json_end();
}

static int last_two_agree(const measurement *m) {
    if (m->windows < 2) return 0;
    double a = m->samples_per_s[m->windows - 1], b = m->samples_per_s[m->windows - 2];
    return fabs(a - b) <= agreement * fmax(a, b);
}

static int is_done(const measure_rule *rule, const measurement *m, int slow) {
    if (m->windows == MEASURE_WINDOWS) return 1;
    if (slow && last_two_agree(m)) return 1;
    return m->windows >= 2 && m->elapsed_s >= rule->seconds && m->steps >= rule->min_steps;
}

taste_status measure_run(const measure_rule *rule, measure_step step, void *context, uint32_t batch_size,
                         uint64_t step_ns, measurement *out) {
    double step_s = (double)step_ns * 1e-9 > 1e-7 ? (double)step_ns * 1e-9 : 1e-7;
    double wanted = rule->seconds / WINDOWS_A_RUN / step_s;
    uint64_t steps = wanted < 1 ? 1 : wanted > 1e7 ? 10000000 : (uint64_t)(wanted + 0.5);
    int slow = step_s >= rule->seconds / 2;
    while (!is_done(rule, out, slow)) {
        uint64_t start = taste_now_ns();
        for (uint64_t i = 0; i < steps; i++) {
            taste_step done;
            if (trainer_interrupted) return TASTE_STATUS_INTERRUPTED;
            taste_status status = step(context, &done);
            if (status != TASTE_STATUS_OK) return status;
            note_step(out, &done);
        }
        double elapsed = (double)(taste_now_ns() - start) * 1e-9;
        out->elapsed_s += elapsed;
        out->samples_per_s[out->windows++] = (double)batch_size * (double)steps / elapsed;
        report_window(out, out->windows - 1, steps);
    }
    return TASTE_STATUS_OK;
}
