/* The arithmetic of an optimizer step, element by element over runs of memory: it does not matter how they are cut. */
#ifndef TASTE_UPDATE_RULE_H
#define TASTE_UPDATE_RULE_H

#include "taste.h"

/* What a rule works on, all of one run. */
typedef struct taste_operands {
    float *restrict w;
    const float *restrict g;
    float *restrict m;
    float *restrict v;
    uint64_t count;
} taste_operands;

/* A step's scalars, worked out once. */
typedef struct taste_coefficients {
    float rate, clip;
    float decay;  /* joins the gradient */
    float shrink; /* of the weights, before the step */
    float momentum, from_gradient, from_momentum;
    float beta1, beta2, epsilon, root; /* root: sqrt(1 - beta2^t) */
} taste_coefficients;

/* One update rule. Returns whether a gradient was NaN or Inf. */
typedef uint32_t (*taste_rule)(const taste_operands *o, const taste_coefficients *c);

/* What one optimizer step does to parameters. */
typedef struct taste_update {
    taste_rule rule;
    taste_coefficients decayed, others; /* for the decayed prefix of a segment and for the rest */
} taste_update;

/* Floats of optimizer state a parameter. `hyper` has one of taste_optimizer. */
uint32_t taste_update_slots(const taste_hyper *hyper);

/* The step behind `step` others, with gradients times `clip`. */
taste_update taste_update_of(const taste_hyper *hyper, uint32_t step, float clip);

#endif
