#include "session.h"

#include <string.h>

#include "error.h"

/* Offsets of a session's parts in its block. */
typedef struct session_plan {
    uint64_t bindings, tensors, shapes, gradient_offsets, partials, workspace, scalars;
    uint64_t gradients, slots, accumulator, statistics, arena;
    uint64_t gradient_bytes, arena_bytes, updated_segments, total_bytes;
    int keeps_gradients; /* of whole segments, until an update: some opened program does */
} session_plan;

static uint64_t reserve(session_plan *plan, uint64_t bytes) {
    uint64_t at = plan->total_bytes;
    plan->total_bytes += taste_round_up(bytes);
    return at;
}

static taste_status check_use(const taste_model *model, const taste_use *use, taste_error *error) {
    if (use->program >= model->program_count) {
        return taste_fail(error, TASTE_STATUS_USAGE, "program %u of %u asked for. Use one that info lists.",
                          use->program, model->program_count);
    }
    const taste_program *program = &model->programs[use->program];
    uint32_t minimum = program->updated_segments != 0 && model->minimum_batch > 1 ? model->minimum_batch : 1;
    if (use->batch_size < minimum) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "batch size %u is too small for program %s of %s. Use at least %u.", use->batch_size,
                          program->name, model->name, minimum);
    }
    return TASTE_STATUS_OK;
}

/* A float for every parameter that an opened program updates, segment after segment: gradients, or a slot. */
static uint64_t gradient_bytes(const taste_model *model, uint64_t updated_segments) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < model->segment_count; s++) {
        if (updated_segments & taste_segment_bit(s)) bytes += taste_round_up(model->segments[s].updated_bytes);
    }
    return bytes;
}

static uint64_t chunk_count(uint64_t bytes) {
    return bytes / sizeof(float) / TASTE_CHUNK_ELEMENTS + 1;
}

static taste_status make_plan(const taste_model *model, const taste_use *uses, size_t use_count,
                              const taste_session_options *options, session_plan *plan, taste_error *error) {
    *plan = (session_plan){0};
    if (model->table_version != TASTE_TABLE_VERSION) {
        return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                          "the tables are version %u, the library reads %d. Build again.", model->table_version,
                          TASTE_TABLE_VERSION);
    }
    if (options->slots > TASTE_MAX_SLOTS) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%u optimizer slots asked for. Use at most %d.", options->slots,
                          TASTE_MAX_SLOTS);
    }
    for (size_t i = 0; i < use_count; i++) {
        taste_status status = check_use(model, &uses[i], error);
        if (status != TASTE_STATUS_OK) return status;
        const taste_program *program = &model->programs[uses[i].program];
        uint64_t arena = program->fixed_bytes + uses[i].batch_size * program->per_sample_bytes;
        if (arena > plan->arena_bytes) plan->arena_bytes = arena;
        plan->updated_segments |= program->updated_segments;
        plan->keeps_gradients |= program->updated_segments != 0 && !program->fused_update;
    }
    plan->gradient_bytes = gradient_bytes(model, plan->updated_segments);
    reserve(plan, sizeof(taste_session));
    plan->bindings = reserve(plan, model->program_count * sizeof(taste_binding));
    plan->tensors = reserve(plan, model->tensor_count * sizeof(taste_dl_tensor));
    plan->shapes = reserve(plan, model->tensor_count * sizeof(int64_t[TASTE_MAX_DIMS]));
    plan->gradient_offsets = reserve(plan, model->segment_count * sizeof(uint64_t));
    uint64_t chunks = chunk_count(plan->gradient_bytes) + model->segment_count;
    plan->partials = reserve(plan, (chunks > TASTE_MAX_THREADS ? chunks : TASTE_MAX_THREADS) * sizeof(double));
    plan->workspace = reserve(plan, TASTE_WORKSPACE_BYTES);
    plan->scalars = reserve(plan, taste_model_scalar_bytes(model));
    plan->gradients = plan->keeps_gradients ? reserve(plan, plan->gradient_bytes) : 0;
    plan->slots = reserve(plan, options->slots * plan->gradient_bytes);
    plan->accumulator = options->accumulate ? reserve(plan, plan->gradient_bytes) : 0;
    plan->statistics = options->accumulate ? reserve(plan, model->state_bytes) : 0;
    plan->arena = reserve(plan, plan->arena_bytes);
    return TASTE_STATUS_OK;
}

taste_status taste_session_bytes(const taste_model *model, const taste_use *uses, size_t use_count,
                                 const taste_session_options *options, size_t *out_bytes, taste_error *out_error) {
    session_plan plan;
    taste_status status = make_plan(model, uses, use_count, options, &plan, out_error);
    if (status == TASTE_STATUS_OK) *out_bytes = plan.total_bytes;
    return status;
}

/* The parts of a DLTensor that never change. */
static void describe_tensors(taste_session *session) {
    static const uint8_t codes[] = {TASTE_DL_FLOAT, TASTE_DL_INT, TASTE_DL_UINT};
    const taste_model *model = session->model;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *t = &model->tensors[i];
        memcpy(session->shapes[i], t->shape, sizeof t->shape);
        session->tensors[i] = (taste_dl_tensor){
            .device = {TASTE_DL_CPU, 0},
            .ndim = t->dims,
            .dtype = {codes[t->dtype], 32, 1},
            .shape = session->shapes[i],
        };
    }
}

static void place_gradients(taste_session *session) {
    uint64_t offset = 0;
    for (uint32_t s = 0; s < session->model->segment_count; s++) {
        session->gradient_offsets[s] = offset;
        if (session->updated_segments & taste_segment_bit(s)) {
            offset += taste_round_up(session->model->segments[s].updated_bytes);
        }
    }
}

taste_status taste_session_init(const taste_model *model, const taste_use *uses, size_t use_count,
                                const taste_session_options *options, taste_pool *pool, void *block, size_t block_bytes,
                                taste_session **out_session, taste_error *out_error) {
    session_plan plan;
    taste_status status = make_plan(model, uses, use_count, options, &plan, out_error);
    if (status != TASTE_STATUS_OK) return status;
    if (pool == NULL || block == NULL || (uintptr_t)block % TASTE_ALIGNMENT != 0) {
        return taste_fail(out_error, TASTE_STATUS_USAGE,
                          "a session needs a pool and a block aligned to %d bytes. Hand in both.", TASTE_ALIGNMENT);
    }
    if (block_bytes < plan.total_bytes) {
        return taste_fail(out_error, TASTE_STATUS_DOES_NOT_FIT,
                          "a session needs %llu bytes, its block has %zu. Enlarge it.",
                          (unsigned long long)plan.total_bytes, block_bytes);
    }
    unsigned char *base = block;
    memset(base, 0, plan.total_bytes); /* also touches every page: overcommitted memory fails here, not in a step */
    taste_session *session = block;
    session->model = model;
    session->pool = pool;
    session->updated_segments = plan.updated_segments;
    session->bindings = (taste_binding *)(base + plan.bindings);
    session->tensors = (taste_dl_tensor *)(base + plan.tensors);
    session->shapes = (int64_t (*)[TASTE_MAX_DIMS])(base + plan.shapes);
    session->gradient_offsets = (uint64_t *)(base + plan.gradient_offsets);
    session->partials = (double *)(base + plan.partials);
    session->workspace.base = base + plan.workspace;
    session->scalars = base + plan.scalars;
    session->gradients = plan.keeps_gradients ? base + plan.gradients : NULL;
    session->slots = base + plan.slots;
    session->slot_count = options->slots;
    session->gradient_bytes = plan.gradient_bytes;
    session->accumulator = options->accumulate ? base + plan.accumulator : NULL;
    session->statistics = options->accumulate ? (float *)(base + plan.statistics) : NULL;
    session->arena = base + plan.arena;
    session->seed = model->seed;
    for (size_t i = 0; i < use_count; i++) {
        taste_binding *binding = &session->bindings[uses[i].program];
        if (uses[i].batch_size > binding->largest_batch) binding->largest_batch = uses[i].batch_size;
    }
    describe_tensors(session);
    place_gradients(session);
    *out_session = session;
    return TASTE_STATUS_OK;
}

const char *taste_session_error(const taste_session *session) {
    return session->error.text;
}

void taste_session_set_step(taste_session *session, uint32_t seed, uint32_t step) {
    session->seed = seed;
    session->step = step;
}

void taste_session_set_time_constant(taste_session *session, int32_t by_effective_batch) {
    session->by_effective_batch = by_effective_batch;
}

taste_status taste_session_set_label_smoothing(taste_session *session, float smoothing) {
    if (!(smoothing >= 0 && smoothing < 1)) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE, "label smoothing %g. Use a value from 0 to below 1.",
                          (double)smoothing);
    }
    if (smoothing > 0 && session->model->label_smoothing == TASTE_NO_TENSOR) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "label smoothing %g: the loss of %s has none. Leave it out, or build the model again.",
                          (double)smoothing, session->model->name);
    }
    if (smoothing > 0 && session->groups != NULL) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "label smoothing %g together with groups of classes. Use one of them.", (double)smoothing);
    }
    session->label_smoothing = smoothing;
    return TASTE_STATUS_OK;
}
