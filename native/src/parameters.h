/* A parameter set: one block of parameters, states and constants, each region in the table's order. */
#ifndef TASTE_PARAMETERS_H
#define TASTE_PARAMETERS_H

#include "model.h"

struct taste_parameters {
    const taste_model *model;
    unsigned char *region[3]; /* by taste_region: parameters, states, constants */
};

/* Where a tensor of the set lies. */
static inline void *taste_parameters_at(const taste_parameters *parameters, const taste_tensor *tensor) {
    return parameters->region[tensor->region] + tensor->offset_bytes;
}

#endif
