/* A timed run computes what an untimed one does; facts of calls are those of the tables; the limits are measured or refused. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mlp.h"
#include "program.h"

enum { ROWS = 6, MEMORY_BYTES = 1 << 20 };

static float x[ROWS * INPUTS];
static int32_t y[ROWS];

static void check_call_facts(void) {
    const taste_model *model = &taste_model_table;
    taste_call_facts facts;
    for (uint32_t p = 0; p < model->program_count; p++) {
        for (uint32_t c = 0; c < model->programs[p].call_count; c++) {
            const taste_call *call = &model->programs[p].calls[c];
            uint64_t fixed = 0, batched = 0;
            CHECK(taste_model_call(model, p, c, &facts) == TASTE_STATUS_OK);
            for (int a = 0; a < call->argument_count; a++) {
                const taste_tensor *tensor = &model->tensors[call->arguments[a]];
                if (tensor->region == TASTE_REGION_BATCHED)
                    batched += tensor->size_bytes;
                else
                    fixed += tensor->size_bytes;
            }
            /* An update writes its parameter too, and reads and writes the momentum. */
            if (call->kernel == NULL) fixed += 3 * model->tensors[call->arguments[0]].size_bytes;
            CHECK(strcmp(facts.name, call->name) == 0);
            CHECK(facts.fixed_bytes == fixed && facts.per_sample_bytes == batched);
            CHECK(facts.fixed_flops == call->fixed_flops && facts.per_sample_flops == call->per_sample_flops);
        }
        CHECK(taste_model_call(model, p, model->programs[p].call_count, &facts) == TASTE_STATUS_USAGE);
    }
    CHECK(taste_model_call(model, model->program_count, 0, &facts) == TASTE_STATUS_USAGE);
}

static void check_same_gradients(uint32_t threads) {
    opened plain = open_model(threads, ROWS, 0), timed = open_model(threads, ROWS, 0);
    uint32_t calls = taste_model_table.programs[0].call_count;
    uint64_t *ns = malloc(calls * sizeof *ns);
    taste_step step;
    make_rows(ROWS, x, y);
    memset(ns, 0xff, calls * sizeof *ns);
    CHECK(taste_session_gradients(plain.session, plain.parameters, 0, ROWS, ROWS, x, y, &step) == TASTE_STATUS_OK);
    CHECK(taste_session_load(timed.session, 0, ROWS, x, y) == TASTE_STATUS_OK);
    CHECK(taste_session_profile(timed.session, timed.parameters, 0, ROWS, NULL, calls, ns) == TASTE_STATUS_OK);
    for (uint32_t c = 0; c < calls; c++) CHECK(ns[c] < 10000000000u);
    for (int p = 0; p < 4; p++) {
        float *a = malloc(parameter_counts[p] * sizeof *a), *b = malloc(parameter_counts[p] * sizeof *b);
        CHECK(taste_gradient_read(plain.session, parameter_names[p], parameter_counts[p], a) == TASTE_STATUS_OK);
        CHECK(taste_gradient_read(timed.session, parameter_names[p], parameter_counts[p], b) == TASTE_STATUS_OK);
        CHECK(memcmp(a, b, parameter_counts[p] * sizeof *a) == 0);
        free(a);
        free(b);
    }
    CHECK(taste_session_profile(timed.session, timed.parameters, 0, ROWS, NULL, calls - 1, ns) == TASTE_STATUS_USAGE);
    CHECK(strstr(taste_session_error(timed.session), "Hand in all of them") != NULL);
    CHECK(taste_session_profile(timed.session, timed.parameters, 7, ROWS, NULL, calls, ns) == TASTE_STATUS_USAGE);
    free(ns);
    close_model(&plain);
    close_model(&timed);
}

static void check_limits(void) {
    opened o = open_model(2, ROWS, 0);
    unsigned char *memory = new_block(MEMORY_BYTES);
    taste_limits limits = {0};
    taste_error error;
    CHECK(taste_pool_measure(o.pool, o.model, memory, MEMORY_BYTES, &limits, &error) == TASTE_STATUS_OK);
    CHECK(limits.flops_per_s > 1e5 && limits.bytes_per_s > 1e5);
    CHECK(taste_pool_measure(o.pool, o.model, memory, 1024, &limits, &error) == TASTE_STATUS_DOES_NOT_FIT);
    CHECK(strstr(error.text, "1024 bytes") != NULL && strstr(error.text, "2 threads") != NULL);
    CHECK(taste_pool_measure(o.pool, o.model, memory + 4, 65536, &limits, &error) == TASTE_STATUS_USAGE);
    CHECK(strstr(error.text, "not aligned") != NULL);
    free(memory);
    close_model(&o);
}

void test_profile(void) {
    check_call_facts();
    check_same_gradients(1);
    check_same_gradients(2);
    check_limits();
}
