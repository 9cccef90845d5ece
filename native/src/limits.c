/* What a CPU can do at most, measured: the two limits that a profile compares kernels with. */
#include <stddef.h>

#include "clock.h"
#include "error.h"
#include "model.h"
#include "pool.h"

enum { RUNS = 16, LEAST_NS = 40000000, LEAST_BYTES_A_THREAD = 1024, ROWS_A_THREAD = 4 };

/* Seconds of the fastest of several launches; 0 if one failed. They go on for longer than a scheduler's slice: within one, another
 * program may have a worker's core all the time. */
static double fastest(int (*launch)(void *), void *context) {
    double best = 0;
    uint64_t end = taste_now_ns() + LEAST_NS;
    for (int i = 0; i < RUNS || taste_now_ns() < end; i++) {
        uint64_t start = taste_now_ns();
        if (launch(context) != 0) return 0;
        double seconds = (double)(taste_now_ns() - start) * 1e-9;
        if (best == 0 || seconds < best) best = seconds;
    }
    return best;
}

typedef struct multiply_adds {
    const taste_limit *limit;
    taste_dl_tensor tensor;
    int64_t shape[2];
} multiply_adds;

static int launch_multiply_adds(void *context) {
    multiply_adds *m = context;
    taste_ffi_any argument = {.type_index = TASTE_FFI_DL_TENSOR}, result = {0};
    argument.value.as_pointer = &m->tensor;
    return m->limit->kernel(NULL, &argument, 1, &result);
}

typedef struct triad {
    taste_pool *pool;
    float *memory;
    uint64_t elements; /* of each of the three arrays */
} triad;

static int triad_task(int task_id, taste_parallel_group *group, void *closure) {
    const triad *t = closure;
    uint64_t part = t->elements / (uint64_t)group->task_count / 16 * 16;
    float *restrict a = t->memory + (uint64_t)task_id * part;
    const float *restrict b = a + t->elements, *restrict c = b + t->elements;
    for (uint64_t i = 0; i < part; i++) a[i] = b[i] + 0.5f * c[i];
    return 0;
}

static int launch_triad(void *context) {
    triad *t = context;
    return taste_pool_launch(t->pool, triad_task, t, 0);
}

taste_status taste_pool_measure(taste_pool *pool, const taste_model *model, void *memory, size_t memory_bytes,
                                taste_limits *out_limits, taste_error *out_error) {
    uint32_t threads = taste_pool_threads(pool);
    uint64_t floats = memory_bytes / sizeof(float), rows = (uint64_t)threads * ROWS_A_THREAD;
    uint64_t row_elements = model->limit.row_elements;
    if (memory_bytes < (uint64_t)threads * LEAST_BYTES_A_THREAD || rows * row_elements > floats) {
        return taste_fail(out_error, TASTE_STATUS_DOES_NOT_FIT,
                          "%zu bytes to measure with are too few for %u threads. Hand in more.", memory_bytes, threads);
    }
    if ((uintptr_t)memory % TASTE_ALIGNMENT != 0) {
        return taste_fail(out_error, TASTE_STATUS_USAGE, "the memory to measure with is not aligned to %d bytes. Align it.",
                          TASTE_ALIGNMENT);
    }
    float *values = memory;
    for (uint64_t i = 0; i < floats; i++) values[i] = 0.5f;
    multiply_adds m = {.limit = &model->limit, .shape = {(int64_t)rows, (int64_t)row_elements}};
    m.tensor = (taste_dl_tensor){
        .data = memory,
        .device = {TASTE_DL_CPU, 0},
        .ndim = 2,
        .dtype = {TASTE_DL_FLOAT, 32, 1},
        .shape = m.shape,
    };
    triad t = {.pool = pool, .memory = values, .elements = floats / 3 / 16 * 16};
    taste_pool *outer = taste_thread.pool;
    taste_pool_enter(pool);
    taste_thread.pool = pool;
    double compute_s = fastest(launch_multiply_adds, &m);
    double memory_s = fastest(launch_triad, &t);
    taste_thread.pool = outer;
    taste_pool_leave(pool);
    if (!(compute_s > 0) || !(memory_s > 0)) {
        return taste_fail(out_error, TASTE_STATUS_INTERNAL, "the limits cannot be measured: %s. Build the model again.",
                          taste_thread.failure[0] != 0 ? taste_thread.failure : "no reason given");
    }
    out_limits->flops_per_s = (double)rows * (double)model->limit.row_flops / compute_s;
    out_limits->bytes_per_s = 3.0 * sizeof(float) * (double)t.elements / memory_s;
    return TASTE_STATUS_OK;
}
