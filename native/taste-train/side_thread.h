/* A thread beside the steps. Signals are for the thread that looks at them between steps: this one gets none. */
#ifndef TASTE_TRAIN_SIDE_THREAD_H
#define TASTE_TRAIN_SIDE_THREAD_H

#include <pthread.h>

#include "taste.h"

/* DOES_NOT_FIT where there is none to be had; `purpose` is what it is for, for the message. */
taste_status side_thread_start(pthread_t *out, void *(*serve)(void *), void *context, const char *purpose,
                               taste_error *error);

#endif
