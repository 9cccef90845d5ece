/* taste-train train: epochs of optimizer steps, with evaluation, checkpoints and a result. */
#include <math.h>
#include <stdio.h>

#include "control.h"
#include "error.h"
#include "json.h"
#include "memory.h"
#include "training.h"
#include "verbs.h"

/* The step at which it happened goes in front of what happened. */
static taste_status at_step(uint64_t step, taste_status status, taste_error *error) {
    taste_error text = *error;
    if (status != TASTE_STATUS_NON_FINITE) return status;
    return taste_fail(error, status, "step %llu: %.290s", (unsigned long long)step, text.text);
}

static taste_status evaluate_test(training *run, taste_error *error) {
    if (run->test == NULL) return TASTE_STATUS_OK;
    const evaluation all = {.count = run->test->count};
    taste_status status = evaluate(run->t, run->test, run->batch, &all, NULL, &run->evaluated, error);
    if (status == TASTE_STATUS_OK) progress_report_eval(&run->progress, training_epochs(run), &run->evaluated);
    return status;
}

static int is_time_to_evaluate(const training *run) {
    uint32_t every = run->options->eval_every;
    return every > 0 && run->at.position == 0 && run->at.epoch % every == 0 && run->at.step < run->schedule.steps;
}

static taste_status save_weights(const training *run, taste_error *error) {
    const options *o = run->options;
    taste_status status = TASTE_STATUS_OK;
    if (o->save != NULL) {
        status = weights_save(o->save, &run->weights, run->at.step, error);
        if (status == TASTE_STATUS_OK) progress_report_checkpoint(o->save, run->at.step);
    }
    if (status == TASTE_STATUS_OK && o->dump_gradients != NULL)
        status = weights_save_gradients(o->dump_gradients, run->t->model, run->t->session, error);
    return status;
}

static taste_status stop_early(training *run, taste_error *error) {
    taste_status status = training_save_checkpoint(run, error);
    if (status == TASTE_STATUS_OK) status = save_weights(run, error);
    if (status != TASTE_STATUS_OK) return at_step(run->at.step, status, error);
    int kept = run->folder.lock >= 0;
    return taste_fail(error, TASTE_STATUS_INTERRUPTED, "interrupted after step %llu of %llu%s. %s",
                      (unsigned long long)run->at.step, (unsigned long long)run->schedule.steps,
                      kept                           ? ", checkpoint saved"
                      : run->options->save != NULL   ? ", weights saved"
                                                     : "",
                      kept ? "Run the same command with --resume to go on." : "Run it again to start anew.");
}

static taste_status steps(training *run, taste_error *error) {
    while (run->at.step < run->schedule.steps) {
        if (trainer_interrupted) return stop_early(run, error);
        taste_status status = control_apply(run, error);
        if (status == TASTE_STATUS_OK) status = training_step(run, error);
#ifdef TASTE_PLANT_GO_ON /* a harness that does not notice this is worth nothing */
        if (status == TASTE_STATUS_NON_FINITE) run->at = run->ahead, status = TASTE_STATUS_OK;
#endif
        if (status != TASTE_STATUS_OK) return at_step(run->at.step + 1, status, error);
        if (is_time_to_evaluate(run)) status = evaluate_test(run, error);
        if (status == TASTE_STATUS_OK && run->at.step < run->schedule.steps) status = training_save_if_due(run, error);
        if (status == TASTE_STATUS_INTERRUPTED) continue;
        if (status != TASTE_STATUS_OK) return at_step(run->at.step, status, error);
    }
    return TASTE_STATUS_OK;
}

static void report(const training *run, const char *sha256_text) {
    json_begin("result");
    json_text("verb", "train");
    json_text("program", run->t->facts.name);
    json_real("epochs", training_epochs(run));
    json_count("steps", run->at.step);
    json_count("batch_size", run->batches.batch_size);
    json_count("effective_batch", run->batches.effective);
    json_real("loss", run->loss);
    json_real("first_loss", run->first_loss);
    json_real("accuracy", run->accuracy);
    json_real("test_loss", tally_loss(&run->evaluated));
    json_real("test_accuracy", tally_accuracy(&run->evaluated));
    json_real("samples_per_s", progress_samples_per_s(&run->progress));
    json_count("planned_bytes", run->t->footprint.planned_bytes);
    json_count("peak_rss_bytes", memory_peak_bytes());
    json_text("sha256", sha256_text);
    json_end();
}

static taste_status run_to_the_end(training *run, taste_error *error) {
    char digits[SHA256_HEX_BYTES];
    sha256 hash;
    taste_status status = steps(run, error);
    if (status != TASTE_STATUS_OK) return status;
    sha256_start(&hash);
    status = canonical_hash(&run->weights, &hash, error);
    if (status != TASTE_STATUS_OK) return at_step(run->at.step, status, error);
    sha256_finish(&hash, digits);
    if (run->at.step > run->folder.saved_step) status = training_save_checkpoint(run, error);
    if (status == TASTE_STATUS_OK) status = save_weights(run, error);
    if (status == TASTE_STATUS_OK) status = evaluate_test(run, error);
    if (status == TASTE_STATUS_OK) report(run, digits);
    return status;
}

/* A run that goes on at the end of an epoch may have been stopped before it was tested. To be called while nothing is read
 * ahead: testing takes the buffer that is read into. */
static taste_status evaluate_where_it_goes_on(training *run, taste_error *error) {
    if (run->at.step == 0 || !is_time_to_evaluate(run)) return TASTE_STATUS_OK;
    taste_pool_enter(run->t->pool);
    taste_status status = evaluate_test(run, error);
    taste_pool_leave(run->t->pool);
    return status == TASTE_STATUS_INTERRUPTED ? TASTE_STATUS_OK : status;
}

static taste_status train(const options *options, const trainer *t, const samples *data, const samples *test,
                          taste_error *error) {
    static training run; /* holds a thread's mutex: does not move */
    taste_status status = training_init(options, t, data, test, &run, error);
    if (status != TASTE_STATUS_OK) return status;
    status = training_open_folder(&run, error);
    if (status == TASTE_STATUS_OK) status = evaluate_where_it_goes_on(&run, error);
    if (status == TASTE_STATUS_OK) status = training_start_reader(&run, error);
    if (status == TASTE_STATUS_OK) {
        taste_pool_enter(t->pool);
        status = run_to_the_end(&run, error);
        taste_pool_leave(t->pool);
    }
    prefetch_stop(&run.reader);
    run_folder_close(&run.folder);
    return status;
}

taste_status verb_train(const options *options, taste_error *error) {
    trainer t;
    samples data = {.file.file = -1}, test = {.file.file = -1};
    taste_status status = trainer_open(options, trainer_program(options, taste_model_get()), 1, &t, error);
    /* A path that cannot be written to is said before hours of training, not after. */
    if (status == TASTE_STATUS_OK && options->save != NULL) status = io_try(options->save, error);
    if (status == TASTE_STATUS_OK) status = samples_open(options->samples, &t, 1, &data, error);
    if (status == TASTE_STATUS_OK && options->test != NULL)
        status = samples_open(options->test, &t, 1, &test, error);
    if (status == TASTE_STATUS_OK)
        status = train(options, &t, &data, options->test != NULL ? &test : NULL, error);
    samples_close(&data);
    samples_close(&test);
    trainer_close(&t);
    return status;
}
