/* A run that outlives whoever started it: a session of its own, a lock for its life, and a watcher that notes how it ended. */
#ifndef TASTE_TRAIN_DETACHED_H
#define TASTE_TRAIN_DETACHED_H

#include "taste.h"

/* Turns this process into the run of `folder`, an existing one. FOLDER/../lock is held as long as anything of the run lives (BUSY
 * names who holds it); stdout goes to FOLDER/events.jsonl and stderr to FOLDER/messages, both appended to; FOLDER/process has
 * the numbers of the run's process and its watcher's, and FOLDER/exit, once it ended, its exit code, or 128 + n after signal n.
 *
 * `out_is_run` 1: this is the run, which goes on in the background (with `foreground`, below the process that was called). 0: this
 * is the process that was called, whose `out_exit_code` is 0 once the run is under way, or with `foreground` the run's own. */
taste_status detached_start(const char *folder, int foreground, int *out_is_run, int *out_exit_code,
                            taste_error *error);

#endif
