#include "prefetch.h"

#include <string.h>

#include "side_thread.h"

static void *serve(void *context) {
    prefetch *p = context;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (p->state == PREFETCH_IDLE || p->state == PREFETCH_READY) pthread_cond_wait(&p->changed, &p->mutex);
        if (p->state == PREFETCH_ENDING) break;
        samples_request request = p->request;
        const batch_buffer *batch = &p->batches[p->filling];
        pthread_mutex_unlock(&p->mutex);
        taste_error error = {{0}};
        taste_status status = samples_read(p->samples, &request, batch, &error);
        pthread_mutex_lock(&p->mutex);
        p->status = status;
        p->error = error;
        if (p->state == PREFETCH_ASKED) p->state = PREFETCH_READY;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

taste_status prefetch_start(prefetch *p, const samples *samples, const batch_buffer *batches, taste_error *error) {
    memset(p, 0, sizeof *p);
    p->samples = samples;
    p->batches = batches;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    taste_status status = side_thread_start(&p->thread, serve, p, "reading the data", error);
    p->running = status == TASTE_STATUS_OK;
    return status;
}

static void change(prefetch *p, int state) {
    p->state = state;
    pthread_cond_broadcast(&p->changed);
}

void prefetch_stop(prefetch *p) {
    if (!p->running) return;
    pthread_mutex_lock(&p->mutex);
    change(p, PREFETCH_ENDING);
    pthread_mutex_unlock(&p->mutex);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->mutex);
    p->running = 0;
}

void prefetch_ask(prefetch *p, const samples_request *request) {
    pthread_mutex_lock(&p->mutex);
    p->request = *request;
    change(p, PREFETCH_ASKED);
    pthread_mutex_unlock(&p->mutex);
}

taste_status prefetch_take(prefetch *p, const batch_buffer **out_batch, taste_error *error) {
    pthread_mutex_lock(&p->mutex);
    while (p->state != PREFETCH_READY) pthread_cond_wait(&p->changed, &p->mutex);
    p->state = PREFETCH_IDLE;
    *out_batch = &p->batches[p->filling];
    p->filling = 1 - p->filling;
    taste_status status = p->status;
    if (status != TASTE_STATUS_OK) *error = p->error;
    pthread_mutex_unlock(&p->mutex);
    return status;
}
