/* Points the tables at memory: one DLTensor a tensor, whose address and batch change only when a program is run at another
 * batch size or over another parameter set. */
#include <string.h>

#include "error.h"
#include "layout.h"
#include "session.h"

void *taste_session_of_parameter(const taste_session *session, const taste_tensor *parameter, unsigned char *block) {
    const taste_segment *segment = &session->model->segments[parameter->segment];
    uint64_t offset = parameter->offset_bytes - segment->parameter_offset_bytes;
    int updated = (session->updated_segments & taste_segment_bit(parameter->segment)) != 0;
    if (block == NULL || !updated || offset >= segment->updated_bytes) return NULL;
    return block + session->gradient_offsets[parameter->segment] + offset;
}

/* The batch-size-dependent part of an arena starts after the fixed part of its program. */
static void *arena_at(const taste_session *session, const taste_tensor *tensor, uint32_t batch_size) {
    if (tensor->region == TASTE_REGION_FIXED) return session->arena + tensor->offset_bytes;
    const taste_program *program = &session->model->programs[tensor->program];
    return session->arena + program->fixed_bytes + tensor->offset_bytes * batch_size;
}

void *taste_session_at(const taste_session *session, const taste_tensor *tensor, uint32_t batch_size) {
    switch (tensor->region) {
    case TASTE_REGION_GRADIENTS: return taste_session_of_parameter(session, tensor, session->gradients);
    case TASTE_REGION_SCALARS: return session->scalars + tensor->offset_bytes;
    case TASTE_REGION_FIXED:
    case TASTE_REGION_BATCHED: return arena_at(session, tensor, batch_size);
    default: return NULL;
    }
}

static void bind_tensor(taste_session *session, const taste_parameters *parameters, uint32_t i, uint32_t batch_size) {
    const taste_tensor *tensor = &session->model->tensors[i];
    taste_dl_tensor *bound = &session->tensors[i];
    bound->data = taste_in_parameter_set(tensor) ? taste_parameters_at(parameters, tensor)
                                                 : taste_session_at(session, tensor, batch_size);
    if (tensor->dims > 0 && tensor->shape[0] < 0) session->shapes[i][0] = batch_size;
}

static taste_status check_run(taste_session *session, const taste_parameters *parameters, uint32_t program,
                              uint32_t batch_size) {
    const taste_model *model = session->model;
    if (parameters != NULL && parameters->model != model) {
        return taste_fail(&session->error, TASTE_STATUS_INCOMPATIBLE,
                          "the parameter set is of another model than the session's %s. Open it with this one.",
                          model->name);
    }
    if (program >= model->program_count || session->bindings[program].largest_batch == 0) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "program %u was not opened in this session. Name it in its uses.", program);
    }
    const taste_program *p = &model->programs[program];
    uint32_t minimum = p->updated_segments != 0 && model->minimum_batch > 1 ? model->minimum_batch : 1;
    if (batch_size < minimum) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "batch size %u is too small for program %s of %s. Use at least %u.", batch_size, p->name,
                          model->name, minimum);
    }
    if (batch_size > session->bindings[program].largest_batch) {
        return taste_fail(&session->error, TASTE_STATUS_DOES_NOT_FIT,
                          "batch size %u: the session was opened for %u rows of program %s. Open it for more.",
                          batch_size, session->bindings[program].largest_batch, p->name);
    }
    return TASTE_STATUS_OK;
}

taste_status taste_session_bind(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                uint32_t batch_size) {
    taste_status status = check_run(session, parameters, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    const taste_model *model = session->model;
    int other_set = parameters != NULL && session->bound_set != parameters;
    int other_batch = session->bindings[program].bound_batch != batch_size;
    if (!other_set && !other_batch) return TASTE_STATUS_OK;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        int of_set = taste_in_parameter_set(tensor);
        int of_program = tensor->program == program || tensor->program == TASTE_SHARED_PROGRAM;
        if (of_set ? other_set : of_program) bind_tensor(session, parameters, i, batch_size);
    }
    if (other_set) session->bound_set = parameters;
    session->bindings[program].bound_batch = batch_size;
    return TASTE_STATUS_OK;
}

static uint32_t find_in_arena(taste_session *session, uint32_t program, const char *name, size_t count,
                              uint32_t batch_size) {
    uint32_t i = taste_model_find_arena(session->model, program, name);
    if (i == TASTE_NO_TENSOR) {
        taste_fail(&session->error, TASTE_STATUS_USAGE,
                   "program %s has no tensor '%.100s'. Use a boundary that info lists.",
                   session->model->programs[program].name, name);
        return TASTE_NO_TENSOR;
    }
    uint64_t expected = taste_layout_count(&session->model->tensors[i], batch_size);
    if (count == expected) return i;
    taste_fail(&session->error, TASTE_STATUS_USAGE,
               "'%.100s' has %llu elements at batch size %u, not %zu. Hand in all of them.", name,
               (unsigned long long)expected, batch_size, count);
    return TASTE_NO_TENSOR;
}

taste_status taste_tensor_write(taste_session *session, uint32_t program, uint32_t batch_size, const char *name,
                                const void *values, size_t count) {
    taste_status status = check_run(session, NULL, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    uint32_t i = find_in_arena(session, program, name, count, batch_size);
    if (i == TASTE_NO_TENSOR) return TASTE_STATUS_USAGE;
    const taste_tensor *tensor = &session->model->tensors[i];
    taste_layout_write(tensor, batch_size, values, taste_session_at(session, tensor, batch_size));
    return TASTE_STATUS_OK;
}

taste_status taste_tensor_read(taste_session *session, uint32_t program, uint32_t batch_size, const char *name,
                               size_t count, void *out_values) {
    taste_status status = check_run(session, NULL, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    uint32_t i = find_in_arena(session, program, name, count, batch_size);
    if (i == TASTE_NO_TENSOR) return TASTE_STATUS_USAGE;
    const taste_tensor *tensor = &session->model->tensors[i];
    taste_layout_gather(tensor, batch_size, 0, count, taste_session_at(session, tensor, batch_size), out_values);
    return TASTE_STATUS_OK;
}

taste_status taste_gradient_read(taste_session *session, const char *name, size_t count, float *out_values) {
    uint32_t i = taste_model_find_parameter(session->model, name);
    if (i == TASTE_NO_TENSOR) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "model %s has no parameter '%.100s'. Use a name that info lists.", session->model->name,
                          name);
    }
    const taste_tensor *tensor = &session->model->tensors[i];
    unsigned char *block = session->accumulated > 0 ? session->accumulator : session->gradients;
    const void *stored = taste_session_of_parameter(session, tensor, block);
    if (stored == NULL) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "this session has no gradient of '%.100s'. Open it with a program that trains it.", name);
    }
    uint64_t expected = taste_layout_count(tensor, 1);
    if (count != expected) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "'%.100s' has %llu elements, not %zu. Hand in all of them.", name,
                          (unsigned long long)expected, count);
    }
    taste_layout_gather(tensor, 1, 0, count, stored, out_values);
    return TASTE_STATUS_OK;
}

/* Where a slot of a parameter lies, if [first, first + count) is within it. */
static void *slot_range(const taste_session *session, uint32_t slot, uint32_t tensor, uint64_t first, size_t count) {
    const taste_model *model = session->model;
    if (slot >= session->slot_count || tensor >= model->tensor_count) return NULL;
    const taste_tensor *t = &model->tensors[tensor];
    uint64_t all = taste_layout_count(t, 1);
    if (t->region != TASTE_REGION_PARAMETERS || first > all || count > all - first) return NULL;
    return taste_session_of_parameter(session, t, session->slots + slot * session->gradient_bytes);
}

taste_status taste_slot_read(const taste_session *session, uint32_t slot, uint32_t tensor, uint64_t first, size_t count,
                             float *out_values) {
    const void *stored = slot_range(session, slot, tensor, first, count);
    if (stored == NULL) return TASTE_STATUS_USAGE;
    taste_layout_gather(&session->model->tensors[tensor], 1, first, count, stored, out_values);
    return TASTE_STATUS_OK;
}

taste_status taste_slot_write(taste_session *session, uint32_t slot, uint32_t tensor, uint64_t first, size_t count,
                              const float *values) {
    void *stored = slot_range(session, slot, tensor, first, count);
    if (stored == NULL) return TASTE_STATUS_USAGE;
    taste_layout_scatter(&session->model->tensors[tensor], 1, first, count, values, stored);
    return TASTE_STATUS_OK;
}
