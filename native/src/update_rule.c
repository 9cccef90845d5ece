#include "update_rule.h"

#include <math.h>

/* Whether the bits are those of NaN or Inf; integer, so that the loop stays vectorised. */
static uint32_t non_finite_bits(float value) {
    union {
        float value;
        uint32_t bits;
    } as = {value};
    return (as.bits & 0x7f800000u) == 0x7f800000u;
}

static uint32_t sgd(const taste_operands *o, const taste_coefficients *c) {
    float *restrict w = o->w;
    const float *restrict g = o->g;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < o->count; i++) {
        bad |= non_finite_bits(g[i]);
        w[i] -= c->rate * (g[i] * c->clip + c->decay * w[i]);
    }
    return bad;
}

static uint32_t sgd_momentum(const taste_operands *o, const taste_coefficients *c) {
    float *restrict w = o->w, *restrict m = o->m;
    const float *restrict g = o->g;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < o->count; i++) {
        float gradient = g[i] * c->clip + c->decay * w[i];
        bad |= non_finite_bits(g[i]);
        m[i] = c->momentum * m[i] + gradient;
        w[i] -= c->rate * (c->from_gradient * gradient + c->from_momentum * m[i]);
    }
    return bad;
}

static uint32_t adam(const taste_operands *o, const taste_coefficients *c) {
    float *restrict w = o->w, *restrict m = o->m, *restrict v = o->v;
    const float *restrict g = o->g;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < o->count; i++) {
        float gradient = g[i] * c->clip + c->decay * w[i];
        bad |= non_finite_bits(g[i]);
        m[i] += (1.0f - c->beta1) * (gradient - m[i]);
        v[i] = c->beta2 * v[i] + (1.0f - c->beta2) * (gradient * gradient);
        w[i] = c->shrink * w[i] - c->rate * (m[i] / (sqrtf(v[i]) / c->root + c->epsilon));
    }
    return bad;
}

/* The rules and the slots that they need, by optimizer and whether there is momentum. */
static const struct {
    taste_rule rule;
    uint32_t slots;
} rules[][2] = {
    [TASTE_OPTIMIZER_SGD] = {{sgd, 0}, {sgd_momentum, 1}},
    [TASTE_OPTIMIZER_ADAM] = {{adam, 2}, {adam, 2}},
    [TASTE_OPTIMIZER_ADAMW] = {{adam, 2}, {adam, 2}},
};

static taste_coefficients make_coefficients(const taste_hyper *h, uint32_t step, float clip, float weight_decay) {
    taste_coefficients c = {.rate = h->learning_rate, .clip = clip, .decay = weight_decay, .shrink = 1.0f};
    c.momentum = h->momentum;
    c.from_gradient = h->nesterov ? 1.0f : 0.0f;
    c.from_momentum = h->nesterov ? h->momentum : 1.0f;
    if (h->optimizer == TASTE_OPTIMIZER_SGD) return c;
    double t = (double)step + 1;
    c.beta1 = h->beta1;
    c.beta2 = h->beta2;
    c.epsilon = h->epsilon;
    c.rate = (float)((double)h->learning_rate / (1 - pow((double)h->beta1, t)));
    c.root = (float)sqrt(1 - pow((double)h->beta2, t));
    if (h->optimizer == TASTE_OPTIMIZER_ADAMW) {
        c.shrink = (float)(1 - (double)h->learning_rate * (double)weight_decay);
        c.decay = 0;
    }
    return c;
}

uint32_t taste_update_slots(const taste_hyper *hyper) {
    return rules[hyper->optimizer][hyper->momentum != 0].slots;
}

taste_update taste_update_of(const taste_hyper *hyper, uint32_t step, float clip) {
    return (taste_update){
        .rule = rules[hyper->optimizer][hyper->momentum != 0].rule,
        .decayed = make_coefficients(hyper, step, clip, hyper->weight_decay),
        .others = make_coefficients(hyper, step, clip, hyper->no_decay_norm ? 0 : hyper->weight_decay),
    };
}
