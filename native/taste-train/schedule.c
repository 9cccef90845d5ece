#include "schedule.h"

#include <math.h>

/* decay^times, by multiplication: pow differs between C libraries and CPUs. */
static double decayed(double decay, uint64_t times) {
    double share = 1;
    for (; times > 0 && share > 0 && decay < 1; times--) share *= decay;
    return share;
}

static double adabatch_rate(const schedule *s, const batches *b, const place *at) {
    double ramp = at->step < s->warmup_steps ? (double)(at->step + 1) / (double)s->warmup_steps : 1;
    double growth = (double)batches_whole(b, at->epoch) / b->effective;
    return s->rate * decayed(s->decay, at->epoch / b->interval) * growth * ramp;
}

float schedule_rate(const schedule *s, const batches *b, const place *at) {
    const double pi = 3.14159265358979323846;
    uint64_t step = at->step;
    if (s->kind == SCHEDULE_ADABATCH) return (float)adabatch_rate(s, b, at);
    if (step < s->warmup_steps) return (float)(s->rate * (double)(step + 1) / (double)s->warmup_steps);
    uint64_t left = s->steps > s->warmup_steps ? s->steps - s->warmup_steps : 1;
    double share = (double)(step - s->warmup_steps) / (double)left;
    switch (s->kind) {
    case SCHEDULE_STEP: return (float)(s->rate * pow(s->gamma, floor((double)at->epoch / s->every_epochs)));
    case SCHEDULE_COSINE: return (float)(s->rate * 0.5 * (1 + cos(pi * share)));
    case SCHEDULE_LINEAR: return (float)(s->rate * (1 - share));
    default: return (float)s->rate;
    }
}
