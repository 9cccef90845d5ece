/* A program that updates parameters within backward does what the one with a pass of its own does, to the bit, in less memory. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mlp.h"

enum { ROWS = 10, TRAIN = 0, EVAL = 1, FUSED = 2 };

static float x[ROWS * INPUTS];
static int32_t y[ROWS];

static opened open_program(uint32_t threads, uint32_t program, uint32_t slots) {
    const taste_use uses[] = {{program, ROWS}, {EVAL, ROWS}};
    const taste_session_options options = {.slots = slots};
    return open_uses(threads, uses, 2, &options);
}

static void check_same_values(const opened *a, const opened *b, const char *name, size_t count) {
    static float left[INPUTS * HIDDEN], right[INPUTS * HIDDEN];
    CHECK(taste_parameters_read(a->parameters, name, count, left, NULL) == TASTE_STATUS_OK);
    CHECK(taste_parameters_read(b->parameters, name, count, right, NULL) == TASTE_STATUS_OK);
    CHECK(memcmp(left, right, count * sizeof *left) == 0);
}

/* All bits of parameters, states and the optimizer's state. */
static void check_same(const opened *a, const opened *b, uint32_t slots) {
    static float left[INPUTS * HIDDEN], right[INPUTS * HIDDEN];
    for (uint32_t p = 0; p < 4; p++) check_same_values(a, b, parameter_names[p], parameter_counts[p]);
    check_same_values(a, b, "scale.mean", HIDDEN);
    for (uint32_t slot = 0; slot < slots; slot++) {
        for (uint32_t p = 0; p < 4; p++) {
            size_t count = parameter_counts[p];
            taste_status status = taste_slot_read(a->session, slot, p, 0, count, left);
            CHECK(taste_slot_read(b->session, slot, p, 0, count, right) == status);
            CHECK(status != TASTE_STATUS_OK || memcmp(left, right, count * sizeof *left) == 0);
        }
    }
}

static void check_same_steps(const taste_hyper *hyper, uint32_t slots, uint32_t threads) {
    opened apart = open_program(1, TRAIN, slots), fused = open_program(threads, FUSED, slots);
    taste_step step, fused_step;
    for (int i = 0; i < 4; i++) {
        uint32_t rows = i % 2 == 0 ? ROWS : 3;
        CHECK(taste_session_step(apart.session, apart.parameters, TRAIN, rows, x, y, hyper, &step) == TASTE_STATUS_OK);
        CHECK(taste_session_step(fused.session, fused.parameters, FUSED, rows, x, y, hyper, &fused_step) ==
              TASTE_STATUS_OK);
        CHECK(memcmp(&step.loss, &fused_step.loss, sizeof step.loss) == 0 && step.correct == fused_step.correct);
        CHECK(fused_step.update_ns > 0 && fused_step.backward_ns > 0 && fused_step.backward_ns < 10000000000u);
    }
    check_same(&apart, &fused, slots);
    close_model(&apart), close_model(&fused);
}

/* Every call timed is a step too. */
static void check_profile(const taste_hyper *hyper) {
    opened plain = open_program(2, FUSED, 1), timed = open_program(2, FUSED, 1);
    taste_program_facts facts;
    taste_step step;
    CHECK(taste_model_program(plain.model, FUSED, &facts) == TASTE_STATUS_OK && facts.fused_update == 1);
    uint64_t *ns = malloc(facts.call_count * sizeof *ns);
    CHECK(taste_session_step(plain.session, plain.parameters, FUSED, ROWS, x, y, hyper, &step) == TASTE_STATUS_OK);
    CHECK(taste_session_load(timed.session, FUSED, ROWS, x, y) == TASTE_STATUS_OK);
    CHECK(taste_session_profile(timed.session, timed.parameters, FUSED, ROWS, NULL, facts.call_count, ns) ==
          TASTE_STATUS_USAGE);
    CHECK(taste_session_profile(timed.session, timed.parameters, FUSED, ROWS, hyper, facts.call_count, ns) ==
          TASTE_STATUS_OK);
    check_same(&plain, &timed, 1);
    free(ns);
    close_model(&plain), close_model(&timed);
}

/* No gradients but those of one layer at a time. */
static void check_size(const taste_model *model) {
    const taste_session_options options = {.slots = 1};
    taste_program_facts train, fused;
    size_t train_bytes, fused_bytes;
    const taste_use apart = {TRAIN, ROWS}, together = {FUSED, ROWS};
    CHECK(taste_session_bytes(model, &apart, 1, &options, &train_bytes, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_bytes(model, &together, 1, &options, &fused_bytes, NULL) == TASTE_STATUS_OK);
    CHECK(taste_model_program(model, TRAIN, &train) == TASTE_STATUS_OK);
    CHECK(taste_model_program(model, FUSED, &fused) == TASTE_STATUS_OK);
    uint64_t in_turn = fused.arena_fixed_bytes - train.arena_fixed_bytes;
    CHECK(train_bytes - fused_bytes + in_turn >= (INPUTS + CLASSES) * (uint64_t)STORED * sizeof(float));
    CHECK(in_turn < (INPUTS + CLASSES) * (uint64_t)STORED * sizeof(float));
}

#define REFUSED(call, words) \
    do { \
        CHECK((call) == TASTE_STATUS_USAGE); \
        CHECK(strstr(taste_session_error(o.session), words) != NULL); \
    } while (0)

static void check_refusals(const taste_hyper *hyper) {
    const taste_use uses[] = {{TRAIN, ROWS}, {FUSED, ROWS}};
    const taste_session_options options = {.slots = 1, .accumulate = 1};
    opened o = open_uses(2, uses, 2, &options);
    taste_hyper clipped = *hyper;
    taste_step step;
    float bias[HIDDEN];
    clipped.gradient_clip = 1;
    REFUSED(taste_session_step(o.session, o.parameters, FUSED, ROWS, x, y, &clipped, &step), "gradient clip 1");
    REFUSED(taste_session_gradients(o.session, o.parameters, FUSED, ROWS, ROWS, x, y, &step), "within its steps");
    REFUSED(taste_session_update(o.session, o.parameters, FUSED, hyper, &step), "within its steps");
    REFUSED(taste_session_run(o.session, o.parameters, FUSED, TASTE_RUN_BACKWARD, 0, 3, ROWS), "within its steps");
    CHECK(taste_session_load(o.session, FUSED, ROWS, x, y) == TASTE_STATUS_OK);
    CHECK(taste_session_run(o.session, o.parameters, FUSED, TASTE_RUN_FORWARD, 0, 3, ROWS) == TASTE_STATUS_OK);
    CHECK(taste_session_gradients(o.session, o.parameters, TRAIN, ROWS, ROWS, x, y, &step) == TASTE_STATUS_OK);
    REFUSED(taste_session_step(o.session, o.parameters, FUSED, ROWS, x, y, hyper, &step), "1 micro-batches");
    CHECK(taste_session_update(o.session, o.parameters, TRAIN, hyper, &step) == TASTE_STATUS_OK);
    CHECK(taste_session_step(o.session, o.parameters, FUSED, ROWS, x, y, hyper, &step) == TASTE_STATUS_OK);
    close_model(&o);
    o = open_program(1, FUSED, 1);
    REFUSED(taste_gradient_read(o.session, "hidden.bias", HIDDEN, bias), "no gradient");
    close_model(&o);
}

/* A finite loss whose slope overflows: (1e20 of the head) times (1e25 of the input). */
static void check_non_finite(const taste_hyper *hyper) {
    static float zeros[INPUTS * HIDDEN], small[HIDDEN], large[CLASSES * HIDDEN], far[ROWS * INPUTS];
    opened o = open_program(2, FUSED, 1);
    taste_step step;
    for (int i = 0; i < HIDDEN; i++) small[i] = 1e-30f;
    for (int i = 0; i < CLASSES * HIDDEN; i++) large[i] = 1e20f * (float)(i / HIDDEN);
    for (int i = 0; i < ROWS * INPUTS; i++) far[i] = 1e25f;
    CHECK(taste_parameters_write(o.parameters, "hidden.weight", zeros, INPUTS * HIDDEN, NULL) == TASTE_STATUS_OK);
    CHECK(taste_parameters_write(o.parameters, "hidden.bias", small, HIDDEN, NULL) == TASTE_STATUS_OK);
    CHECK(taste_parameters_write(o.parameters, "head.weight", large, CLASSES * HIDDEN, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_step(o.session, o.parameters, FUSED, ROWS, far, y, hyper, &step) == TASTE_STATUS_NON_FINITE);
    CHECK(strstr(taste_session_error(o.session), "gradient of 'hidden.weight'") != NULL);
    close_model(&o);
}

void test_fused(void) {
    const taste_hyper plain = {.learning_rate = 0.1f};
    const taste_hyper momentum = {.learning_rate = 0.05f, .momentum = 0.9f, .weight_decay = 5e-3f};
    taste_hyper nesterov = momentum, adam = {.learning_rate = 1e-3f, .optimizer = TASTE_OPTIMIZER_ADAM};
    nesterov.nesterov = nesterov.no_decay_norm = 1;
    adam.beta1 = 0.9f, adam.beta2 = 0.99f, adam.epsilon = 1e-8f, adam.weight_decay = 0.01f;
    taste_hyper adamw = adam;
    adamw.optimizer = TASTE_OPTIMIZER_ADAMW;
    make_rows(ROWS, x, y);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        check_same_steps(&plain, 0, threads);
        check_same_steps(&momentum, 1, threads);
        check_same_steps(&nesterov, 1, threads);
        check_same_steps(&adam, 2, threads);
        check_same_steps(&adamw, 2, threads);
    }
    check_profile(&momentum);
    check_size(taste_model_get());
    check_refusals(&momentum);
    check_non_finite(&momentum);
}
