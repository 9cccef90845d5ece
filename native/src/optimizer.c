/* SGD over the flat blocks: weights, gradients and momentum of a segment are each one run of memory. Work is cut into chunks
 * of a fixed size, and every sum is one partial a chunk added up in order, so the bits do not depend on the threads. */
#include <math.h>

#include "clock.h"
#include "error.h"
#include "session.h"

/* What one pass does to a chunk. `index` counts chunks over all segments of the pass. */
struct pass;
typedef void (*chunk_work)(const struct pass *pass, float *weights, uint64_t gradient_offset, uint64_t count,
                           uint64_t index);

typedef struct pass {
    taste_session *session;
    taste_parameters *parameters; /* NULL where the pass needs no weights */
    uint64_t segments;            /* bit mask of those it covers */
    chunk_work work;
    const taste_hyper *hyper;
    const unsigned char *gradients;
    float clip;
    int with_momentum;
} pass;

static uint64_t segment_chunks(const taste_segment *segment) {
    return (segment->parameter_bytes / sizeof(float) + TASTE_CHUNK_ELEMENTS - 1) / TASTE_CHUNK_ELEMENTS;
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
    const taste_segment *segment = &p->session->model->segments[s];
    uint64_t elements = segment->parameter_bytes / sizeof(float);
    for (uint64_t c = first; c < end; c++, index++) {
        uint64_t at = c * TASTE_CHUNK_ELEMENTS;
        uint64_t count = elements - at < TASTE_CHUNK_ELEMENTS ? elements - at : TASTE_CHUNK_ELEMENTS;
        float *weights = NULL;
        if (p->parameters != NULL) {
            weights = (float *)(p->parameters->region[TASTE_REGION_PARAMETERS] + segment->parameter_offset_bytes) + at;
        }
        p->work(p, weights, p->session->gradient_offsets[s] + at * sizeof(float), count, index);
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

static void square_chunk(const pass *p, float *weights, uint64_t offset, uint64_t count, uint64_t index) {
    const float *g = (const float *)(p->gradients + offset);
    double sum[8] = {0};
    (void)weights;
    for (uint64_t i = 0; i < count; i++) sum[i % 8] += (double)g[i] * (double)g[i];
    p->session->partials[index] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

static void accumulate_chunk(const pass *p, float *weights, uint64_t offset, uint64_t count, uint64_t index) {
    const float *restrict g = (const float *)(p->session->gradients + offset);
    float *restrict sum = (float *)(p->session->accumulator + offset);
    (void)weights, (void)index;
    if (p->session->accumulated == 0) {
        for (uint64_t i = 0; i < count; i++) sum[i] = g[i];
    } else {
        for (uint64_t i = 0; i < count; i++) sum[i] += g[i];
    }
}

void taste_session_accumulate(taste_session *session, uint32_t batch_size) {
    pass p = {.session = session, .segments = session->updated_segments, .work = accumulate_chunk};
    run_pass(&p);
    session->accumulated++;
    session->accumulated_samples += batch_size;
}

/* Whether the bits are those of NaN or Inf; integer, so that the loop stays vectorised. */
static uint32_t non_finite_bits(float value) {
    union {
        float value;
        uint32_t bits;
    } as = {value};
    return (as.bits & 0x7f800000u) == 0x7f800000u;
}

static uint32_t sgd(float *restrict w, const float *restrict g, uint64_t count, float clip, const taste_hyper *hyper) {
    const float lr = hyper->learning_rate, decay = hyper->weight_decay;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < count; i++) {
        bad |= non_finite_bits(g[i]);
        w[i] -= lr * (g[i] * clip + decay * w[i]);
    }
    return bad;
}

static uint32_t sgd_momentum(float *restrict w, const float *restrict g, float *restrict m, uint64_t count, float clip,
                             const taste_hyper *hyper) {
    const float lr = hyper->learning_rate, decay = hyper->weight_decay, momentum = hyper->momentum;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < count; i++) {
        float gradient = g[i] * clip + decay * w[i];
        bad |= non_finite_bits(g[i]);
        m[i] = momentum * m[i] + gradient;
        w[i] -= lr * m[i];
    }
    return bad;
}

static uint32_t sgd_nesterov(float *restrict w, const float *restrict g, float *restrict m, uint64_t count, float clip,
                             const taste_hyper *hyper) {
    const float lr = hyper->learning_rate, decay = hyper->weight_decay, momentum = hyper->momentum;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < count; i++) {
        float gradient = g[i] * clip + decay * w[i];
        bad |= non_finite_bits(g[i]);
        m[i] = momentum * m[i] + gradient;
        w[i] -= lr * (gradient + momentum * m[i]);
    }
    return bad;
}

static void update_chunk(const pass *p, float *weights, uint64_t offset, uint64_t count, uint64_t index) {
    const float *g = (const float *)(p->gradients + offset);
    uint32_t bad;
    if (!p->with_momentum) {
        bad = sgd(weights, g, count, p->clip, p->hyper);
    } else {
        float *m = (float *)(p->session->momentum + offset);
        bad = (p->hyper->nesterov ? sgd_nesterov : sgd_momentum)(weights, g, m, count, p->clip, p->hyper);
    }
    p->session->partials[index] = bad;
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

static taste_status bad_gradient(const pass *p) {
    return taste_fail(&p->session->error, TASTE_STATUS_NON_FINITE,
                      "the gradient of '%.100s' is NaN or Inf. Lower the learning rate or clip the gradient.",
                      find_bad_gradient(p));
}

static taste_status check_update(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                 const taste_hyper *hyper) {
    const taste_model *model = session->model;
    if (parameters->model != model || program >= model->program_count ||
        session->bindings[program].largest_batch == 0 || model->programs[program].updated_segments == 0) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "program %u trains nothing in this session. Open one that does.", program);
    }
    if (hyper->momentum != 0 && session->momentum == NULL) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "momentum %g in a session opened without. Set momentum in its options.",
                          (double)hyper->momentum);
    }
    if (!isfinite(hyper->learning_rate) || !isfinite(hyper->momentum) || !isfinite(hyper->weight_decay) ||
        !(hyper->gradient_clip >= 0) || (hyper->nesterov && !(hyper->momentum > 0))) {
        return taste_fail(
            &session->error, TASTE_STATUS_USAGE,
            "learning rate %g, momentum %g, weight decay %g, clip %g, nesterov %d do not go together. Correct them.",
            (double)hyper->learning_rate, (double)hyper->momentum, (double)hyper->weight_decay,
            (double)hyper->gradient_clip, hyper->nesterov);
    }
    return TASTE_STATUS_OK;
}

/* Norm of all gradients and the factor that brings it down to the limit, as torch.nn.utils.clip_grad_norm_ has it. */
static taste_status clip_gradients(pass *p, taste_step *out_step) {
    p->work = square_chunk;
    run_pass(p);
    double norm = sqrt(sum_partials(p));
    out_step->gradient_norm = (float)norm;
    if (!isfinite(norm)) return bad_gradient(p);
    double factor = p->hyper->gradient_clip / (norm + 1e-6);
    p->clip = factor < 1 ? (float)factor : 1.0f;
    return TASTE_STATUS_OK;
}

taste_status taste_session_update(taste_session *session, taste_parameters *parameters, uint32_t program,
                                  const taste_hyper *hyper, taste_step *out_step) {
    taste_status status = check_update(session, parameters, program, hyper);
    if (status != TASTE_STATUS_OK) return status;
    uint64_t start = taste_now_ns();
    pass p = {.session = session, .parameters = parameters, .hyper = hyper, .clip = 1.0f};
    p.segments = session->model->programs[program].updated_segments;
    p.gradients = session->accumulated > 0 ? session->accumulator : session->gradients;
    p.with_momentum = hyper->momentum != 0;
    taste_pool_enter(session->pool);
    if (hyper->gradient_clip > 0) status = clip_gradients(&p, out_step);
    if (status == TASTE_STATUS_OK) {
        p.work = update_chunk;
        run_pass(&p);
        if (sum_partials(&p) != 0) status = bad_gradient(&p);
    }
    taste_pool_leave(session->pool);
    session->accumulated = session->accumulated_samples = 0;
    session->dropout[1]++;
    out_step->update_ns = taste_now_ns() - start;
    return status;
}
