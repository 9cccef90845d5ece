/* taste-train: libtaste as a program. JSON Lines on stdout; on failure one line on stderr and the status as exit code. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "detached.h"
#include "frequency.h"
#include "json.h"
#include "sampler.h"
#include "trainer.h"
#include "verbs.h"

static void interrupt(int signal_number) {
    (void)signal_number;
    trainer_interrupted = 1;
}

static void handle_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = interrupt;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL); /* a closed stdout is an I/O error, not a signal */
}

static taste_status run_verb(const options *options, taste_error *error) {
    switch (options->verb[0]) {
    case 'i': return verb_info(options, error);
    case 'b': return verb_bench(options, error);
    case 'p': return verb_profile(options, error);
    case 't': return verb_train(options, error);
    case 'l': return verb_learn(options, error);
    case 'm': return verb_monitor(options, error);
    default: return verb_eval(options, error);
    }
}

/* What a process that was killed left of its frequency is put right before anything else. */
static void repair(const options *options) {
    taste_error error = {{0}};
    if (!frequency_repair(options->system_root, &error)) return;
    json_begin("warning");
    json_text("message", error.text[0] != 0 ? error.text : "a run was killed: the CPU's frequency is as it was before it");
    json_end();
}

/* The verb at the frequency asked for, with the sensors beside it; the frequency is put back whatever happens. */
static taste_status run_conditioned(const options *options, taste_error *error) {
    static sampler sampler; /* holds a thread's mutex: does not move */
    taste_error after = {{0}};
    repair(options);
    taste_status status = TASTE_STATUS_OK;
    if (options->frequency > 0) status = frequency_set(options->system_root, options->frequency, error);
    if (status == TASTE_STATUS_OK) status = sampler_start(&sampler, options, error);
    if (status == TASTE_STATUS_OK) status = run_verb(options, error);
    sampler_stop(&sampler);
    taste_status restored = frequency_restore(&after);
    if (status == TASTE_STATUS_OK && restored != TASTE_STATUS_OK) *error = after;
    return status == TASTE_STATUS_OK ? restored : status;
}

static void report_error(taste_status status, const taste_error *error) {
    fprintf(stderr, "error: %s\n", error->text);
    json_begin("error");
    json_count("exit_code", status);
    json_text("message", error->text);
    json_end();
}

int main(int argc, char **argv) {
    options options;
    taste_error error = {{0}};
    handle_signals();
    taste_status status = options_parse(argc, argv, &options, &error);
    if (status == TASTE_STATUS_OK && options.run != NULL) {
        int is_run, exit_code;
        detached_caller caller = options.foreground ? CALLER_WATCHES : options.follow ? CALLER_FOLLOWS : CALLER_LEAVES;
        status = detached_start(options.run, caller, &is_run, &exit_code, &error);
        if (status == TASTE_STATUS_OK && !is_run) return exit_code;
    }
    if (status == TASTE_STATUS_OK) status = run_conditioned(&options, &error);
    if (status != TASTE_STATUS_OK) report_error(status, &error);
    taste_error output_error = {{0}};
    taste_status output = json_flush(&output_error);
    if (output != TASTE_STATUS_OK) fprintf(stderr, "error: %s\n", output_error.text);
    return status != TASTE_STATUS_OK ? (int)status : (int)output;
}
