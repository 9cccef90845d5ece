/* Every refusal has its status and says what and what to do; sessions side by side do not disturb each other. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mlp.h"
#include "program.h"

enum { ROWS = 6 };

static float x[ROWS * INPUTS];
static int32_t y[ROWS];
static const taste_hyper hyper = {.learning_rate = 0.05f, .momentum = 0.9f};

#define REFUSED(call, status, words) \
    do { \
        CHECK((call) == (status)); \
        CHECK(strstr(text, words) != NULL); \
        if (strstr(text, words) == NULL) printf("  said: %s\n", text); \
    } while (0)

static void check_openings(void) {
    taste_model changed = taste_model_table;
    taste_use use = {0, 1};
    const taste_session_options options = {1, 0};
    taste_error error;
    const char *text = error.text;
    size_t bytes;
    changed.minimum_batch = 2;
    REFUSED(taste_session_bytes(&changed, &use, 1, &options, &bytes, &error), TASTE_STATUS_USAGE,
            "batch size 1 is too small");
    use.program = 1; /* eval may see a single row */
    CHECK(taste_session_bytes(&changed, &use, 1, &options, &bytes, &error) == TASTE_STATUS_OK);
    use.program = 9;
    REFUSED(taste_session_bytes(&changed, &use, 1, &options, &bytes, &error), TASTE_STATUS_USAGE, "program 9 of 3");
    use = (taste_use){0, 0};
    REFUSED(taste_session_bytes(&taste_model_table, &use, 1, &options, &bytes, &error), TASTE_STATUS_USAGE,
            "batch size 0");
    changed.table_version = 99;
    REFUSED(taste_session_bytes(&changed, &use, 1, &options, &bytes, &error), TASTE_STATUS_INCOMPATIBLE, "version 99");
    changed = taste_model_table;
    changed.features = "warp_drive";
    REFUSED(taste_model_check_cpu(&changed, &error), TASTE_STATUS_INCOMPATIBLE, "lacks 'warp_drive'");
    CHECK(taste_model_check_cpu(&taste_model_table, &error) == TASTE_STATUS_OK);
    unsigned char *block = new_block(256);
    taste_parameters *parameters;
    taste_session *session;
    REFUSED(taste_parameters_init(&taste_model_table, block + 8, 1 << 30, &parameters, &error), TASTE_STATUS_USAGE,
            "not aligned");
    REFUSED(taste_parameters_init(&taste_model_table, block, 256, &parameters, &error), TASTE_STATUS_DOES_NOT_FIT,
            "needs");
    use = (taste_use){0, 3};
    REFUSED(taste_session_init(&taste_model_table, &use, 1, &options, NULL, block, 256, &session, &error),
            TASTE_STATUS_USAGE, "pool");
    REFUSED(
        taste_session_init(&taste_model_table, &use, 1, &options, (taste_pool *)block, block, 256, &session, &error),
        TASTE_STATUS_DOES_NOT_FIT, "a session needs");
    uint32_t program;
    CHECK(taste_model_find_program(&taste_model_table, "dance", &program) == TASTE_STATUS_USAGE);
    free(block);
}

static void check_runs(opened *o) {
    const char *text = taste_session_error(o->session);
    taste_step step;
    float value = 0;
    int32_t wrong[ROWS] = {0, 1, 2, CLASSES, 0, 0};
    REFUSED(taste_session_step(o->session, o->parameters, 0, ROWS + 1, x, y, &hyper, &step), TASTE_STATUS_DOES_NOT_FIT,
            "batch size 7");
    REFUSED(taste_session_step(o->session, o->parameters, 0, 0, x, y, &hyper, &step), TASTE_STATUS_USAGE,
            "batch size 0");
    REFUSED(taste_session_step(o->session, o->parameters, 1, ROWS, x, y, &hyper, &step), TASTE_STATUS_USAGE,
            "eval has no loss");
    REFUSED(taste_session_step(o->session, o->parameters, 5, ROWS, x, y, &hyper, &step), TASTE_STATUS_USAGE, "no loss");
    REFUSED(taste_session_step(o->session, o->parameters, 0, ROWS, x, wrong, &hyper, &step), TASTE_STATUS_USAGE,
            "row 3 has label 5");
    REFUSED(taste_session_gradients(o->session, o->parameters, 0, 4, 3, x, y, &step), TASTE_STATUS_USAGE,
            "effective batch 3");
    REFUSED(taste_session_run(o->session, o->parameters, 0, TASTE_RUN_ALL, 2, 4, ROWS), TASTE_STATUS_USAGE, "3 blocks");
    REFUSED(taste_session_run(o->session, o->parameters, 0, 8, 0, 3, ROWS), TASTE_STATUS_USAGE, "phases 8");
    REFUSED(taste_tensor_read(o->session, 0, ROWS, "nothing", 1, &value), TASTE_STATUS_USAGE, "no tensor 'nothing'");
    REFUSED(taste_tensor_write(o->session, 0, ROWS, "hidden", &value, 1), TASTE_STATUS_USAGE,
            "'hidden' has 6012 elements");
    REFUSED(taste_gradient_read(o->session, "scale.mean", HIDDEN, &value), TASTE_STATUS_USAGE,
            "no parameter 'scale.mean'");
    REFUSED(taste_gradient_read(o->session, "head.bias", 4, &value), TASTE_STATUS_USAGE, "has 5 elements, not 4");
    const taste_hyper bad = {.learning_rate = NAN};
    REFUSED(taste_session_step(o->session, o->parameters, 0, ROWS, x, y, &bad, &step), TASTE_STATUS_USAGE,
            "do not go together");
    const taste_hyper alone = {.learning_rate = 0.1f, .nesterov = 1};
    REFUSED(taste_session_step(o->session, o->parameters, 0, ROWS, x, y, &alone, &step), TASTE_STATUS_USAGE,
            "do not go together");
    REFUSED(taste_session_update(o->session, o->parameters, 1, &hyper, &step), TASTE_STATUS_USAGE, "trains nothing");
    taste_error error;
    text = error.text;
    REFUSED(taste_parameters_read(o->parameters, "head.bias", 9, &value, &error), TASTE_STATUS_USAGE, "has 5 elements");
    REFUSED(taste_parameters_write(o->parameters, "head.tail", &value, 1, &error), TASTE_STATUS_USAGE, "'head.tail'");
    CHECK(taste_parameters_write_range(o->parameters, 0, HIDDEN * INPUTS, 1, &value) == TASTE_STATUS_USAGE);
}

/* A NaN anywhere ends the step that meets it, and the text names where it was. */
static void check_non_finite(void) {
    static float values[HIDDEN * INPUTS], after[HIDDEN * INPUTS];
    static float bad_x[ROWS * INPUTS];
    opened o = open_model(2, ROWS, 0);
    const char *text = taste_session_error(o.session);
    taste_step step;
    memcpy(bad_x, x, sizeof bad_x);
    bad_x[7] = INFINITY;
    REFUSED(taste_session_step(o.session, o.parameters, 0, ROWS, bad_x, y, &hyper, &step), TASTE_STATUS_NON_FINITE,
            "in 'x'");
    CHECK(taste_parameters_read(o.parameters, "hidden.weight", HIDDEN * INPUTS, values, NULL) == TASTE_STATUS_OK);
    values[11] = NAN;
    CHECK(taste_parameters_write(o.parameters, "hidden.weight", values, HIDDEN * INPUTS, NULL) == TASTE_STATUS_OK);
    /* ReLU lets a NaN of the kernels' comparison fall to 0, so put it where it passes. */
    float bias[CLASSES] = {0, NAN, 0, 0, 0};
    CHECK(taste_parameters_write(o.parameters, "head.bias", bias, CLASSES, NULL) == TASTE_STATUS_OK);
    REFUSED(taste_session_step(o.session, o.parameters, 0, ROWS, x, y, &hyper, &step), TASTE_STATUS_NON_FINITE,
            "in 'hidden.weight'");
    CHECK(taste_parameters_seed(o.parameters, 7, NULL) == TASTE_STATUS_OK);
    /* A gradient: run backward from a boundary gradient that holds one. */
    static float gradient[ROWS * CLASSES];
    gradient[3] = NAN;
    taste_hyper clipped = hyper;
    clipped.gradient_clip = 1;
    CHECK(taste_session_load(o.session, 0, ROWS, x, y) == TASTE_STATUS_OK);
    CHECK(taste_session_run(o.session, o.parameters, 0, TASTE_RUN_FORWARD, 0, 3, ROWS) == TASTE_STATUS_OK);
    CHECK(taste_tensor_write(o.session, 0, ROWS, "logits.gradient", gradient, ROWS * CLASSES) == TASTE_STATUS_OK);
    CHECK(taste_session_run(o.session, o.parameters, 0, TASTE_RUN_BACKWARD, 0, 3, ROWS) == TASTE_STATUS_OK);
    CHECK(taste_parameters_read(o.parameters, "hidden.weight", HIDDEN * INPUTS, values, NULL) == TASTE_STATUS_OK);
    REFUSED(taste_session_update(o.session, o.parameters, 0, &clipped, &step), TASTE_STATUS_NON_FINITE,
            "gradient of 'hidden.weight'");
    CHECK(taste_parameters_read(o.parameters, "hidden.weight", HIDDEN * INPUTS, after, NULL) == TASTE_STATUS_OK);
    CHECK(memcmp(values, after, sizeof values) == 0);
    REFUSED(taste_session_update(o.session, o.parameters, 0, &hyper, &step), TASTE_STATUS_NON_FINITE, "gradient of");
    close_model(&o);
}

/* A session opened for eval alone has no gradients; one of another model's table is refused. */
static void check_eval_only(void) {
    taste_model other = taste_model_table;
    taste_use use = {1, ROWS};
    const taste_session_options options = {0, 0};
    taste_error error;
    taste_step step;
    taste_session *session;
    taste_parameters *strangers;
    float value[CLASSES];
    size_t bytes = 0, parameters_bytes = taste_parameters_bytes(&other);
    opened o = open_model(1, ROWS, 0);
    CHECK(taste_session_bytes(o.model, &use, 1, &options, &bytes, &error) == TASTE_STATUS_OK);
    void *block = new_block(bytes), *strange = new_block(parameters_bytes);
    CHECK(taste_session_init(o.model, &use, 1, &options, o.pool, block, bytes, &session, &error) == TASTE_STATUS_OK);
    CHECK(taste_parameters_init(&other, strange, parameters_bytes, &strangers, &error) == TASTE_STATUS_OK);
    const char *text = taste_session_error(session);
    REFUSED(taste_gradient_read(session, "head.bias", CLASSES, value), TASTE_STATUS_USAGE, "no gradient of");
    REFUSED(taste_session_step(session, o.parameters, 0, ROWS, x, y, &hyper, &step), TASTE_STATUS_USAGE,
            "was not opened");
    REFUSED(taste_session_infer(session, strangers, 1, ROWS, x, &step), TASTE_STATUS_INCOMPATIBLE, "another model");
    CHECK(taste_session_infer(session, o.parameters, 1, ROWS, x, &step) == TASTE_STATUS_OK);
    close_model(&o);
    free(block), free(strange);
}

/* Where blocks share what they keep, backward of some of them is refused; of all, and forward of any, it runs. */
static void check_joined_backward(void) {
    taste_model joined = taste_model_table;
    taste_program programs[3];
    taste_use use = {0, ROWS};
    const taste_session_options options = {0, 0};
    taste_error error;
    taste_session *session;
    taste_parameters *parameters;
    size_t bytes = 0, parameters_bytes = taste_parameters_bytes(&joined);
    opened o = open_model(1, ROWS, 0);
    memcpy(programs, joined.programs, sizeof programs);
    programs[0].joined_backward = 1;
    joined.programs = programs;
    CHECK(taste_session_bytes(&joined, &use, 1, &options, &bytes, &error) == TASTE_STATUS_OK);
    void *block = new_block(bytes), *own = new_block(parameters_bytes);
    CHECK(taste_session_init(&joined, &use, 1, &options, o.pool, block, bytes, &session, &error) == TASTE_STATUS_OK);
    CHECK(taste_parameters_init(&joined, own, parameters_bytes, &parameters, &error) == TASTE_STATUS_OK);
    CHECK(taste_parameters_seed(parameters, 7, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_load(session, 0, ROWS, x, y) == TASTE_STATUS_OK);
    CHECK(taste_session_run(session, parameters, 0, TASTE_RUN_FORWARD, 0, 2, ROWS) == TASTE_STATUS_OK);
    const char *text = taste_session_error(session);
    REFUSED(taste_session_run(session, parameters, 0, TASTE_RUN_ALL, 2, 3, ROWS), TASTE_STATUS_USAGE, "over all 3");
    REFUSED(taste_session_run(session, parameters, 0, TASTE_RUN_BACKWARD, 0, 2, ROWS), TASTE_STATUS_USAGE,
            "blocks 0 to 2");
    CHECK(taste_session_run(session, parameters, 0, TASTE_RUN_ALL, 0, 3, ROWS) == TASTE_STATUS_OK);
    close_model(&o);
    free(block), free(own);
}

void test_errors(void) {
    make_rows(ROWS, x, y);
    check_openings();
    opened o = open_model(2, ROWS, 0);
    check_runs(&o);
    close_model(&o);
    check_non_finite();
    check_eval_only();
    check_joined_backward();
}

typedef struct side {
    opened *o;
    double loss;
} side;

static void *train_side(void *argument) {
    side *s = argument;
    taste_step step = {0};
    for (int i = 0; i < 10; i++) {
        CHECK(taste_session_step(s->o->session, s->o->parameters, 0, ROWS, x, y, &hyper, &step) == TASTE_STATUS_OK);
    }
    s->loss = step.loss;
    return NULL;
}

/* Two sessions in two threads: once with a pool each, once sharing one. All four losses are the same bits. */
void test_sessions_side_by_side(void) {
    double losses[4];
    for (int shared = 0; shared < 2; shared++) {
        opened a = open_model(2, ROWS, 0), b = open_model(2, ROWS, 0);
        taste_pool *own = b.pool;
        const taste_use use = {0, ROWS};
        const taste_session_options options = {1, 0};
        size_t bytes = 0;
        void *block = NULL;
        if (shared) {
            CHECK(taste_session_bytes(b.model, &use, 1, &options, &bytes, NULL) == TASTE_STATUS_OK);
            block = new_block(bytes);
            CHECK(taste_session_init(b.model, &use, 1, &options, a.pool, block, bytes, &b.session, NULL) ==
                  TASTE_STATUS_OK);
        }
        side sides[2] = {{&a, 0}, {&b, 0}};
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, train_side, &sides[i]) == 0);
        for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        losses[2 * shared] = sides[0].loss;
        losses[2 * shared + 1] = sides[1].loss;
        b.pool = own;
        close_model(&a), close_model(&b);
        free(block);
    }
    for (int i = 1; i < 4; i++) CHECK(memcmp(&losses[i], &losses[0], sizeof losses[0]) == 0);
}
