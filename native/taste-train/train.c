/* taste-train train: steps over a samples file, in order. */
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "json.h"
#include "samples.h"
#include "trainer.h"
#include "verbs.h"

/* Learning rate of step i (from 1): rises linearly over the warm-up. */
static float learning_rate(const options *options, uint32_t i) {
    float lr = options->hyper.learning_rate;
    return i < options->warmup_steps ? lr * (float)i / (float)options->warmup_steps : lr;
}

/* One optimizer step over `effective` samples from `first` on, in micro-batches; the last one may be smaller. */
static taste_status optimizer_step(const options *options, const trainer *t, const samples *data, uint64_t first,
                                   uint32_t effective, uint32_t i, taste_step *out, taste_error *error) {
    taste_hyper hyper = options->hyper;
    taste_step micro;
    double loss = 0;
    uint32_t correct = 0;
    hyper.learning_rate = learning_rate(options, i);
    for (uint32_t done = 0; done < effective;) {
        uint32_t rows = effective - done < t->batch_size ? effective - done : t->batch_size;
        taste_status status = samples_read(data, t, first + done, rows, error);
        if (status != TASTE_STATUS_OK) return status;
        status = taste_session_gradients(t->session, t->parameters, t->program, rows, effective, t->x, t->y, &micro);
        if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
        loss += micro.loss * rows;
        correct += micro.correct;
        done += rows;
    }
    taste_status status = taste_session_update(t->session, t->parameters, t->program, &hyper, &micro);
    *out = micro;
    out->loss = loss / effective;
    out->correct = correct;
    return status == TASTE_STATUS_OK ? status : trainer_failed(t, status, error);
}

static void report_step(uint32_t i, const taste_step *step) {
    json_begin("step");
    json_count("step", i);
    json_real("loss", step->loss);
    json_count("correct", step->correct);
    json_end();
}

static void report_checkpoint(const char *path, uint32_t step) {
    json_begin("checkpoint");
    json_text("path", path);
    json_count("step", step);
    json_end();
}

static void report_result(uint32_t steps, double first_loss, const taste_step *last) {
    json_begin("result");
    json_text("verb", "train");
    json_count("steps", steps);
    json_real("loss", last->loss);
    json_real("first_loss", first_loss);
    json_end();
}

/* The step at which it happened goes in front of what happened. */
static taste_status at_step(uint32_t i, taste_status status, taste_error *error) {
    char text[TASTE_ERROR_BYTES];
    if (status != TASTE_STATUS_NON_FINITE) return status;
    snprintf(text, sizeof text, "%s", error->text);
    return taste_fail(error, status, "step %u: %.290s", i, text);
}

static taste_status save(const options *options, const trainer *t, uint32_t step, taste_error *error) {
    if (options->save == NULL) return TASTE_STATUS_OK;
    taste_status status =
        weights_save(options->save, t->model, t->parameters, step, t->staging, t->footprint.staging_bytes, error);
    if (status == TASTE_STATUS_OK) report_checkpoint(options->save, step);
    return status;
}

static taste_status run(const options *options, const trainer *t, const samples *data, taste_error *error) {
    uint32_t effective = options->effective_batch > 0 ? options->effective_batch : t->batch_size;
    taste_step step = {0};
    double first_loss = 0;
    uint32_t done = 0;
    while (done < options->steps && !trainer_interrupted) {
        taste_status status =
            optimizer_step(options, t, data, (uint64_t)done * effective, effective, done + 1, &step, error);
        if (status != TASTE_STATUS_OK) return at_step(done + 1, status, error);
        if (done++ == 0) first_loss = step.loss;
        report_step(done, &step);
    }
    taste_status status = save(options, t, done, error);
    if (status == TASTE_STATUS_OK && options->dump_gradients != NULL) {
        status = weights_save_gradients(options->dump_gradients, t->model, t->session, error);
    }
    if (status != TASTE_STATUS_OK) return status;
    if (done < options->steps) {
        return taste_fail(error, TASTE_STATUS_INTERRUPTED, "interrupted after step %u of %u%s. Run it again to go on.",
                          done, options->steps, options->save != NULL ? ", weights saved" : "");
    }
    report_result(done, first_loss, &step);
    return TASTE_STATUS_OK;
}

taste_status verb_train(const options *options, taste_error *error) {
    trainer t;
    samples data;
    taste_status status = trainer_open(options, "train", 1, &t, error);
    if (status == TASTE_STATUS_OK) {
        status = samples_open(options->samples, &t, 1, &data, error);
        if (status == TASTE_STATUS_OK) {
            taste_pool_enter(t.pool);
            status = run(options, &t, &data, error);
            taste_pool_leave(t.pool);
        }
        samples_close(&data);
    }
    trainer_close(&t);
    return status;
}
