/* The test model's kernels, in the packed calling convention. */
#ifndef KERNELS_MLP_H
#define KERNELS_MLP_H

#include "program.h"

int mlp_hidden(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_scale(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_mean(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_head(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_loss(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_head_weight_gradient(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_head_data_gradient(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_hidden_weight_gradient(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_hidden_data_gradient(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);
int mlp_multiply_add(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);

#endif
