/* taste-train profile: where the time of a step goes, kernel by kernel, and what bounds each. */
#include <sys/mman.h>

#include "clock.h"
#include "error.h"
#include "json.h"
#include "measure.h"
#include "samples.h"
#include "taint.h"
#include "trainer.h"
#include "verbs.h"

enum {
    MEMORY_BYTES = 96 << 20, /* that the limits are measured on: more than the caches of most boards */
    MOST_RUNS = 256,
    LEAST_RUNS = 3
};

/* What `profile` needs beside the run's own block: times of every call and run, then memory for the limits. */
typedef struct profile {
    trainer t;
    float *ms; /* [call_count + 1][MOST_RUNS]; the last row is the optimizer's */
    unsigned char *memory;
    uint64_t mapped_bytes;
    uint32_t runs;
    taste_limits limits;
} profile;

/* Whether the optimizer is a pass of its own. */
static int has_optimizer_row(const profile *p) {
    return p->t.facts.updates && !p->t.facts.fused_update;
}

static uint32_t rows_of(const profile *p) {
    return p->t.facts.call_count + 1;
}

static taste_status map_buffers(profile *p, taste_error *error) {
    uint64_t times = (uint64_t)rows_of(p) * (MOST_RUNS * sizeof(float) + sizeof(uint64_t));
    uint64_t start = (times + TASTE_ALIGNMENT - 1) / TASTE_ALIGNMENT * TASTE_ALIGNMENT;
    p->mapped_bytes = start + MEMORY_BYTES;
    void *mapped = mmap(NULL, p->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT,
                          "%.1f MiB to measure with could not be mapped. Free memory on the board.",
                          (double)p->mapped_bytes / 1048576);
    }
    p->memory = mapped;
    p->ms = (float *)(p->memory + rows_of(p) * sizeof(uint64_t));
    return TASTE_STATUS_OK;
}

/* One step, every call timed. */
static taste_status run_once(profile *p) {
    static const taste_hyper hyper = {.learning_rate = 1e-6f, .momentum = 0.9f, .weight_decay = 5e-4f};
    trainer *t = &p->t;
    taste_step step = {0};
    uint64_t *ns = (uint64_t *)(void *)p->memory;
    taste_status status = taste_session_load(t->session, t->program, t->batch_size, t->batches[0].x, t->batches[0].y);
    if (status != TASTE_STATUS_OK) return status;
    status =
        taste_session_profile(t->session, t->parameters, t->program, t->batch_size, &hyper, t->facts.call_count, ns);
    if (status == TASTE_STATUS_OK && has_optimizer_row(p))
        status = taste_session_update(t->session, t->parameters, t->program, &hyper, &step);
    ns[t->facts.call_count] = step.update_ns;
    for (uint32_t i = 0; i < rows_of(p); i++) p->ms[i * MOST_RUNS + p->runs % MOST_RUNS] = (float)((double)ns[i] * 1e-6);
    return status;
}

/* Runs for `seconds`, the first run aside: it warms up. */
static taste_status run_all(profile *p, double seconds) {
    taste_status status = run_once(p);
    uint64_t end = taste_now_ns() + (uint64_t)(seconds * 1e9);
    while (status == TASTE_STATUS_OK && p->runs < MOST_RUNS && (p->runs < LEAST_RUNS || taste_now_ns() < end)) {
        if (trainer_interrupted) return TASTE_STATUS_INTERRUPTED;
        status = run_once(p);
        p->runs++;
    }
    return status;
}

/* The optimizer's row: five values a parameter are read or written, six operations. */
static void optimizer_facts(const trainer *t, taste_call_facts *out) {
    taste_model_facts model;
    (void)taste_model_describe(t->model, &model);
    *out = (taste_call_facts){
        .name = "optimizer",
        .fixed_flops = 6 * (model.parameter_bytes / sizeof(float)),
        .fixed_bytes = 5 * model.parameter_bytes,
    };
}

static double median_of(const profile *p, uint32_t row) {
    return measure_median_of_floats(p->ms + (uint64_t)row * MOST_RUNS, p->runs);
}

static double best_of(const profile *p, uint32_t row) {
    const float *ms = p->ms + (uint64_t)row * MOST_RUNS;
    float best = ms[0];
    for (uint32_t i = 1; i < p->runs; i++) best = ms[i] < best ? ms[i] : best;
    return best;
}

static void report_kernel(const profile *p, const taste_call_facts *facts, uint32_t row, double total_ms) {
    double ms = median_of(p, row);
    double flops = (double)(facts->fixed_flops + p->t.batch_size * facts->per_sample_flops);
    double bytes = (double)(facts->fixed_bytes + p->t.batch_size * facts->per_sample_bytes);
    double seconds = ms * 1e-3;
    int computes = flops / p->limits.flops_per_s > bytes / p->limits.bytes_per_s;
    json_open(NULL, '{');
    json_text("name", facts->name);
    json_real("ms", ms);
    json_real("best_ms", best_of(p, row));
    json_real("share", total_ms > 0 ? ms / total_ms : 0);
    json_real("gflops", seconds > 0 ? flops / seconds * 1e-9 : 0);
    json_real("limit_share", seconds > 0 ? flops / seconds / p->limits.flops_per_s : 0);
    json_real("bytes", bytes);
    json_real("gb_per_s", seconds > 0 ? bytes / seconds * 1e-9 : 0);
    json_text("bound", computes ? "compute" : "memory");
    json_close('}');
}

static void report(const options *options, const profile *p) {
    const trainer *t = &p->t;
    uint32_t rows = rows_of(p) - (has_optimizer_row(p) ? 0 : 1);
    double total_ms = 0;
    for (uint32_t i = 0; i < rows; i++) total_ms += median_of(p, i);
    json_begin("result");
    json_text("verb", "profile");
    json_text("program", t->facts.name);
    json_count("batch_size", t->batch_size);
    json_count("threads", t->threads);
    json_count("runs", p->runs);
    json_real("ms", total_ms);
    json_real("limit_gflops", p->limits.flops_per_s * 1e-9);
    json_real("limit_gb_per_s", p->limits.bytes_per_s * 1e-9);
    json_flag("emulated", taint_is_emulated(options->system_root));
    json_open("kernels", '[');
    for (uint32_t i = 0; i < rows; i++) {
        taste_call_facts facts;
        if (taste_model_call(t->model, t->program, i, &facts) != TASTE_STATUS_OK) optimizer_facts(t, &facts);
        report_kernel(p, &facts, i, total_ms);
    }
    json_close(']');
    json_end();
}

static taste_status measure(const options *options, profile *p, taste_error *error) {
    trainer *t = &p->t;
    taste_status status = map_buffers(p, error);
    if (status != TASTE_STATUS_OK) return status;
    unsigned char *memory = p->memory + p->mapped_bytes - MEMORY_BYTES;
    status = taste_pool_measure(t->pool, t->model, memory, MEMORY_BYTES, &p->limits, error);
    if (status != TASTE_STATUS_OK) return status;
    samples_make_up(t);
    taste_pool_enter(t->pool);
    status = run_all(p, options->seconds);
    taste_pool_leave(t->pool);
    if (status == TASTE_STATUS_INTERRUPTED) return taste_fail(error, status, "interrupted. Run it again.");
    if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
    report(options, p);
    return TASTE_STATUS_OK;
}

taste_status verb_profile(const options *options, taste_error *error) {
    static profile p;
    const char *program = trainer_program(options, taste_model_get());
    taste_status status = trainer_open(options, program, 0, &p.t, error);
    if (status == TASTE_STATUS_OK) status = measure(options, &p, error);
    if (p.memory != NULL) munmap(p.memory, p.mapped_bytes);
    trainer_close(&p.t);
    return status;
}
