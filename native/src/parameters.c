#include "parameters.h"

#include <string.h>

#include "error.h"
#include "generator.h"
#include "layout.h"

size_t taste_parameters_bytes(const taste_model *model) {
    return taste_round_up(sizeof(taste_parameters)) + taste_round_up(model->parameter_bytes) +
           taste_round_up(model->state_bytes) + taste_round_up(model->constant_bytes);
}

taste_status taste_parameters_init(const taste_model *model, void *block, size_t block_bytes,
                                   taste_parameters **out_parameters, taste_error *out_error) {
    size_t need = taste_parameters_bytes(model);
    if (block == NULL || (uintptr_t)block % TASTE_ALIGNMENT != 0) {
        return taste_fail(out_error, TASTE_STATUS_USAGE,
                          "the block of a parameter set is not aligned to %d bytes. Align it.", TASTE_ALIGNMENT);
    }
    if (block_bytes < need) {
        return taste_fail(out_error, TASTE_STATUS_DOES_NOT_FIT,
                          "a parameter set needs %zu bytes, its block has %zu. Enlarge it.", need, block_bytes);
    }
    if (model->table_version != TASTE_TABLE_VERSION) {
        return taste_fail(out_error, TASTE_STATUS_INCOMPATIBLE,
                          "the tables are version %u, the library reads %d. Build again.", model->table_version,
                          TASTE_TABLE_VERSION);
    }
    memset(block, 0, need);
    taste_parameters *parameters = block;
    unsigned char *at = (unsigned char *)block + taste_round_up(sizeof *parameters);
    parameters->model = model;
    parameters->region[TASTE_REGION_PARAMETERS] = at;
    parameters->region[TASTE_REGION_STATES] = at += taste_round_up(model->parameter_bytes);
    parameters->region[TASTE_REGION_CONSTANTS] = at + taste_round_up(model->state_bytes);
    *out_parameters = parameters;
    return TASTE_STATUS_OK;
}

/* Initial value of canonical element i. 2u - 1 is exact in float32, so there is one rounding, the product's. */
static float initial_value(const taste_tensor *tensor, uint64_t key, uint64_t i) {
    if (tensor->init_kind == TASTE_INIT_CONSTANT) return tensor->init_scale;
    float centred = 2.0f * taste_generator_uniform(key, i) - 1.0f;
    return centred * tensor->init_scale;
}

static void seed_tensor(taste_parameters *parameters, const taste_tensor *tensor, uint64_t seed) {
    float values[256];
    uint64_t count = taste_layout_count(tensor, 1);
    uint64_t key = taste_generator_key(seed, tensor->name);
    void *stored = taste_parameters_at(parameters, tensor);
    memset(stored, 0, tensor->size_bytes);
    if (tensor->init_kind == TASTE_INIT_NONE) return;
    for (uint64_t first = 0; first < count; first += 256) {
        uint64_t n = count - first < 256 ? count - first : 256;
        for (uint64_t i = 0; i < n; i++) values[i] = initial_value(tensor, key, first + i);
        taste_layout_scatter(tensor, 1, first, n, values, stored);
    }
}

taste_status taste_parameters_seed(taste_parameters *parameters, uint64_t seed, uint32_t *out_unset) {
    const taste_model *model = parameters->model;
    uint32_t unset = 0;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        if (!taste_in_parameter_set(tensor)) continue;
        seed_tensor(parameters, tensor, seed);
        unset += tensor->init_kind == TASTE_INIT_NONE;
    }
    if (out_unset != NULL) *out_unset = unset;
    return TASTE_STATUS_OK;
}

/* The tensor called `name`, whose element count must be `count`. */
static taste_status find_checked(const taste_parameters *parameters, const char *name, size_t count,
                                 uint32_t *out_tensor, taste_error *error) {
    const taste_model *model = parameters->model;
    uint32_t i = taste_model_find_stored(model, name);
    if (i == TASTE_NO_TENSOR) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "model %s has no parameter or state '%.100s'. Use a name that info lists.", model->name,
                          name);
    }
    uint64_t expected = taste_layout_count(&model->tensors[i], 1);
    if (count != expected) {
        return taste_fail(error, TASTE_STATUS_USAGE, "'%.100s' has %llu elements, not %zu. Hand in all of them.", name,
                          (unsigned long long)expected, count);
    }
    *out_tensor = i;
    return TASTE_STATUS_OK;
}

taste_status taste_parameters_write(taste_parameters *parameters, const char *name, const void *values, size_t count,
                                    taste_error *out_error) {
    uint32_t i;
    taste_status status = find_checked(parameters, name, count, &i, out_error);
    if (status != TASTE_STATUS_OK) return status;
    const taste_tensor *tensor = &parameters->model->tensors[i];
    taste_layout_write(tensor, 1, values, taste_parameters_at(parameters, tensor));
    return TASTE_STATUS_OK;
}

taste_status taste_parameters_read(const taste_parameters *parameters, const char *name, size_t count, void *out_values,
                                   taste_error *out_error) {
    uint32_t i;
    taste_status status = find_checked(parameters, name, count, &i, out_error);
    if (status != TASTE_STATUS_OK) return status;
    const taste_tensor *tensor = &parameters->model->tensors[i];
    taste_layout_gather(tensor, 1, 0, count, taste_parameters_at(parameters, tensor), out_values);
    return TASTE_STATUS_OK;
}

static int range_is_valid(const taste_model *model, uint32_t tensor, uint64_t first, size_t count) {
    if (tensor >= model->tensor_count || !taste_in_parameter_set(&model->tensors[tensor])) return 0;
    uint64_t all = taste_layout_count(&model->tensors[tensor], 1);
    return first <= all && count <= all - first;
}

taste_status taste_parameters_write_range(taste_parameters *parameters, uint32_t tensor, uint64_t first, size_t count,
                                          const void *values) {
    if (!range_is_valid(parameters->model, tensor, first, count)) return TASTE_STATUS_USAGE;
    const taste_tensor *t = &parameters->model->tensors[tensor];
    taste_layout_scatter(t, 1, first, count, values, taste_parameters_at(parameters, t));
    return TASTE_STATUS_OK;
}

taste_status taste_parameters_read_range(const taste_parameters *parameters, uint32_t tensor, uint64_t first,
                                         size_t count, void *out_values) {
    if (!range_is_valid(parameters->model, tensor, first, count)) return TASTE_STATUS_USAGE;
    const taste_tensor *t = &parameters->model->tensors[tensor];
    taste_layout_gather(t, 1, first, count, taste_parameters_at(parameters, t), out_values);
    return TASTE_STATUS_OK;
}
