#include "model.h"

#include <string.h>

#include "error.h"

const taste_model *taste_model_get(void) {
    return &taste_model_table;
}

static int32_t index_or_none(uint16_t tensor) {
    return tensor == TASTE_NO_TENSOR ? -1 : (int32_t)tensor;
}

taste_status taste_model_describe(const taste_model *model, taste_model_facts *out_facts) {
    *out_facts = (taste_model_facts){
        .name = model->name,
        .target = model->target,
        .features = model->features,
        .build_id = model->build_id,
        .vector_bits = model->vector_bits,
        .minimum_batch = model->minimum_batch,
        .classes = model->classes,
        .seed = model->seed,
        .input_dims = model->input_dims,
        .program_count = model->program_count,
        .block_count = model->block_count,
        .segment_count = model->segment_count,
        .tensor_count = model->tensor_count,
        .parameter_bytes = model->parameter_bytes,
        .state_bytes = model->state_bytes,
        .constant_bytes = model->constant_bytes,
    };
    memcpy(out_facts->input_shape, model->input_shape, sizeof out_facts->input_shape);
    return TASTE_STATUS_OK;
}

taste_status taste_model_program(const taste_model *model, uint32_t program, taste_program_facts *out_facts) {
    if (program >= model->program_count) return TASTE_STATUS_USAGE;
    const taste_program *p = &model->programs[program];
    *out_facts = (taste_program_facts){
        .name = p->name,
        .input = index_or_none(p->input),
        .target = index_or_none(p->target),
        .output = index_or_none(p->output),
        .loss = index_or_none(p->loss),
        .updates = p->updated_segments != 0,
        .fused_update = p->fused_update,
        .call_count = p->call_count,
        .arena_fixed_bytes = p->fixed_bytes,
        .arena_per_sample_bytes = p->per_sample_bytes,
    };
    return TASTE_STATUS_OK;
}

taste_status taste_model_block(const taste_model *model, uint32_t program, uint32_t block,
                               taste_block_facts *out_facts) {
    if (program >= model->program_count || block >= model->block_count) return TASTE_STATUS_USAGE;
    const taste_block_calls *calls = &model->programs[program].blocks[block];
    *out_facts = (taste_block_facts){
        .name = model->block_names[block],
        .input = index_or_none(calls->input),
        .output = index_or_none(calls->output),
        .input_gradient = index_or_none(calls->input_gradient),
        .output_gradient = index_or_none(calls->output_gradient),
    };
    return TASTE_STATUS_OK;
}

static taste_kind kind_of_region(uint8_t region) {
    switch (region) {
    case TASTE_REGION_PARAMETERS: return TASTE_KIND_PARAMETER;
    case TASTE_REGION_STATES: return TASTE_KIND_STATE;
    case TASTE_REGION_CONSTANTS: return TASTE_KIND_CONSTANT;
    case TASTE_REGION_GRADIENTS: return TASTE_KIND_GRADIENT;
    case TASTE_REGION_SCALARS: return TASTE_KIND_SCALAR;
    default: return TASTE_KIND_ACTIVATION;
    }
}

taste_status taste_model_tensor(const taste_model *model, uint32_t tensor, taste_tensor_facts *out_facts) {
    static const char dtypes[] = {'f', 'i', 'u'};
    if (tensor >= model->tensor_count) return TASTE_STATUS_USAGE;
    const taste_tensor *t = &model->tensors[tensor];
    *out_facts = (taste_tensor_facts){
        .name = t->name,
        .kind = kind_of_region(t->region),
        .program = t->program == TASTE_SHARED_PROGRAM ? -1 : t->program,
        .dtype = dtypes[t->dtype],
        .dims = t->axes,
        .element_count = 1,
    };
    for (unsigned d = 0; d < t->axes; d++) {
        out_facts->shape[d] = t->axis[d].extent;
        if (t->axis[d].extent >= 0) out_facts->element_count *= (uint64_t)t->axis[d].extent;
    }
    return TASTE_STATUS_OK;
}

taste_status taste_model_call(const taste_model *model, uint32_t program, uint32_t call, taste_call_facts *out_facts) {
    if (program >= model->program_count || call >= model->programs[program].call_count) return TASTE_STATUS_USAGE;
    const taste_call *c = &model->programs[program].calls[call];
    *out_facts = (taste_call_facts){
        .name = c->name,
        .fixed_flops = c->fixed_flops,
        .per_sample_flops = c->per_sample_flops,
    };
    for (unsigned a = 0; a < c->argument_count; a++) {
        const taste_tensor *tensor = &model->tensors[c->arguments[a]];
        uint64_t *bytes =
            tensor->region == TASTE_REGION_BATCHED ? &out_facts->per_sample_bytes : &out_facts->fixed_bytes;
        *bytes += tensor->size_bytes;
    }
    /* An update writes the parameter too, and reads and writes its momentum. */
    if (c->kernel == NULL) out_facts->fixed_bytes += 3 * model->tensors[c->arguments[0]].size_bytes;
    return TASTE_STATUS_OK;
}

const char *taste_model_segment_name(const taste_model *model, uint32_t segment) {
    return segment < model->segment_count ? model->segments[segment].name : NULL;
}

taste_status taste_model_find_program(const taste_model *model, const char *name, uint32_t *out_program) {
    for (uint32_t i = 0; i < model->program_count; i++) {
        if (strcmp(model->programs[i].name, name) != 0) continue;
        *out_program = i;
        return TASTE_STATUS_OK;
    }
    return TASTE_STATUS_USAGE;
}

uint32_t taste_model_find_stored(const taste_model *model, const char *name) {
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        if (taste_in_parameter_set(tensor) && strcmp(tensor->name, name) == 0) return i;
    }
    return TASTE_NO_TENSOR;
}

uint32_t taste_model_find_parameter(const taste_model *model, const char *name) {
    uint32_t i = taste_model_find_stored(model, name);
    if (i == TASTE_NO_TENSOR || model->tensors[i].region != TASTE_REGION_PARAMETERS) return TASTE_NO_TENSOR;
    return i;
}

uint32_t taste_model_find_arena(const taste_model *model, uint32_t program, const char *name) {
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        int arena = tensor->region == TASTE_REGION_FIXED || tensor->region == TASTE_REGION_BATCHED ||
                    tensor->region == TASTE_REGION_SCALARS;
        int ours = tensor->program == program || tensor->program == TASTE_SHARED_PROGRAM;
        if (arena && ours && strcmp(tensor->name, name) == 0) return i;
    }
    return TASTE_NO_TENSOR;
}

uint64_t taste_model_scalar_bytes(const taste_model *model) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        if (tensor->region != TASTE_REGION_SCALARS) continue;
        uint64_t end = tensor->offset_bytes + tensor->size_bytes;
        if (end > bytes) bytes = end;
    }
    return taste_round_up(bytes);
}
