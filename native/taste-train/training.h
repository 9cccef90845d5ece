/* A training run: what it works on and where it stands. */
#ifndef TASTE_TRAIN_TRAINING_H
#define TASTE_TRAIN_TRAINING_H

#include "prefetch.h"
#include "progress.h"
#include "run_folder.h"
#include "schedule.h"

typedef struct training {
    const options *options;
    const trainer *t;
    const samples *data;
    const samples *test; /* NULL: none */
    batches batches;
    schedule schedule;
    uint64_t seed;
    place at;    /* steps done */
    place ahead; /* the micro-batch that is asked for next */
    prefetch reader;
    const batch_buffer *batch; /* the last one that was used */
    progress progress;
    run_folder folder;
    checkpoint_facts facts;
    canonical weights; /* parameters and states */
    canonical whole;   /* with constants and optimizer slots */
    double first_loss, loss, accuracy; /* of the first step of this process, and of the last; NAN before it */
    tally evaluated;
} training;

/* Everything but the reader. USAGE: options that do not fit the model or the data. */
taste_status training_init(const options *options, const trainer *t, const samples *data, const samples *test,
                           training *out, taste_error *error);

/* Takes the folder, and with --resume goes on from its newest checkpoint. */
taste_status training_open_folder(training *run, taste_error *error);

/* Starts reading where the run stands. To be ended with prefetch_stop. */
taste_status training_start_reader(training *run, taste_error *error);

/* Writes a checkpoint and reports it, if there is a folder. */
taste_status training_save_checkpoint(training *run, taste_error *error);

/* The same if one is due. */
taste_status training_save_if_due(training *run, taste_error *error);

/* Micro-batches of at most `rows` from the next step on; the effective batch stays. To be called between two steps. USAGE, and nothing
 * changed, where some micro-batch would be too small for the model. */
taste_status training_set_batch_size(training *run, uint32_t rows, taste_error *error);

/* One optimizer step from where the run stands. */
taste_status training_step(training *run, taste_error *error);

/* Epochs done, with the part of the current one. */
double training_epochs(const training *run);

#endif
