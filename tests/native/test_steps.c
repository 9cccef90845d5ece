/* Steps against a reference that is as plain as can be: canonical layout, double precision, one loop a line of the mathematics. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mlp.h"

enum { ROWS = 10 };

typedef struct reference {
    double w1[HIDDEN][INPUTS], b1[HIDDEN], w2[CLASSES][HIDDEN], b2[CLASSES];
} reference;

typedef struct reference_state {
    reference weights, gradients, momentum;
    double mean[HIDDEN];
} reference_state;

static void read_reference(const opened *o, reference *r) {
    double *const at[] = {&r->w1[0][0], r->b1, &r->w2[0][0], r->b2};
    for (int p = 0; p < 4; p++) {
        float *values = malloc(parameter_counts[p] * sizeof *values);
        CHECK(taste_parameters_read(o->parameters, parameter_names[p], parameter_counts[p], values, NULL) ==
              TASTE_STATUS_OK);
        for (size_t i = 0; i < parameter_counts[p]; i++) at[p][i] = values[i];
        free(values);
    }
}

/* Forward and backward of one row; adds to the gradients of the mean over `rows` and to the mean of the hidden units. */
static double reference_row(reference_state *s, const float *x, int32_t label, uint32_t rows, double *scaled_sum) {
    const reference *w = &s->weights;
    reference *g = &s->gradients;
    static double h[HIDDEN], dh[HIDDEN];
    double z[CLASSES], total = 0, highest = -INFINITY;
    for (int k = 0; k < HIDDEN; k++) {
        h[k] = w->b1[k];
        for (int i = 0; i < INPUTS; i++) h[k] += w->w1[k][i] * x[i];
        if (h[k] < 0) h[k] = 0;
        scaled_sum[k] += 1.25 * h[k];
        dh[k] = 0;
    }
    for (int c = 0; c < CLASSES; c++) {
        z[c] = w->b2[c];
        for (int k = 0; k < HIDDEN; k++) z[c] += w->w2[c][k] * 1.25 * h[k];
        highest = fmax(highest, z[c]);
    }
    for (int c = 0; c < CLASSES; c++) total += exp(z[c] - highest);
    for (int c = 0; c < CLASSES; c++) {
        double dz = (exp(z[c] - highest) / total - (c == label)) / rows;
        g->b2[c] += dz;
        for (int k = 0; k < HIDDEN; k++) {
            g->w2[c][k] += dz * 1.25 * h[k];
            dh[k] += dz * w->w2[c][k] * 1.25;
        }
    }
    for (int k = 0; k < HIDDEN; k++) {
        if (h[k] <= 0) continue;
        g->b1[k] += dh[k];
        for (int i = 0; i < INPUTS; i++) g->w1[k][i] += dh[k] * x[i];
    }
    return log(total) - (z[label] - highest);
}

static double reference_gradients(reference_state *s, uint32_t rows, const float *x, const int32_t *y) {
    static double sum[HIDDEN];
    double loss = 0;
    memset(&s->gradients, 0, sizeof s->gradients);
    memset(sum, 0, sizeof sum);
    for (uint32_t n = 0; n < rows; n++) loss += reference_row(s, x + n * INPUTS, y[n], rows, sum);
    for (int k = 0; k < HIDDEN; k++) s->mean[k] = 0.9 * s->mean[k] + 0.1 * sum[k] / rows;
    return loss / rows;
}

/* PyTorch's SGD with clip_grad_norm_. */
static void reference_update(reference_state *s, const taste_hyper *h) {
    double *w = (double *)&s->weights, *g = (double *)&s->gradients, *m = (double *)&s->momentum, norm = 0;
    size_t count = sizeof(reference) / sizeof(double);
    for (size_t i = 0; i < count; i++) norm += g[i] * g[i];
    double clip = h->gradient_clip > 0 ? fmin(1, h->gradient_clip / (sqrt(norm) + 1e-6)) : 1;
    for (size_t i = 0; i < count; i++) {
        double d = g[i] * clip + h->weight_decay * w[i];
        m[i] = h->momentum * m[i] + d;
        w[i] -= h->learning_rate * (h->nesterov ? d + h->momentum * m[i] : m[i]);
    }
}

/* L2 norm of the difference / L2 norm. */
static double distance(const opened *o, const reference *r) {
    reference *ours = malloc(sizeof *ours);
    double difference = 0, norm = 0;
    read_reference(o, ours);
    for (size_t i = 0; i < sizeof *ours / sizeof(double); i++) {
        double a = ((const double *)ours)[i], b = ((const double *)r)[i];
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    free(ours);
    return sqrt(difference / norm);
}

static void check_state(const opened *o, const reference_state *s) {
    static float mean[HIDDEN];
    CHECK(taste_parameters_read(o->parameters, "scale.mean", HIDDEN, mean, NULL) == TASTE_STATUS_OK);
    for (int k = 0; k < HIDDEN; k++) CHECK(fabs(mean[k] - s->mean[k]) < 1e-5);
}

static void check_against_reference(const taste_hyper *hyper, uint32_t rows) {
    static float x[ROWS * INPUTS];
    static int32_t y[ROWS];
    reference_state *s = calloc(1, sizeof *s);
    opened o = open_model(2, ROWS, 0);
    taste_step step;
    make_rows(rows, x, y);
    read_reference(&o, &s->weights);
    for (int i = 0; i < 5; i++) {
        double loss = reference_gradients(s, rows, x, y);
        reference_update(s, hyper);
        CHECK(taste_session_step(o.session, o.parameters, 0, rows, x, y, hyper, &step) == TASTE_STATUS_OK);
        CHECK(fabs(step.loss - loss) < 1e-5 * loss);
    }
    CHECK(distance(&o, &s->weights) < 1e-6);
    check_state(&o, s);
    close_model(&o);
    free(s);
}

/* The same steps on `threads` threads; the bits of the whole parameter set. */
static void run_steps(uint32_t threads, unsigned char *out_bits, size_t bytes) {
    static float x[ROWS * INPUTS];
    static int32_t y[ROWS];
    const taste_hyper hyper = {
        .learning_rate = 0.05f, .momentum = 0.9f, .weight_decay = 1e-3f, .gradient_clip = 0.5f, .nesterov = 1};
    opened o = open_model(threads, ROWS, 0);
    taste_step step;
    make_rows(ROWS, x, y);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t rows = i % 2 == 0 ? ROWS : 3; /* the batch size changes between two steps */
        CHECK(taste_session_step(o.session, o.parameters, 0, rows, x, y, &hyper, &step) == TASTE_STATUS_OK);
        CHECK(step.gradient_norm > 0);
    }
    memcpy(out_bits, (unsigned char *)o.blocks[0] + 64, bytes);
    close_model(&o);
}

static void check_threads(void) {
    size_t bytes = taste_parameters_bytes(taste_model_get()) - 64;
    unsigned char *one = malloc(bytes), *more = malloc(bytes);
    run_steps(1, one, bytes);
    for (uint32_t threads = 2; threads <= 3; threads++) {
        run_steps(threads, more, bytes);
        CHECK(memcmp(one, more, bytes) == 0);
    }
    free(one), free(more);
}

/* Micro-batches of 4, 4 and 2 against one batch of 10: the same mean gradient. */
static void check_accumulation(void) {
    static float x[ROWS * INPUTS], whole[CLASSES * HIDDEN], sum[CLASSES * HIDDEN];
    static int32_t y[ROWS];
    const uint32_t parts[] = {4, 4, 2};
    const taste_hyper hyper = {.learning_rate = 0.1f};
    opened once = open_model(2, ROWS, 0), micro = open_model(2, 4, 1);
    taste_step step;
    make_rows(ROWS, x, y);
    CHECK(taste_session_gradients(once.session, once.parameters, 0, ROWS, ROWS, x, y, &step) == TASTE_STATUS_OK);
    CHECK(taste_gradient_read(once.session, "head.weight", CLASSES * HIDDEN, whole) == TASTE_STATUS_OK);
    for (int round = 0; round < 2; round++) { /* twice: an update must start the sum anew */
        uint32_t first = 0;
        for (int i = 0; i < 3; first += parts[i++]) {
            CHECK(taste_session_gradients(micro.session, micro.parameters, 0, parts[i], ROWS, x + first * INPUTS,
                                          y + first, &step) == TASTE_STATUS_OK);
        }
        CHECK(taste_gradient_read(micro.session, "head.weight", CLASSES * HIDDEN, sum) == TASTE_STATUS_OK);
        double difference = 0, norm = 0;
        for (int i = 0; i < CLASSES * HIDDEN; i++) {
            difference += ((double)whole[i] - sum[i]) * ((double)whole[i] - sum[i]);
            norm += (double)whole[i] * whole[i];
        }
        CHECK(norm > 0 && sqrt(difference / norm) < 1e-6);
        taste_hyper none = {.learning_rate = 0};
        CHECK(taste_session_update(micro.session, micro.parameters, 0, &none, &step) == TASTE_STATUS_OK);
    }
    CHECK(taste_session_update(once.session, once.parameters, 0, &hyper, &step) == TASTE_STATUS_OK);
    close_model(&once), close_model(&micro);
}

/* eval gives train's logits, over the same parameter set and, elsewhere, over a copy of it. */
static void check_predict(void) {
    static float x[ROWS * INPUTS], trained[ROWS * CLASSES], predicted[ROWS * CLASSES], other[ROWS * CLASSES];
    static int32_t y[ROWS];
    opened o = open_model(2, ROWS, 0), second = open_model(1, ROWS, 0);
    taste_step step;
    make_rows(ROWS, x, y);
    CHECK(taste_session_gradients(o.session, o.parameters, 0, ROWS, ROWS, x, y, &step) == TASTE_STATUS_OK);
    CHECK(taste_tensor_read(o.session, 0, ROWS, "logits", ROWS * CLASSES, trained) == TASTE_STATUS_OK);
    CHECK(taste_session_predict(o.session, o.parameters, 1, ROWS, x, predicted) == TASTE_STATUS_OK);
    CHECK(memcmp(trained, predicted, sizeof trained) == 0);
    uint32_t correct = 0;
    for (int n = 0; n < ROWS; n++) {
        int best = 0;
        for (int c = 1; c < CLASSES; c++) best = trained[n * CLASSES + c] > trained[n * CLASSES + best] ? c : best;
        correct += best == y[n];
    }
    CHECK(step.correct == correct);
    /* A parameter set is an argument of a run. */
    CHECK(taste_parameters_seed(second.parameters, 99, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_predict(o.session, second.parameters, 1, ROWS, x, other) == TASTE_STATUS_OK);
    CHECK(memcmp(other, predicted, sizeof other) != 0);
    CHECK(taste_session_predict(o.session, o.parameters, 1, ROWS, x, other) == TASTE_STATUS_OK);
    CHECK(memcmp(other, predicted, sizeof other) == 0);
    close_model(&o), close_model(&second);
}

void test_steps(void) {
    const taste_hyper plain = {.learning_rate = 0.1f};
    const taste_hyper momentum = {.learning_rate = 0.05f, .momentum = 0.9f, .weight_decay = 5e-3f};
    const taste_hyper nesterov = {
        .learning_rate = 0.05f, .momentum = 0.8f, .weight_decay = 5e-3f, .gradient_clip = 0.3f, .nesterov = 1};
    check_against_reference(&plain, ROWS);
    check_against_reference(&momentum, 3);
    check_against_reference(&nesterov, ROWS);
    check_threads();
    check_accumulation();
    check_predict();
}

/* For every k: forward[0..k] and forward[k..L], with the boundary carried over by name into another session, give the bits of
 * the whole; backward likewise. */
void test_cut_points(void) {
    static const char *const boundary[] = {"x", "hidden", "scaled", "logits"};
    static const char *const gradient[] = {"x.gradient", "hidden.gradient", "scaled.gradient", "logits.gradient"};
    static const size_t width[] = {INPUTS, HIDDEN, HIDDEN, CLASSES};
    static float x[ROWS * INPUTS], carried[ROWS * HIDDEN], whole[ROWS * CLASSES], parts[ROWS * CLASSES];
    static float dx_whole[ROWS * INPUTS], dx[ROWS * INPUTS], w_whole[HIDDEN * INPUTS], w[HIDDEN * INPUTS];
    static int32_t y[ROWS];
    make_rows(ROWS, x, y);
    opened o = open_model(2, ROWS, 0);
    CHECK(taste_session_load(o.session, 0, ROWS, x, y) == TASTE_STATUS_OK);
    CHECK(taste_session_run(o.session, o.parameters, 0, TASTE_RUN_ALL, 0, 3, ROWS) == TASTE_STATUS_OK);
    CHECK(taste_tensor_read(o.session, 0, ROWS, "logits", ROWS * CLASSES, whole) == TASTE_STATUS_OK);
    CHECK(taste_tensor_read(o.session, 0, ROWS, "x.gradient", ROWS * INPUTS, dx_whole) == TASTE_STATUS_OK);
    CHECK(taste_gradient_read(o.session, "hidden.weight", HIDDEN * INPUTS, w_whole) == TASTE_STATUS_OK);
    for (uint32_t k = 0; k <= 3; k++) {
        opened first = open_model(1, ROWS, 0), second = open_model(2, ROWS, 0);
        CHECK(taste_session_load(first.session, 0, ROWS, x, y) == TASTE_STATUS_OK);
        CHECK(taste_session_load(second.session, 0, ROWS, x, y) == TASTE_STATUS_OK);
        CHECK(taste_session_run(first.session, first.parameters, 0, TASTE_RUN_FORWARD, 0, k, ROWS) == TASTE_STATUS_OK);
        CHECK(taste_tensor_read(first.session, 0, ROWS, boundary[k], ROWS * width[k], carried) == TASTE_STATUS_OK);
        CHECK(taste_tensor_write(second.session, 0, ROWS, boundary[k], carried, ROWS * width[k]) == TASTE_STATUS_OK);
        CHECK(taste_session_run(second.session, second.parameters, 0, TASTE_RUN_ALL, k, 3, ROWS) == TASTE_STATUS_OK);
        CHECK(taste_tensor_read(second.session, 0, ROWS, "logits", ROWS * CLASSES, parts) == TASTE_STATUS_OK);
        CHECK(memcmp(whole, parts, sizeof whole) == 0);
        CHECK(taste_tensor_read(second.session, 0, ROWS, gradient[k], ROWS * width[k], carried) == TASTE_STATUS_OK);
        CHECK(taste_tensor_write(first.session, 0, ROWS, gradient[k], carried, ROWS * width[k]) == TASTE_STATUS_OK);
        CHECK(taste_session_run(first.session, first.parameters, 0, TASTE_RUN_BACKWARD, 0, k, ROWS) == TASTE_STATUS_OK);
        if (k > 0) {
            CHECK(taste_tensor_read(first.session, 0, ROWS, "x.gradient", ROWS * INPUTS, dx) == TASTE_STATUS_OK);
            CHECK(taste_gradient_read(first.session, "hidden.weight", HIDDEN * INPUTS, w) == TASTE_STATUS_OK);
            CHECK(memcmp(dx, dx_whole, sizeof dx) == 0 && memcmp(w, w_whole, sizeof w) == 0);
        }
        close_model(&first), close_model(&second);
    }
    close_model(&o);
}

/* Rows are classified among their own group: loss, gradient and correct ones against the definition; other classes exactly 0. */
void test_class_groups(void) {
    static const uint16_t groups[CLASSES] = {0, 1, 0, 1, 1}, one[CLASSES] = {3, 3, 3, 3, 3};
    static float x[ROWS * INPUTS], logits[ROWS * CLASSES], slope[ROWS * CLASSES], plain[ROWS * CLASSES];
    static int32_t y[ROWS];
    double loss = 0;
    uint32_t correct = 0;
    taste_step step, plain_step;
    make_rows(ROWS, x, y);
    opened o = open_model(2, ROWS, 0);
    CHECK(taste_session_predict(o.session, o.parameters, 1, ROWS, x, logits) == TASTE_STATUS_OK);
    CHECK(taste_session_set_class_groups(o.session, groups) == TASTE_STATUS_OK);
    CHECK(taste_session_gradients(o.session, o.parameters, 0, ROWS, ROWS, x, y, &step) == TASTE_STATUS_OK);
    CHECK(taste_tensor_read(o.session, 0, ROWS, "logits.gradient", ROWS * CLASSES, slope) == TASTE_STATUS_OK);
    for (int row = 0; row < ROWS; row++) {
        const float *z = logits + row * CLASSES, *dz = slope + row * CLASSES;
        double total = 0;
        int best = y[row];
        for (int c = 0; c < CLASSES; c++) {
            if (groups[c] != groups[y[row]]) continue;
            total += exp((double)z[c]);
            if (z[c] > z[best] || (z[c] >= z[best] && c < best)) best = c;
        }
        for (int c = 0; c < CLASSES; c++) {
            double wanted = groups[c] == groups[y[row]] ? (exp((double)z[c]) / total - (c == y[row])) / ROWS : 0;
            CHECK(wanted != 0 ? fabs(dz[c] - wanted) < 1e-6 : fpclassify(dz[c]) == FP_ZERO);
        }
        loss += (log(total) - z[y[row]]) / ROWS;
        correct += best == y[row];
    }
    CHECK(fabs(step.loss - loss) < 1e-5 && step.correct == correct);
    CHECK(taste_session_set_label_smoothing(o.session, 0.1f) == TASTE_STATUS_USAGE);
    CHECK(taste_session_set_class_groups(o.session, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_gradients(o.session, o.parameters, 0, ROWS, ROWS, x, y, &plain_step) == TASTE_STATUS_OK);
    CHECK(taste_tensor_read(o.session, 0, ROWS, "logits.gradient", ROWS * CLASSES, plain) == TASTE_STATUS_OK);
    CHECK(taste_session_set_class_groups(o.session, one) == TASTE_STATUS_OK);
    CHECK(taste_session_gradients(o.session, o.parameters, 0, ROWS, ROWS, x, y, &step) == TASTE_STATUS_OK);
    CHECK(taste_tensor_read(o.session, 0, ROWS, "logits.gradient", ROWS * CLASSES, slope) == TASTE_STATUS_OK);
    CHECK(memcmp(plain, slope, sizeof plain) == 0 && step.loss <= plain_step.loss && step.loss >= plain_step.loss);
    CHECK(taste_session_set_class_groups(o.session, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_set_label_smoothing(o.session, 0.1f) == TASTE_STATUS_OK);
    CHECK(taste_session_set_class_groups(o.session, groups) == TASTE_STATUS_USAGE);
    close_model(&o);
}
