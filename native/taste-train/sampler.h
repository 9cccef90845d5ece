/* Power, temperature, frequency and throttling, read by a thread beside the steps and told as `power` events. */
#ifndef TASTE_TRAIN_SAMPLER_H
#define TASTE_TRAIN_SAMPLER_H

#include <pthread.h>

#include "options.h"
#include "sensors.h"

typedef struct sampler {
    pthread_t thread;
    int running;
    pthread_mutex_t mutex;
    pthread_cond_t ended;
    int ending; /* under the mutex */
    double every_s;
    sensors sensors;
    int warned; /* a sensor that fails is told of once */
} sampler;

/* Starts it if the options ask for samples; `s` must not move. */
taste_status sampler_start(sampler *s, const options *options, taste_error *error);
void sampler_stop(sampler *s);

#endif
