/* The optimizers over the flat blocks: weights, gradients and slots of a segment are each one run of memory, of which the
 * trained parameters are a prefix. Work is cut into chunks of a fixed size, and every sum is one partial a chunk added up in
 * order, so the bits do not depend on the threads. */
#include <math.h>

#include "clock.h"
#include "error.h"
#include "session.h"

/* A run of a segment: `first` and `count` in floats from the segment's start; `index` counts chunks over the whole pass. */
typedef struct chunk {
    uint32_t segment;
    uint64_t first, count, index;
} chunk;

struct pass;
typedef void (*chunk_work)(const struct pass *pass, const chunk *at);

typedef struct pass {
    taste_session *session;
    taste_parameters *parameters; /* NULL where the pass needs no weights */
    uint64_t segments;            /* bit mask of those it covers */
    chunk_work work;
    const taste_hyper *hyper;
    const unsigned char *gradients;
    taste_update update;
} pass;

static uint64_t segment_chunks(const taste_segment *segment) {
    return (segment->updated_bytes / sizeof(float) + TASTE_CHUNK_ELEMENTS - 1) / TASTE_CHUNK_ELEMENTS;
}

static uint64_t pass_chunks(const pass *p) {
    const taste_model *model = p->session->model;
    uint64_t chunks = 0;
    for (uint32_t s = 0; s < model->segment_count; s++) {
        if (p->segments & taste_segment_bit(s)) chunks += segment_chunks(&model->segments[s]);
    }
    return chunks;
}

/* Chunks [first, end) of one segment. */
static void segment_range(const pass *p, uint32_t s, uint64_t first, uint64_t end, uint64_t index) {
    uint64_t elements = p->session->model->segments[s].updated_bytes / sizeof(float);
    for (uint64_t c = first; c < end; c++, index++) {
        uint64_t at = c * TASTE_CHUNK_ELEMENTS;
        uint64_t count = elements - at < TASTE_CHUNK_ELEMENTS ? elements - at : TASTE_CHUNK_ELEMENTS;
        chunk piece = {s, at, count, index};
        p->work(p, &piece);
    }
}

/* The task_id-th of equal parts of the pass. */
static int pass_task(int task_id, taste_parallel_group *group, void *closure) {
    const pass *p = closure;
    const taste_model *model = p->session->model;
    uint64_t all = pass_chunks(p);
    uint64_t part = (all + (uint64_t)group->task_count - 1) / (uint64_t)group->task_count;
    uint64_t first = part * (uint64_t)task_id;
    uint64_t end = first + part;
    uint64_t start = 0; /* of the segment, in chunks of the pass */
    for (uint32_t s = 0; s < model->segment_count && start < end; s++) {
        if (!(p->segments & taste_segment_bit(s))) continue;
        uint64_t chunks = segment_chunks(&model->segments[s]);
        uint64_t from = first > start ? first - start : 0;
        uint64_t to = end - start < chunks ? end - start : chunks;
        if (from < to) segment_range(p, s, from, to, start + from);
        start += chunks;
    }
    return 0;
}

static void run_pass(pass *p) {
    (void)taste_pool_launch(p->session->pool, pass_task, p, 0);
}

/* Offset of a chunk in the gradients, and in whatever is laid out like them. */
static uint64_t gradient_offset(const pass *p, const chunk *at) {
    return p->session->gradient_offsets[at->segment] + at->first * sizeof(float);
}

static void square_chunk(const pass *p, const chunk *at) {
    const float *g = (const float *)(p->gradients + gradient_offset(p, at));
    double sum[8] = {0};
    for (uint64_t i = 0; i < at->count; i++) sum[i % 8] += (double)g[i] * (double)g[i];
    p->session->partials[at->index] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

static void accumulate_chunk(const pass *p, const chunk *at) {
    uint64_t offset = gradient_offset(p, at);
    const float *restrict g = (const float *)(p->session->gradients + offset);
    float *restrict sum = (float *)(p->session->accumulator + offset);
    if (p->session->accumulated == 0) {
        for (uint64_t i = 0; i < at->count; i++) sum[i] = g[i];
    } else {
        for (uint64_t i = 0; i < at->count; i++) sum[i] += g[i];
    }
}

void taste_session_accumulate(taste_session *session, uint32_t batch_size) {
    pass p = {.session = session, .segments = session->updated_segments, .work = accumulate_chunk};
    run_pass(&p);
    session->accumulated++;
    session->accumulated_samples += batch_size;
}

/* The part of a chunk within [first, end) of its segment. */
static uint32_t update_part(const pass *p, const chunk *at, uint64_t first, uint64_t end,
                            const taste_coefficients *c) {
    const taste_session *session = p->session;
    const taste_segment *segment = &session->model->segments[at->segment];
    uint64_t from = first > at->first ? first : at->first;
    uint64_t to = end < at->first + at->count ? end : at->first + at->count;
    if (from >= to) return 0;
    uint64_t offset = session->gradient_offsets[at->segment] + from * sizeof(float);
    unsigned char *weights = p->parameters->region[TASTE_REGION_PARAMETERS] + segment->parameter_offset_bytes;
    taste_operands o = {.w = (float *)weights + from, .g = (const float *)(p->gradients + offset), .count = to - from};
    if (session->slot_count > 0) o.m = (float *)(session->slots + offset);
    if (session->slot_count > 1) o.v = (float *)(session->slots + session->gradient_bytes + offset);
    return p->update.rule(&o, c);
}

static void update_chunk(const pass *p, const chunk *at) {
    const taste_segment *segment = &p->session->model->segments[at->segment];
    uint64_t border = segment->decayed_bytes / sizeof(float), end = segment->updated_bytes / sizeof(float);
    uint32_t bad = update_part(p, at, 0, border, &p->update.decayed) | update_part(p, at, border, end, &p->update.others);
    p->session->partials[at->index] = bad;
}

static double sum_partials(const pass *p) {
    uint64_t chunks = pass_chunks(p);
    double sum = 0;
    for (uint64_t i = 0; i < chunks; i++) sum += p->session->partials[i];
    return sum;
}

/* The first parameter whose gradient holds a NaN or Inf. */
static const char *find_bad_gradient(const pass *p) {
    const taste_session *session = p->session;
    const taste_model *model = session->model;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        if (tensor->region != TASTE_REGION_PARAMETERS || !(p->segments & taste_segment_bit(tensor->segment))) continue;
        const float *g = taste_session_of_parameter(session, tensor, (unsigned char *)(uintptr_t)p->gradients);
        for (uint64_t k = 0; g != NULL && k < tensor->size_bytes / sizeof(float); k++) {
            if (!isfinite(g[k])) return tensor->name;
        }
    }
    return "a parameter";
}

static taste_status bad_gradient(taste_session *session, const char *parameter) {
    return taste_fail(&session->error, TASTE_STATUS_NON_FINITE,
                      "the gradient of '%.100s' is NaN or Inf. Lower the learning rate or clip the gradient.",
                      parameter);
}

static taste_status check_update(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                 const taste_hyper *hyper) {
    const taste_model *model = session->model;
    if (parameters->model != model || program >= model->program_count ||
        session->bindings[program].largest_batch == 0 || model->programs[program].updated_segments == 0) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "program %u trains nothing in this session. Open one that does.", program);
    }
    if (hyper->optimizer < TASTE_OPTIMIZER_SGD || hyper->optimizer > TASTE_OPTIMIZER_ADAMW) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE, "optimizer %d. Use one of taste_optimizer.",
                          hyper->optimizer);
    }
    uint32_t slots = taste_update_slots(hyper);
    if (session->slot_count < slots) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "the optimizer (momentum %g) needs %u slots a parameter, the session has %u. Set them in its "
                          "options.",
                          (double)hyper->momentum, slots, session->slot_count);
    }
    if (!isfinite(hyper->learning_rate) || !isfinite(hyper->momentum) || !isfinite(hyper->weight_decay) ||
        !(hyper->gradient_clip >= 0) || (hyper->nesterov && !(hyper->momentum > 0))) {
        return taste_fail(
            &session->error, TASTE_STATUS_USAGE,
            "learning rate %g, momentum %g, weight decay %g, clip %g, nesterov %d do not go together. Correct them.",
            (double)hyper->learning_rate, (double)hyper->momentum, (double)hyper->weight_decay,
            (double)hyper->gradient_clip, hyper->nesterov);
    }
    if (hyper->optimizer != TASTE_OPTIMIZER_SGD &&
        !(hyper->beta1 >= 0 && hyper->beta1 < 1 && hyper->beta2 >= 0 && hyper->beta2 < 1 && hyper->epsilon >= 0)) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "beta1 %g, beta2 %g, epsilon %g. Use betas from 0 to below 1 and an epsilon from 0.",
                          (double)hyper->beta1, (double)hyper->beta2, (double)hyper->epsilon);
    }
    return TASTE_STATUS_OK;
}

/* Norm of all gradients and the factor that brings it down to the limit, as torch.nn.utils.clip_grad_norm_ has it. */
static taste_status clip_gradients(pass *p, float *out_clip, taste_step *out_step) {
    p->work = square_chunk;
    run_pass(p);
    double norm = sqrt(sum_partials(p));
    out_step->gradient_norm = (float)norm;
    if (!isfinite(norm)) return bad_gradient(p->session, find_bad_gradient(p));
    double factor = p->hyper->gradient_clip / (norm + 1e-6);
    *out_clip = factor < 1 ? (float)factor : 1.0f;
    return TASTE_STATUS_OK;
}

taste_status taste_session_update(taste_session *session, taste_parameters *parameters, uint32_t program,
                                  const taste_hyper *hyper, taste_step *out_step) {
    taste_status status = check_update(session, parameters, program, hyper);
    if (status == TASTE_STATUS_OK) status = taste_session_check_separate(session, program);
    if (status != TASTE_STATUS_OK) return status;
    uint64_t start = taste_now_ns();
    pass p = {.session = session, .parameters = parameters, .hyper = hyper};
    float clip = 1.0f;
    p.segments = session->model->programs[program].updated_segments;
    p.gradients = session->accumulated > 0 ? session->accumulator : session->gradients;
    taste_pool_enter(session->pool);
    if (hyper->gradient_clip > 0) status = clip_gradients(&p, &clip, out_step);
    if (status == TASTE_STATUS_OK) {
        p.work = update_chunk;
        p.update = taste_update_of(hyper, session->step, clip);
        run_pass(&p);
        if (sum_partials(&p) != 0) status = bad_gradient(session, find_bad_gradient(&p));
    }
    taste_pool_leave(session->pool);
    session->accumulated = session->accumulated_samples = 0;
    session->step++;
    out_step->update_ns = taste_now_ns() - start;
    return status;
}

taste_status taste_session_check_separate(taste_session *session, uint32_t program) {
    const taste_program *p = &session->model->programs[program];
    if (!p->fused_update) return TASTE_STATUS_OK;
    return taste_fail(&session->error, TASTE_STATUS_USAGE,
                      "program %s updates parameters within its steps. Use taste_session_step.", p->name);
}

taste_status taste_session_begin_update(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                        const taste_hyper *hyper) {
    taste_status status = check_update(session, parameters, program, hyper);
    if (status != TASTE_STATUS_OK) return status;
    if (hyper->gradient_clip > 0 || session->accumulated > 0) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "program %s with gradient clip %g and %u micro-batches accumulated: it never holds all "
                          "gradients. Use the program that has them.",
                          session->model->programs[program].name, (double)hyper->gradient_clip, session->accumulated);
    }
    session->update = taste_update_of(hyper, session->step, 1.0f);
    session->update_ns = 0;
    return TASTE_STATUS_OK;
}

/* One parameter's update. */
typedef struct single {
    taste_session *session;
    const taste_coefficients *coefficients;
    taste_operands whole;
} single;

static uint64_t single_chunks(const single *s) {
    return (s->whole.count + TASTE_CHUNK_ELEMENTS - 1) / TASTE_CHUNK_ELEMENTS;
}

static uint32_t update_elements(const single *s, uint64_t first, uint64_t count) {
    taste_operands o = {.w = s->whole.w + first, .g = s->whole.g + first, .count = count};
    if (s->whole.m != NULL) o.m = s->whole.m + first;
    if (s->whole.v != NULL) o.v = s->whole.v + first;
    return s->session->update.rule(&o, s->coefficients);
}

/* The task_id-th of equal parts of the chunks. */
static int single_task(int task_id, taste_parallel_group *group, void *closure) {
    const single *s = closure;
    uint64_t part = (single_chunks(s) + (uint64_t)group->task_count - 1) / (uint64_t)group->task_count;
    uint64_t first = part * (uint64_t)task_id * TASTE_CHUNK_ELEMENTS;
    uint64_t end = first + part * TASTE_CHUNK_ELEMENTS;
    if (end > s->whole.count) end = s->whole.count;
    s->session->partials[task_id] = first < end ? update_elements(s, first, end - first) : 0;
    return 0;
}

taste_status taste_session_update_parameter(taste_session *session, const taste_call *call) {
    const taste_model *model = session->model;
    const taste_tensor *tensor = &model->tensors[call->arguments[0]];
    const taste_segment *segment = &model->segments[tensor->segment];
    uint64_t start = taste_now_ns();
    int decayed = tensor->offset_bytes - segment->parameter_offset_bytes < segment->decayed_bytes;
    single s = {.session = session,
                .coefficients = decayed ? &session->update.decayed : &session->update.others,
                .whole = {.w = session->tensors[call->arguments[0]].data,
                          .g = session->tensors[call->arguments[1]].data,
                          .count = tensor->size_bytes / sizeof(float)}};
    if (session->slot_count > 0) s.whole.m = taste_session_of_parameter(session, tensor, session->slots);
    if (session->slot_count > 1)
        s.whole.v = taste_session_of_parameter(session, tensor, session->slots + session->gradient_bytes);
    double bad = 0;
    if (single_chunks(&s) < 2) {
        bad = update_elements(&s, 0, s.whole.count);
    } else {
        int threads = (int)taste_pool_threads(session->pool);
        (void)taste_pool_launch(session->pool, single_task, &s, threads);
        for (int i = 0; i < threads; i++) bad += session->partials[i];
    }
    session->update_ns += taste_now_ns() - start;
    return bad == 0 ? TASTE_STATUS_OK : bad_gradient(session, tensor->name);
}
