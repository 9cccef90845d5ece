/* A run that outlives whoever started it: a session of its own, a lock for its life, and a watcher that notes how it ended. */
#ifndef TASTE_TRAIN_DETACHED_H
#define TASTE_TRAIN_DETACHED_H

#include "taste.h"

/* What the process that was called does once the run is under way. */
typedef enum detached_caller {
    CALLER_LEAVES,  /* ends */
    CALLER_FOLLOWS, /* says what the run says, and ends with its exit code; what ends this process ends nothing of the run */
    CALLER_WATCHES, /* is the run's watcher, for a service: passes a request to end on, and ends with its exit code */
} detached_caller;

/* Turns this process into the run of `folder`, an existing one. FOLDER/../lock is held as long as anything of the run lives (BUSY
 * names who holds it); stdout goes to FOLDER/events.jsonl and stderr to FOLDER/messages, both appended to; FOLDER/process has
 * the numbers of the run's process and its watcher's, and FOLDER/exit, once it ended, its exit code, or 128 + n after signal n.
 *
 * `out_is_run` 1: this is the run, which goes on in the background (with CALLER_WATCHES, below the process that was called). 0: this
 * is the process that was called, whose `out_exit_code` is 0 once the run is under way, or the run's own where it waited. */
taste_status detached_start(const char *folder, detached_caller caller, int *out_is_run, int *out_exit_code,
                            taste_error *error);

#endif
