/* taste-train learn: a stream of tasks, each sample once, with experience replay. */
#include <math.h>
#include <stdio.h>

#include "error.h"
#include "json.h"
#include "learning.h"
#include "memory.h"
#include "verbs.h"

static void announce_task(const learning *run) {
    json_begin("task");
    json_count("task", run->at.epoch);
    json_count("tasks", run->plan.tasks);
    json_open(run->tasks.by_domain ? "domains" : "classes", '[');
    for (uint32_t g = 0; g < run->tasks.groups; g++) {
        if (run->tasks.of[g] == run->at.epoch) json_element_count(g);
    }
    json_close(']');
    json_count("samples", run->train.first[run->at.epoch + 1] - run->train.first[run->at.epoch]);
    json_end();
}

static taste_status save_weights(const learning *run, taste_error *error) {
    const char *path = run->options->save;
    if (path == NULL) return TASTE_STATUS_OK;
    taste_status status = weights_save(path, &run->weights, run->at.step, error);
    if (status == TASTE_STATUS_OK) progress_report_checkpoint(path, run->at.step);
    return status;
}

static taste_status stop_early(learning *run, taste_error *error) {
    taste_status status = learning_save_checkpoint(run, error);
    if (status == TASTE_STATUS_OK) status = save_weights(run, error);
    if (status != TASTE_STATUS_OK) return status;
    int kept = run->folder.lock >= 0;
    return taste_fail(error, TASTE_STATUS_INTERRUPTED, "interrupted in task %llu of %u, after update %llu%s. %s",
                      (unsigned long long)run->at.epoch, run->plan.tasks, (unsigned long long)run->at.step,
                      kept ? ", checkpoint saved" : "",
                      kept ? "Run the same command with --resume to go on." : "Run it again to start anew.");
}

/* Until all tasks are evaluated. NON_FINITE comes back as such: the caller makes a result of it. */
static taste_status learn_tasks(learning *run, taste_error *error) {
    int announced = 0;
    while (run->learned->evaluated < run->plan.tasks) {
        taste_status status;
        if (trainer_interrupted) return stop_early(run, error);
        if (run->at.epoch > run->learned->evaluated) {
            status = learning_evaluate(run, error);
            announced = 0;
        } else {
            if (!announced) announce_task(run);
            announced = 1;
            status = learning_step(run, error);
        }
        if (status == TASTE_STATUS_OK) status = learning_save_if_due(run, error);
        if (status == TASTE_STATUS_INTERRUPTED) continue;
        if (status != TASTE_STATUS_OK) return status;
    }
    return TASTE_STATUS_OK;
}

/* Mean over tasks of what was lost since their best, of what was lost since they were learned, and of the last row. */
typedef struct scores {
    double final_accuracy, forgetting, backward_transfer;
} scores;

static scores score(const learning *run) {
    uint32_t tasks = run->plan.tasks;
    const double *a = run->learned->accuracy, *last = a + (uint64_t)(tasks - 1) * tasks;
    scores s = {0};
    for (uint32_t k = 0; k < tasks; k++) {
        double best = 0;
        for (uint32_t t = k; t < tasks; t++) best = fmax(best, a[(uint64_t)t * tasks + k]);
        s.final_accuracy += last[k] / tasks;
        s.forgetting += (best - last[k]) / tasks;
        if (tasks > 1) s.backward_transfer += (last[k] - a[(uint64_t)k * tasks + k]) / (tasks - 1);
    }
    return s;
}

static void report_matrix(const learning *run) {
    json_open("accuracy_matrix", '[');
    for (uint64_t t = 0; t < run->learned->evaluated; t++) {
        json_open(NULL, '[');
        for (uint64_t k = 0; k <= t; k++) json_element_real(run->learned->accuracy[t * run->plan.tasks + k]);
        json_close(']');
    }
    json_close(']');
}

static void report(const learning *run, const char *sha256_text) {
    const scores s = run->diverged ? (scores){NAN, NAN, NAN} : score(run);
    json_begin("result");
    json_text("verb", "learn");
    json_count("batch_size", run->t->batch_size);
    json_count("stream_rows", run->plan.stream_rows);
    json_count("replay_rows", run->replay != NULL ? run->plan.replay_rows : 0);
    json_flag("replay", run->replay != NULL);
    json_count("buffer_samples", run->replay != NULL ? taste_replay_count(run->replay) : 0);
    json_count("tasks", run->plan.tasks);
    json_real("lr", (double)run->rate);
    json_count("updates", run->at.step);
    json_count("samples", run->learned->samples);
    report_matrix(run);
    json_real("final_average_accuracy", s.final_accuracy);
    json_real("forgetting", s.forgetting);
    json_real("backward_transfer", s.backward_transfer);
    json_real("loss", run->loss);
    json_flag("diverged", run->diverged);
    json_real("seconds", run->learned->seconds);
    json_real("samples_per_s", run->learned->seconds > 0 ? (double)run->learned->samples / run->learned->seconds : NAN);
    json_count("planned_bytes", run->t->footprint.planned_bytes);
    json_count("peak_rss_bytes", memory_peak_bytes());
    json_text("sha256", sha256_text);
    json_end();
}

static taste_status run_to_the_end(learning *run, taste_error *error) {
    char digits[SHA256_HEX_BYTES];
    sha256 hash;
    taste_status status = learn_tasks(run, error);
    sha256_start(&hash);
    if (status == TASTE_STATUS_OK) status = canonical_hash(&run->weights, &hash, error);
    if (status == TASTE_STATUS_NON_FINITE) {
        run->diverged = 1;
        fprintf(stderr, "warning: diverged at update %llu of task %llu: %s\n", (unsigned long long)run->at.step + 1,
                (unsigned long long)run->at.epoch, error->text);
        report(run, NULL);
        return TASTE_STATUS_OK;
    }
    if (status != TASTE_STATUS_OK) return status;
    sha256_finish(&hash, digits);
    if (run->options->checkpoint != NULL) status = learning_save_checkpoint(run, error);
    if (status == TASTE_STATUS_OK) status = save_weights(run, error);
    if (status == TASTE_STATUS_OK) report(run, digits);
    return status;
}

static taste_status learn(const options *options, const learning_plan *plan, taste_error *error) {
    static learning run;
    trainer t;
    samples train = {.file.file = -1}, test = {.file.file = -1};
    run.folder.lock = -1;
    taste_status status = trainer_open(options, trainer_program(options, taste_model_get()), 1, &t, error);
    if (status == TASTE_STATUS_OK) status = samples_open(options->samples, &t, 1, &train, error);
    if (status == TASTE_STATUS_OK) status = samples_open(options->test, &t, 1, &test, error);
    if (status == TASTE_STATUS_OK) status = learning_open(options, &t, plan, &train, &test, &run, error);
    if (status == TASTE_STATUS_OK) {
        taste_pool_enter(t.pool);
        status = run_to_the_end(&run, error);
        taste_pool_leave(t.pool);
    }
    run_folder_close(&run.folder);
    samples_close(&train);
    samples_close(&test);
    trainer_close(&t);
    return status;
}

taste_status verb_learn(const options *given, taste_error *error) {
    options o = *given;
    learning_plan plan;
    taste_status status = learning_plan_make(&o, &plan, error);
    o.beside_bytes = plan.bytes;
    return status == TASTE_STATUS_OK ? learn(&o, &plan, error) : status;
}
