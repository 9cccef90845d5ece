/* A small file that moves a run to another operating point between two steps. */
#ifndef TASTE_TRAIN_CONTROL_H
#define TASTE_TRAIN_CONTROL_H

#include "training.h"

/* Reads `--control FILE` where it has changed: lines `batch_size N` (rows of a micro-batch, up to what the run was opened with; the
 * effective batch stays) and `frequency_khz N`. An `operating_point` event tells what holds from this step on. A file that says
 * something else is told of in a `warning` and changes nothing. */
taste_status control_apply(training *run, taste_error *error);

#endif
