#include "sampler.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "clock.h"
#include "json.h"
#include "side_thread.h"

/* What the sensors said; read without the lock on stdout, which some of them take long for. */
typedef struct reading {
    sampler *sampler;
    taste_error error;
    uint64_t t_ns, khz;
    int64_t bits;
    double watts, temperature_c;
} reading;

static void tell(void *context) {
    const reading *r = context;
    sampler *s = r->sampler;
    if (r->error.text[0] != 0 && !s->warned) {
        json_begin("warning");
        json_text("message", r->error.text);
        json_end();
        s->warned = 1;
    }
    json_begin("power");
    json_count("t_ns", r->t_ns);
    json_real("watts", r->watts);
    json_text("source", s->sensors.source[0] != 0 ? s->sensors.source : NULL);
    json_real("temperature_c", r->temperature_c);
    json_real("frequency_khz", r->khz > 0 ? (double)r->khz : (double)NAN);
    json_real("throttle_bits", r->bits >= 0 ? (double)r->bits : (double)NAN);
    json_end();
}

static void sample(sampler *s) {
    const char *root = s->sensors.root;
    reading r = {.sampler = s, .t_ns = taste_now_ns()};
    (void)sensors_watts(&s->sensors, &r.watts, &r.error);
    r.bits = sensors_throttle_bits(root);
    r.khz = sensors_frequency(root);
    r.temperature_c = sensors_temperature(root);
    json_beside(tell, &r);
}

static void *serve(void *context) {
    sampler *s = context;
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    pthread_mutex_lock(&s->mutex);
    while (!s->ending) {
        pthread_mutex_unlock(&s->mutex);
        sample(s);
        int64_t wait_ns = next.tv_nsec + (int64_t)(s->every_s * 1e9);
        next.tv_sec += wait_ns / 1000000000;
        next.tv_nsec = wait_ns % 1000000000;
        pthread_mutex_lock(&s->mutex);
        while (!s->ending && pthread_cond_timedwait(&s->ended, &s->mutex, &next) == 0) {
        }
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

taste_status sampler_start(sampler *s, const options *options, taste_error *error) {
    pthread_condattr_t monotonic;
    memset(s, 0, sizeof *s);
    if (options->power_every <= 0) return TASTE_STATUS_OK;
    s->every_s = options->power_every;
    sensors_find(options->system_root, &s->sensors);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->ended, &monotonic);
    taste_status status = side_thread_start(&s->thread, serve, s, "the power sensor", error);
    s->running = status == TASTE_STATUS_OK;
    return status;
}

void sampler_stop(sampler *s) {
    if (!s->running) return;
    pthread_mutex_lock(&s->mutex);
    s->ending = 1;
    pthread_cond_broadcast(&s->ended);
    pthread_mutex_unlock(&s->mutex);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->mutex);
    s->running = 0;
}
