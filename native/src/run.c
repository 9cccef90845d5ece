/* A step as it reads in a book: load, forward, loss, backward, update. */
#include <math.h>
#include <string.h>

#include "class_groups.h"
#include "clock.h"
#include "error.h"
#include "layout.h"
#include "session.h"

enum { PIECE = 256 }; /* elements looked at at a time where a tensor is read */

static taste_status kernel_failed(taste_session *session, const taste_call *call) {
    const char *why = taste_thread.failure[0] != 0 ? taste_thread.failure : "no reason given";
    return taste_fail(&session->error, TASTE_STATUS_INTERNAL, "kernel %.60s: %s. Build the model again.", call->name,
                      why);
}

static taste_status run_call(taste_session *session, const taste_call *call) {
    taste_ffi_any arguments[TASTE_MAX_ARGUMENTS];
    taste_ffi_any result = {0};
    if (call->kernel == NULL) return taste_session_update_parameter(session, call);
    if (call->argument_count > TASTE_MAX_ARGUMENTS) {
        return taste_fail(&session->error, TASTE_STATUS_INTERNAL,
                          "kernel %.60s has %u arguments. At most %d can be passed.", call->name, call->argument_count,
                          TASTE_MAX_ARGUMENTS);
    }
    for (uint32_t a = 0; a < call->argument_count; a++) {
        arguments[a] = (taste_ffi_any){.type_index = TASTE_FFI_DL_TENSOR};
        arguments[a].value.as_pointer = &session->tensors[call->arguments[a]];
    }
    taste_thread.failure[0] = 0;
    if (call->kernel(NULL, arguments, call->argument_count, &result) != 0) return kernel_failed(session, call);
    return TASTE_STATUS_OK;
}

static taste_status run_calls(taste_session *session, const taste_program *program, uint32_t first, uint32_t end) {
    taste_status status = TASTE_STATUS_OK;
    for (uint32_t i = first; i < end && status == TASTE_STATUS_OK; i++) status = run_call(session, &program->calls[i]);
    return status;
}

/* Runs what `phases` says, in a bound session. */
static taste_status run_phases(taste_session *session, uint32_t program_index, uint32_t phases, uint32_t first_block,
                               uint32_t end_block) {
    const taste_model *model = session->model;
    const taste_program *program = &model->programs[program_index];
    taste_status status = TASTE_STATUS_OK;
    if (phases & TASTE_RUN_FORWARD) {
        for (uint32_t b = first_block; b < end_block && status == TASTE_STATUS_OK; b++) {
            status = run_calls(session, program, program->blocks[b].forward_first, program->blocks[b].forward_end);
        }
    }
    if ((phases & TASTE_RUN_LOSS) && end_block == model->block_count && status == TASTE_STATUS_OK) {
        status = run_calls(session, program, program->loss_first, program->loss_end);
    }
    if (phases & TASTE_RUN_BACKWARD) {
        for (uint32_t b = end_block; b-- > first_block && status == TASTE_STATUS_OK;) {
            status = run_calls(session, program, program->blocks[b].backward_first, program->blocks[b].backward_end);
        }
    }
    return status;
}

static void *scalar_at(const taste_session *session, uint16_t tensor) {
    return session->scalars + session->model->tensors[tensor].offset_bytes;
}

/* The run-time scalars that kernels read. The dropout mask of a row depends on its place in the effective batch, so that
 * micro-batches draw what one large batch would. */
static void set_scalars(taste_session *session, const taste_program *program, uint32_t effective_batch) {
    const taste_model *model = session->model;
    double rows_a_sample =
        program->loss == TASTE_NO_TENSOR ? 1 : (double)taste_layout_count(&model->tensors[program->loss], 1);
    if (model->loss_scale != TASTE_NO_TENSOR) {
        *(float *)scalar_at(session, model->loss_scale) = (float)(1.0 / ((double)effective_batch * rows_a_sample));
    }
    if (model->label_smoothing != TASTE_NO_TENSOR) {
        *(float *)scalar_at(session, model->label_smoothing) = session->label_smoothing;
    }
    if (model->dropout_counter != TASTE_NO_TENSOR) {
        uint32_t counter[4] = {session->seed, session->step, session->accumulated_samples, 0};
        memcpy(scalar_at(session, model->dropout_counter), counter, sizeof counter);
    }
}

/* What must be in place around kernels: the thread's pool and scratch memory. */
typedef struct surroundings {
    taste_pool *pool;
    taste_workspace *workspace;
} surroundings;

static surroundings enter(taste_session *session) {
    surroundings outer = {taste_thread.pool, taste_thread.workspace};
    taste_pool_enter(session->pool);
    taste_thread.pool = session->pool;
    taste_thread.workspace = &session->workspace;
    return outer;
}

static void leave(taste_session *session, surroundings outer) {
    taste_thread.pool = outer.pool;
    taste_thread.workspace = outer.workspace;
    session->workspace.used = session->workspace.depth = 0;
    taste_pool_leave(session->pool);
}

taste_status taste_session_run(taste_session *session, taste_parameters *parameters, uint32_t program, uint32_t phases,
                               uint32_t first_block, uint32_t end_block, uint32_t batch_size) {
    if (first_block > end_block || end_block > session->model->block_count ||
        (phases & ~(uint32_t)TASTE_RUN_ALL) != 0) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "blocks %u to %u, phases %u: the model has %u blocks. Correct them.", first_block, end_block,
                          phases, session->model->block_count);
    }
    taste_status status = taste_session_bind(session, parameters, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    if (session->model->programs[program].joined_backward && (phases & TASTE_RUN_BACKWARD) &&
        (first_block > 0 || end_block < session->model->block_count)) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "backward of blocks %u to %u: in this build it runs over all %u. Build without --recompute "
                          "blocks.",
                          first_block, end_block, session->model->block_count);
    }
    if (phases & TASTE_RUN_BACKWARD) status = taste_session_check_separate(session, program);
    if (status != TASTE_STATUS_OK) return status;
    set_scalars(session, &session->model->programs[program], batch_size);
    surroundings outer = enter(session);
    status = run_phases(session, program, phases, first_block, end_block);
    leave(session, outer);
    return status;
}

taste_status taste_session_profile(taste_session *session, taste_parameters *parameters, uint32_t program,
                                   uint32_t batch_size, const taste_hyper *hyper, uint32_t count,
                                   uint64_t *out_call_ns) {
    taste_status status = taste_session_bind(session, parameters, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    const taste_program *p = &session->model->programs[program];
    if (p->fused_update && hyper == NULL) status = taste_session_check_separate(session, program);
    if (p->fused_update && hyper != NULL) status = taste_session_begin_update(session, parameters, program, hyper);
    if (status != TASTE_STATUS_OK) return status;
    if (count != p->call_count) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE, "program %s has %u calls, not %u. Hand in all of them.",
                          p->name, p->call_count, count);
    }
    set_scalars(session, p, batch_size);
    surroundings outer = enter(session);
    uint64_t start = taste_now_ns();
    for (uint32_t i = 0; i < count && status == TASTE_STATUS_OK; i++) {
        status = run_call(session, &p->calls[i]);
        uint64_t end = taste_now_ns();
        out_call_ns[i] = end - start;
        start = end;
    }
    leave(session, outer);
    session->step += p->fused_update;
    return status;
}

static taste_status check_labels(taste_session *session, const int32_t *labels, uint64_t count) {
    int64_t classes = session->model->classes;
    for (uint64_t i = 0; i < count; i++) {
        if (labels[i] >= 0 && labels[i] < classes) continue;
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "row %llu has label %d: model %s has %lld classes. Correct the labels.",
                          (unsigned long long)i, labels[i], session->model->name, (long long)classes);
    }
    return TASTE_STATUS_OK;
}

/* Tokens choose rows of a table: one out of range must not reach a kernel. */
static taste_status check_tokens(taste_session *session, const int32_t *tokens, uint64_t count) {
    const taste_model *model = session->model;
    for (uint64_t i = 0; i < count; i++) {
        if (tokens[i] >= 0 && (uint32_t)tokens[i] < model->input_values) continue;
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "token %llu of the batch is %d: model %s knows 0 to %u. Correct the samples.",
                          (unsigned long long)i, tokens[i], model->name, model->input_values - 1);
    }
    return TASTE_STATUS_OK;
}

taste_status taste_session_load(taste_session *session, uint32_t program, uint32_t batch_size, const void *x,
                                const void *y) {
    taste_status status = taste_session_bind(session, NULL, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    const taste_model *model = session->model;
    const taste_program *p = &model->programs[program];
    const taste_tensor *input = &model->tensors[p->input];
    if (model->input_values > 0) status = check_tokens(session, x, taste_layout_count(input, batch_size));
    if (status != TASTE_STATUS_OK) return status;
    taste_layout_write(input, batch_size, x, taste_session_at(session, input, batch_size));
    if (y == NULL || p->target == TASTE_NO_TENSOR) return TASTE_STATUS_OK;
    const taste_tensor *target = &model->tensors[p->target];
    if (target->dtype == TASTE_DTYPE_INT32) status = check_labels(session, y, taste_layout_count(target, batch_size));
    if (status == TASTE_STATUS_OK)
        taste_layout_write(target, batch_size, y, taste_session_at(session, target, batch_size));
    return status;
}

/* Mean of the losses, added up in row order. */
static double mean_loss(const taste_session *session, const taste_program *program, uint32_t batch_size) {
    float rows[PIECE];
    double sum = 0;
    const taste_tensor *loss = &session->model->tensors[program->loss];
    const void *stored = taste_session_at(session, loss, batch_size);
    uint64_t count = taste_layout_count(loss, batch_size);
    for (uint64_t first = 0; first < count; first += PIECE) {
        uint64_t n = count - first < PIECE ? count - first : PIECE;
        taste_layout_gather(loss, batch_size, first, n, stored, rows);
        for (uint64_t i = 0; i < n; i++) sum += rows[i];
    }
    return sum / (double)count;
}

/* Column of the largest logit of a row, the first of equals. */
static uint32_t best_class(const taste_tensor *logits, const void *stored, uint32_t batch_size, uint64_t row,
                           uint32_t classes) {
    float piece[PIECE];
    uint32_t best = 0;
    float highest = -INFINITY;
    for (uint32_t first = 0; first < classes; first += PIECE) {
        uint32_t n = classes - first < PIECE ? classes - first : PIECE;
        taste_layout_gather(logits, batch_size, row * classes + first, n, stored, piece);
        for (uint32_t i = 0; i < n; i++) {
            if (!(piece[i] > highest)) continue;
            highest = piece[i];
            best = first + i;
        }
    }
    return best;
}

/* Labels (one a row of logits) that have the largest logit. Read between forward and loss, while the logits are surely there. */
static uint32_t count_correct(const taste_session *session, const taste_program *program, uint32_t batch_size) {
    const taste_model *model = session->model;
    const taste_tensor *target = &model->tensors[program->target];
    const taste_tensor *logits = &model->tensors[program->output];
    if (target->dtype != TASTE_DTYPE_INT32) return 0;
    const void *stored_target = taste_session_at(session, target, batch_size);
    const void *stored_logits = taste_session_at(session, logits, batch_size);
    uint64_t rows = taste_layout_count(target, batch_size);
    uint32_t classes = (uint32_t)(taste_layout_count(logits, batch_size) / rows);
    uint32_t correct = 0;
    for (uint64_t row = 0; row < rows; row++) {
        int32_t label;
        taste_layout_gather(target, batch_size, row, 1, stored_target, &label);
        correct += best_class(logits, stored_logits, batch_size, row, classes) == (uint32_t)label;
    }
    return correct;
}

static int is_finite_tensor(const taste_tensor *tensor, const void *stored, uint32_t batch_size) {
    float piece[PIECE];
    uint64_t count = taste_layout_count(tensor, batch_size);
    if (tensor->dtype != TASTE_DTYPE_FLOAT32) return 1;
    for (uint64_t first = 0; first < count; first += PIECE) {
        uint64_t n = count - first < PIECE ? count - first : PIECE;
        taste_layout_gather(tensor, batch_size, first, n, stored, piece);
        for (uint64_t i = 0; i < n; i++) {
            if (!isfinite(piece[i])) return 0;
        }
    }
    return 1;
}

static int are_finite(const float *values, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        if (!isfinite(values[i])) return 0;
    }
    return 1;
}

/* The first tensor in the order of a step that is not finite. The input is looked for in the caller's `x`: in the arena
 * its place may have gone to an activation by now. */
static const char *find_non_finite(const taste_session *session, const taste_parameters *parameters, uint32_t program,
                                   uint32_t batch_size, const void *x) {
    const taste_model *model = session->model;
    const taste_program *p = &model->programs[program];
    const uint16_t ends[] = {p->output, p->loss};
    const taste_tensor *input = &model->tensors[p->input];
    if (input->dtype == TASTE_DTYPE_FLOAT32 && model->input_values == 0 &&
        !are_finite(x, taste_layout_count(input, batch_size)))
        return input->name;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        if (!taste_in_parameter_set(tensor)) continue;
        if (!is_finite_tensor(tensor, taste_parameters_at(parameters, tensor), 1)) return tensor->name;
    }
    for (unsigned i = 0; i < 2; i++) {
        const taste_tensor *tensor = &model->tensors[ends[i]];
        if (!is_finite_tensor(tensor, taste_session_at(session, tensor, batch_size), batch_size)) return tensor->name;
    }
    return "an activation";
}

/* Forward, loss, backward of a loaded batch `x`; `out` gets loss, correct and times. */
static taste_status forward_backward(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                     uint32_t batch_size, const void *x, taste_step *out) {
    const taste_program *p = &session->model->programs[program];
    uint32_t blocks = session->model->block_count;
    uint64_t start = taste_now_ns();
    taste_status status = run_phases(session, program, TASTE_RUN_FORWARD, 0, blocks);
    uint64_t forward_end = taste_now_ns();
    if (status != TASTE_STATUS_OK) return status;
    out->forward_ns = forward_end - start;
    taste_mask_logits(session, p, batch_size);
    out->correct = count_correct(session, p, batch_size);
    status = run_phases(session, program, TASTE_RUN_LOSS, 0, blocks);
    if (status != TASTE_STATUS_OK) return status;
    out->loss = mean_loss(session, p, batch_size);
    if (!isfinite(out->loss)) {
        return taste_fail(&session->error, TASTE_STATUS_NON_FINITE,
                          "the loss is %s, first seen in '%.100s'. Lower the learning rate or look at the data.",
                          isnan(out->loss) ? "NaN" : "Inf",
                          find_non_finite(session, parameters, program, batch_size, x));
    }
    taste_mask_gradient(session, p, batch_size);
    status = run_phases(session, program, TASTE_RUN_BACKWARD, 0, blocks);
    out->backward_ns = taste_now_ns() - forward_end;
    return status;
}

/* Whether a micro-batch must move the running statistics less than its kernels do. */
static int is_slowed(const taste_session *session, uint32_t batch_size, uint32_t effective_batch) {
    return session->by_effective_batch && session->statistics != NULL && batch_size < effective_batch;
}

/* Takes back a part of what a micro-batch did to the running statistics. */
static void slow_statistics(const taste_session *session, const taste_parameters *parameters, double share) {
    float *now = (float *)parameters->region[TASTE_REGION_STATES];
    float kept = (float)((1 - pow(0.9, share)) / 0.1);
    for (uint64_t i = 0; i < session->model->state_bytes / sizeof(float); i++)
        now[i] = session->statistics[i] + (now[i] - session->statistics[i]) * kept;
}

static taste_status check_trains(taste_session *session, uint32_t program) {
    const taste_model *model = session->model;
    const taste_program *p = program < model->program_count ? &model->programs[program] : NULL;
    if (p != NULL && p->loss != TASTE_NO_TENSOR && p->target != TASTE_NO_TENSOR) return TASTE_STATUS_OK;
    return taste_fail(&session->error, TASTE_STATUS_USAGE, "program %s has no loss to train with. Use one that trains.",
                      p != NULL ? p->name : "(none)");
}

/* load, forward, loss, backward of a program that trains. */
static taste_status run_batch(taste_session *session, taste_parameters *parameters, uint32_t program,
                              uint32_t batch_size, uint32_t effective_batch, const void *x, const void *y,
                              taste_step *out_step) {
    taste_status status = taste_session_bind(session, parameters, program, batch_size);
    if (status != TASTE_STATUS_OK) return status;
    const taste_program *p = &session->model->programs[program];
    *out_step = (taste_step){0};
    uint64_t start = taste_now_ns();
    status = taste_session_load(session, program, batch_size, x, y);
    out_step->load_ns = taste_now_ns() - start;
    if (status != TASTE_STATUS_OK) return status;
    set_scalars(session, p, effective_batch);
    int slowed = is_slowed(session, batch_size, effective_batch);
    if (slowed) {
        memcpy(session->statistics, parameters->region[TASTE_REGION_STATES], session->model->state_bytes);
    }
    surroundings outer = enter(session);
    status = forward_backward(session, parameters, program, batch_size, x, out_step);
    if (slowed) slow_statistics(session, parameters, (double)batch_size / effective_batch);
    int sums = session->accumulator != NULL && !p->fused_update;
    if (status == TASTE_STATUS_OK && sums) taste_session_accumulate(session, batch_size);
    leave(session, outer);
    return status;
}

taste_status taste_session_gradients(taste_session *session, taste_parameters *parameters, uint32_t program,
                                     uint32_t batch_size, uint32_t effective_batch, const void *x, const void *y,
                                     taste_step *out_step) {
    taste_status status = check_trains(session, program);
    if (status == TASTE_STATUS_OK) status = taste_session_check_separate(session, program);
    if (status == TASTE_STATUS_OK && effective_batch < batch_size) {
        status =
            taste_fail(&session->error, TASTE_STATUS_USAGE,
                       "effective batch %u is smaller than batch size %u. Correct it.", effective_batch, batch_size);
    }
    if (status != TASTE_STATUS_OK) return status;
    return run_batch(session, parameters, program, batch_size, effective_batch, x, y, out_step);
}

/* A step of a program that updates parameters within backward. */
static taste_status fused_step(taste_session *session, taste_parameters *parameters, uint32_t program,
                               uint32_t batch_size, const void *x, const void *y, const taste_hyper *hyper,
                               taste_step *out_step) {
    taste_status status = taste_session_begin_update(session, parameters, program, hyper);
    if (status != TASTE_STATUS_OK) return status;
    status = run_batch(session, parameters, program, batch_size, batch_size, x, y, out_step);
    if (status != TASTE_STATUS_OK) return status;
    out_step->update_ns = session->update_ns;
    out_step->backward_ns -= session->update_ns;
    session->step++;
    return TASTE_STATUS_OK;
}

taste_status taste_session_step(taste_session *session, taste_parameters *parameters, uint32_t program,
                                uint32_t batch_size, const void *x, const void *y, const taste_hyper *hyper,
                                taste_step *out_step) {
    taste_status status = check_trains(session, program);
    if (status != TASTE_STATUS_OK) return status;
    taste_pool_enter(session->pool);
    if (session->model->programs[program].fused_update) {
        status = fused_step(session, parameters, program, batch_size, x, y, hyper, out_step);
    } else {
        status = taste_session_gradients(session, parameters, program, batch_size, batch_size, x, y, out_step);
        if (status == TASTE_STATUS_OK) status = taste_session_update(session, parameters, program, hyper, out_step);
    }
    taste_pool_leave(session->pool);
    return status;
}

taste_status taste_session_infer(taste_session *session, taste_parameters *parameters, uint32_t program,
                                 uint32_t batch_size, const void *x, taste_step *out_step) {
    *out_step = (taste_step){0};
    uint64_t start = taste_now_ns();
    taste_status status = taste_session_load(session, program, batch_size, x, NULL);
    uint64_t loaded = taste_now_ns();
    out_step->load_ns = loaded - start;
    if (status != TASTE_STATUS_OK) return status;
    status =
        taste_session_run(session, parameters, program, TASTE_RUN_FORWARD, 0, session->model->block_count, batch_size);
    out_step->forward_ns = taste_now_ns() - loaded;
    return status;
}

taste_status taste_session_predict(taste_session *session, taste_parameters *parameters, uint32_t program,
                                   uint32_t batch_size, const void *x, float *out_logits) {
    taste_step ignored;
    taste_status status = taste_session_infer(session, parameters, program, batch_size, x, &ignored);
    if (status != TASTE_STATUS_OK) return status;
    const taste_tensor *logits = &session->model->tensors[session->model->programs[program].output];
    taste_layout_gather(logits, batch_size, 0, taste_layout_count(logits, batch_size),
                        taste_session_at(session, logits, batch_size), out_logits);
    return TASTE_STATUS_OK;
}
