/* taste-train bench: throughput of one batch size. */
#include <sys/resource.h>

#include "error.h"
#include "json.h"
#include "measure.h"
#include "memory.h"
#include "samples.h"
#include "taint.h"
#include "trainer.h"
#include "verbs.h"

/* A training step with a learning rate so small that hours of it leave the loss finite; the arithmetic is a real step's. */
static taste_status train_step(void *context, taste_step *out_step) {
    static const taste_hyper hyper = {.learning_rate = 1e-6f, .momentum = 0.9f, .weight_decay = 5e-4f};
    const trainer *t = context;
    const batch_buffer *batch = &t->batches[0];
    return taste_session_step(t->session, t->parameters, t->program, t->batch_size, batch->x, batch->y, &hyper,
                              out_step);
}

static taste_status forward_step(void *context, taste_step *out_step) {
    const trainer *t = context;
    return taste_session_infer(t->session, t->parameters, t->program, t->batch_size, t->batches[0].x, out_step);
}

/* Minor faults so far: pages that the kernel had to hand out. */
static uint64_t page_faults(void) {
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_minflt : 0;
}

static void report(const options *options, const trainer *t, measurement *m, uint64_t faults, const char *taint) {
    double median = measure_median(m->samples_per_s, m->windows);
    json_begin("result");
    json_text("verb", "bench");
    json_text("program", t->facts.name);
    json_count("batch_size", t->batch_size);
    json_real("samples_per_s", median);
    json_real("spread", measure_spread(m->samples_per_s, m->windows));
    json_real("forward_s", measure_median_of_floats(m->forward_s, m->times));
    json_real("backward_s", measure_median_of_floats(m->backward_s, m->times));
    json_real("optimizer_s", measure_median_of_floats(m->update_s, m->times));
    json_count("peak_rss_bytes", memory_peak_bytes());
    json_count("planned_bytes", t->footprint.planned_bytes);
    json_count("page_faults", faults);
    json_count("steps", m->steps);
    json_real("elapsed_s", m->elapsed_s);
    json_flag("emulated", taint_is_emulated(options->system_root));
    json_flag("tainted", taint[0] != 0);
    json_text("taint", taint[0] != 0 ? taint : NULL);
    json_count("threads", t->threads);
    json_real("loss", m->loss);
    json_end();
}

static taste_status measure(const options *options, trainer *t, taste_error *error) {
    static measurement m;
    const measure_rule rule = {options->seconds, options->min_steps, options->warmup};
    measure_step step = t->facts.updates ? train_step : forward_step;
    taint_counters before, after;
    char taint[TAINT_TEXT_BYTES];
    uint64_t step_ns;
    samples_make_up(t);
    taste_pool_enter(t->pool);
    taste_status status = measure_warm_up(&rule, step, t, &step_ns);
    if (status == TASTE_STATUS_OK) {
        taint_read(options->system_root, &before);
        uint64_t faults = page_faults();
        status = measure_run(&rule, step, t, t->batch_size, step_ns, &m);
        faults = page_faults() - faults;
        taint_read(options->system_root, &after);
        (void)taint_judge(&before, &after, m.elapsed_s, t->threads, taint);
        if (status == TASTE_STATUS_OK) report(options, t, &m, faults, taint);
    }
    taste_pool_leave(t->pool);
    if (status == TASTE_STATUS_INTERRUPTED) return taste_fail(error, status, "interrupted. Run it again.");
    return status == TASTE_STATUS_OK ? status : trainer_failed(t, status, error);
}

taste_status verb_bench(const options *options, taste_error *error) {
    trainer t;
    const char *program = trainer_program(options, taste_model_get());
    taste_status status = trainer_open(options, program, 0, &t, error);
    if (status == TASTE_STATUS_OK) status = measure(options, &t, error);
    trainer_close(&t);
    return status;
}
