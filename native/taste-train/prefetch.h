/* The next micro-batch is read and made ready by a thread of its own while the step computes. */
#ifndef TASTE_TRAIN_PREFETCH_H
#define TASTE_TRAIN_PREFETCH_H

#include <pthread.h>

#include "samples.h"

typedef struct prefetch {
    const samples *samples;
    const batch_buffer *batches; /* two: one is filled while the other is in use */
    pthread_t thread;
    int running;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex: */
    enum { PREFETCH_IDLE, PREFETCH_ASKED, PREFETCH_READY, PREFETCH_ENDING } state;
    samples_request request;
    taste_status status;
    taste_error error;
    uint32_t filling; /* index of the batch that is filled next */
} prefetch;

/* Starts the thread; call it while the process may still use all its cores. `p` must not move. */
taste_status prefetch_start(prefetch *p, const samples *samples, const batch_buffer *batches, taste_error *error);
void prefetch_stop(prefetch *p);

/* Asks for rows; at most one request is on its way. */
void prefetch_ask(prefetch *p, const samples_request *request);

/* Waits for what was asked for. It may be used until the next take. */
taste_status prefetch_take(prefetch *p, const batch_buffer **out_batch, taste_error *error);

#endif
