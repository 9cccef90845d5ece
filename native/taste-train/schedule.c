#include "schedule.h"

#include <math.h>

float schedule_rate(const schedule *s, uint64_t step) {
    const double pi = 3.14159265358979323846;
    if (step < s->warmup_steps) return (float)(s->rate * (double)(step + 1) / (double)s->warmup_steps);
    uint64_t left = s->steps > s->warmup_steps ? s->steps - s->warmup_steps : 1;
    double share = (double)(step - s->warmup_steps) / (double)left;
    switch (s->kind) {
    case SCHEDULE_STEP: {
        double epochs = (double)(step / s->steps_an_epoch);
        return (float)(s->rate * pow(s->gamma, floor(epochs / s->every_epochs)));
    }
    case SCHEDULE_COSINE: return (float)(s->rate * 0.5 * (1 + cos(pi * share)));
    case SCHEDULE_LINEAR: return (float)(s->rate * (1 - share));
    default: return (float)s->rate;
    }
}
