#include "training.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "error.h"
#include "json.h"

static void note_facts(training *run) {
    const options *o = run->options;
    checkpoint_facts *facts = &run->facts;
    taste_model_facts model;
    (void)taste_model_describe(run->t->model, &model);
    checkpoint_note(facts, "build_id", "%s", model.build_id);
    checkpoint_note(facts, "data", "%s", run->data->digest);
    checkpoint_note(facts, "seed", "%llu", (unsigned long long)run->seed);
    checkpoint_note(facts, "steps", "%llu", (unsigned long long)run->schedule.steps);
    checkpoint_note(facts, "effective_batch", "%u", run->batches.effective);
    checkpoint_note(facts, "lr", "%.9g", run->schedule.rate);
    checkpoint_note(facts, "schedule", "%d", o->schedule);
    checkpoint_note(facts, "warmup_steps", "%llu", (unsigned long long)run->schedule.warmup_steps);
    checkpoint_note(facts, "step_every", "%.9g", o->step_every);
    checkpoint_note(facts, "step_gamma", "%.9g", o->step_gamma);
    checkpoint_note(facts, "interval", "%u", o->interval);
    checkpoint_note(facts, "batch_factor", "%.17g", o->batch_factor);
    checkpoint_note(facts, "effective_batch_cap", "%u", o->effective_batch_cap);
    checkpoint_note(facts, "lr_decay", "%.17g", o->lr_decay);
    checkpoint_note_hyper(facts, &o->hyper);
    checkpoint_note(facts, "label_smoothing", "%.9g", (double)o->label_smoothing);
    checkpoint_note(facts, "bn_time_constant", "%d", o->bn_time_constant);
    checkpoint_note(facts, "augment", "%d", o->augment);
}

static void plan_schedule(training *run) {
    const options *o = run->options;
    double wanted = ceil(batches_steps(&run->batches, o->epochs) - 1e-9);
    uint64_t steps = o->steps > 0 ? o->steps : wanted < 1 ? 1 : wanted > 1e15 ? 1000000000000000u : (uint64_t)wanted;
    run->schedule = (schedule){
        .kind = o->interval > 0 ? SCHEDULE_ADABATCH : (schedule_kind)o->schedule,
        .rate = (double)o->hyper.learning_rate,
        .steps = steps,
        .warmup_steps = (uint64_t)(o->warmup_share * (double)steps + 0.5),
        .every_epochs = o->step_every,
        .gamma = o->step_gamma,
        .decay = o->lr_decay,
    };
}

taste_status training_init(const options *options, const trainer *t, const samples *data, const samples *test,
                           training *out, taste_error *error) {
    taste_model_facts model;
    taste_session_options session_options;
    taste_use uses[2];
    footprint_need need = trainer_need(options, t->model, t->program);
    const uint32_t kinds = 1u << TASTE_KIND_PARAMETER | 1u << TASTE_KIND_STATE;
    (void)taste_model_describe(t->model, &model);
    (void)footprint_session(t->model, &need, &session_options, uses);
    memset(out, 0, sizeof *out);
    out->options = options;
    out->t = t;
    out->data = data;
    out->test = test;
    out->folder.lock = -1;
    out->first_loss = out->loss = out->accuracy = NAN; /* a run that goes on at its very end takes no step */
    out->seed = options->seed_given ? options->seed : model.seed;
    out->batch = &t->batches[0];
    out->weights = trainer_canonical(t, kinds);
    out->whole = out->weights;
    out->whole.kinds |= 1u << TASTE_KIND_CONSTANT;
    out->whole.slots = session_options.slots;
    out->batches.samples = data->count;
    out->batches.batch_size = t->batch_size;
    out->batches.effective = options->effective_batch > 0 ? options->effective_batch : t->batch_size;
    out->batches.minimum = model.minimum_batch;
    out->batches.interval = options->interval;
    out->batches.factor = options->batch_factor;
    out->batches.cap = options->effective_batch_cap;
    if (options->effective_batch_cap > data->count) {
        return taste_fail(error, TASTE_STATUS_USAGE, "effective batch cap %u is above the %llu samples. Lower it.",
                          options->effective_batch_cap, (unsigned long long)data->count);
    }
    plan_schedule(out);
    taste_status status = batches_check(&out->batches, out->schedule.steps, error);
    if (status != TASTE_STATUS_OK) return status;
    if (options->augment != AUGMENT_NONE && (!data->packed || data->tokens)) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "--augment with samples that are no packed images. Leave it out, or pack the images.");
    }
    status = taste_session_set_label_smoothing(t->session, options->label_smoothing);
    if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
    taste_session_set_time_constant(t->session, options->bn_time_constant);
    note_facts(out);
    taste_session_set_step(t->session, (uint32_t)out->seed, 0);
    progress_start(&out->progress, options);
    return TASTE_STATUS_OK;
}

taste_status training_open_folder(training *run, taste_error *error) {
    int found;
    if (run->options->checkpoint == NULL) return TASTE_STATUS_OK;
    taste_status status = run_folder_continue(&run->folder, run->options->checkpoint, run->options->resume, &run->whole,
                                              &run->facts, &run->at, &found, error);
    if (status != TASTE_STATUS_OK || !found) return status;
#ifdef TASTE_PLANT_FORGET_POSITION /* a harness that does not notice this is worth nothing */
    run->at.position = 0;
#endif
    taste_session_set_step(run->t->session, (uint32_t)run->seed, (uint32_t)run->at.step);
    json_begin("resume");
    json_text("path", run->folder.file);
    json_count("step", run->at.step);
    json_real("epoch", training_epochs(run));
    json_end();
    return TASTE_STATUS_OK;
}

taste_status training_save_checkpoint(training *run, taste_error *error) {
    return run_folder_checkpoint(&run->folder, &run->whole, &run->facts, &run->at, error);
}

taste_status training_save_if_due(training *run, taste_error *error) {
    return run_folder_checkpoint_if_due(&run->folder, run->options, &run->whole, &run->facts, &run->at, error);
}

double training_epochs(const training *run) {
    return (double)run->at.epoch + (double)run->at.position / (double)run->batches.samples;
}

/* Asks for the micro-batch at `ahead`, unless the run ends before it. */
static void ask_ahead(training *run) {
    if (run->ahead.step >= run->schedule.steps) return;
    samples_request request = {
        .first = run->ahead.position,
        .rows = batches_rows(&run->batches, &run->ahead),
        .keyed = run->data->packed,
        .seed = run->seed,
        .epoch = run->ahead.epoch,
        .augment = (augment_level)run->options->augment,
    };
    prefetch_ask(&run->reader, &request);
}

taste_status training_start_reader(training *run, taste_error *error) {
    taste_status status = prefetch_start(&run->reader, run->data, run->t->batches, error);
    run->ahead = run->at;
    if (status == TASTE_STATUS_OK) ask_ahead(run);
    return status;
}

taste_status training_set_batch_size(training *run, uint32_t rows, taste_error *error) {
    batches wanted = run->batches;
    wanted.batch_size = rows;
    taste_status status = batches_check(&wanted, run->schedule.steps, error);
    /* What was asked for ahead had the old size. */
    if (status == TASTE_STATUS_OK && run->ahead.step < run->schedule.steps)
        status = prefetch_take(&run->reader, &run->batch, error);
    if (status != TASTE_STATUS_OK) return status;
    run->batches = wanted;
    ask_ahead(run);
    return status;
}

/* All micro-batches of the step, and the update; adds up losses and correct labels. Where the program updates within its
 * steps, the step is one micro-batch. */
static taste_status optimizer_step(training *run, uint32_t effective, const taste_hyper *hyper, double *out_loss,
                                   uint64_t *out_correct, taste_error *error) {
    const trainer *t = run->t;
    taste_step micro, ignored;
    taste_status status = TASTE_STATUS_OK;
    for (uint32_t done = 0; done < effective;) {
        uint32_t rows = batches_rows(&run->batches, &run->ahead);
        status = prefetch_take(&run->reader, &run->batch, error);
        if (status != TASTE_STATUS_OK) return status;
        batches_advance(&run->batches, &run->ahead);
        ask_ahead(run);
        const void *x = run->batch->x, *y = run->batch->y;
        status = t->facts.fused_update
                     ? taste_session_step(t->session, t->parameters, t->program, rows, x, y, hyper, &micro)
                     : taste_session_gradients(t->session, t->parameters, t->program, rows, effective, x, y, &micro);
        if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
        *out_loss += micro.loss * rows / effective;
        *out_correct += micro.correct;
        done += rows;
    }
    if (!t->facts.fused_update)
        status = taste_session_update(t->session, t->parameters, t->program, hyper, &ignored);
    return status == TASTE_STATUS_OK ? status : trainer_failed(t, status, error);
}

taste_status training_step(training *run, taste_error *error) {
    taste_hyper hyper = run->options->hyper;
    uint32_t effective = batches_effective(&run->batches, &run->at);
    uint64_t correct = 0, start = taste_now_ns();
    double loss = 0;
    hyper.learning_rate = schedule_rate(&run->schedule, &run->batches, &run->at);
    taste_status status = optimizer_step(run, effective, &hyper, &loss, &correct, error);
    if (status != TASTE_STATUS_OK) return status;
    if (run->progress.samples == 0) run->first_loss = loss;
    run->loss = loss;
    run->at = run->ahead;
    progress_step_done(&run->progress, effective, taste_now_ns() - start);
    progress_step step = {.at = &run->at, .epoch = training_epochs(run), .loss = loss, .correct = correct};
    step.labels = run->data->labels ? effective * run->data->y_elements : 0;
    step.effective = effective;
    step.rate = hyper.learning_rate;
    step.last_of_epoch = run->at.position == 0 || run->at.step == run->schedule.steps;
    run->accuracy = step.labels > 0 ? (double)correct / (double)step.labels : NAN;
    progress_report_step(&run->progress, &step);
    return TASTE_STATUS_OK;
}
