/* What a training run tells on stdout while it goes on. */
#ifndef TASTE_TRAIN_PROGRESS_H
#define TASTE_TRAIN_PROGRESS_H

#include "batches.h"
#include "evaluate.h"
#include "options.h"

/* Time and samples of the steps alone, and how many step events may still be written. */
typedef struct progress {
    double rate; /* step events a second, at most, in bursts of at most 10 */
    double allowance;
    uint64_t last_ns;
    uint64_t samples, step_ns;                   /* of the whole run */
    uint64_t samples_reported, step_ns_reported; /* up to the last event */
    const char *system_root;                     /* where the board's thermal zones are */
    const char *folder; /* that holds the last step in progress.json; NULL: none */
} progress;

/* `labels`: how many there are in the step. */
typedef struct progress_step {
    const place *at; /* behind the step */
    double epoch;
    double loss;
    uint64_t correct, labels;
    uint32_t effective; /* samples of the step; 0: not told */
    float rate;
    int last_of_epoch;
} progress_step;

/* Rate and place of the options; the folder of a detached run (--run) gets progress.json, which is replaced with every step event:
 * where the run stands. */
void progress_start(progress *p, const options *options);
void progress_step_done(progress *p, uint64_t samples, uint64_t elapsed_ns);
void progress_report_step(progress *p, const progress_step *step);
void progress_report_eval(const progress *p, double epoch, const tally *sum);
void progress_report_checkpoint(const char *path, uint64_t step);

/* Samples a second of all steps so far. */
double progress_samples_per_s(const progress *p);

#endif
