/* Kernels of the test model in plain C, called as compiled ones are: packed arguments, parallel loops and workspace through the
 * runtime's symbols. Work is cut into tiles that do not depend on the number of threads. */
#include "kernels_mlp.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "mlp.h"
#include "tvm_abi.h"

typedef struct operands {
    float *at[8];
    int64_t batch;
} operands;

static const taste_dl_tensor *tensor(const taste_ffi_any *arguments, int i) {
    return arguments[i].value.as_pointer;
}

static int refuse(const char *what) {
    const char *parts[] = {"Expected ", what, NULL, " when calling\n"};
    TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 4);
    return -1;
}

/* Unpacks `count` tensors; `batched` is the index of one whose first dimension is the batch, -1: none. */
static int unpack(const taste_ffi_any *arguments, int32_t given, int count, int batched, operands *out) {
    if (given != count) return refuse("another number of arguments");
    for (int i = 0; i < count; i++) {
        if (arguments[i].type_index != TASTE_FFI_DL_TENSOR || tensor(arguments, i)->data == NULL)
            return refuse("a tensor");
        if ((uintptr_t)tensor(arguments, i)->data % 64 != 0) return refuse("aligned data");
        out->at[i] = tensor(arguments, i)->data;
    }
    out->batch = batched < 0 ? 0 : tensor(arguments, batched)->shape[0];
    return batched >= 0 && out->batch < 1 ? refuse("a batch") : 0;
}

/* Tasks of a loop over `count` tiles: the task's part. */
static void part(int task, const taste_parallel_group *group, int64_t count, int64_t *first, int64_t *end) {
    int64_t size = (count + group->task_count - 1) / group->task_count;
    *first = size * task;
    *end = *first + size < count ? *first + size : count;
}

static int hidden_task(int task, taste_parallel_group *group, void *closure) {
    const operands *o = closure;
    const float *x = o->at[0], *w = o->at[1], *b = o->at[2];
    int64_t first, end;
    part(task, group, o->batch, &first, &end);
    for (int64_t n = first; n < end; n++) {
        for (int k = 0; k < STORED; k++) {
            float sum = b[k];
            for (int i = 0; i < INPUTS; i++) sum += x[n * INPUTS + i] * w[(k / LANES * INPUTS + i) * LANES + k % LANES];
            o->at[3][n * STORED + k] = sum > 0 ? sum : 0;
        }
    }
    return 0;
}

int mlp_hidden(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 4, 0, &o) != 0) return -1;
    return __TVMBackendParallelLaunch(hidden_task, &o, 0);
}

int mlp_scale(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 3, 0, &o) != 0) return -1;
    for (int64_t i = 0; i < o.batch * STORED; i++) o.at[2][i] = o.at[0][i] * o.at[1][i % STORED];
    return 0;
}

int mlp_mean(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 3, 0, &o) != 0) return -1;
    float *sum = o.at[1], *mean = o.at[2];
    memset(sum, 0, STORED * sizeof *sum);
    for (int64_t i = 0; i < o.batch * STORED; i++) sum[i % STORED] += o.at[0][i];
    for (int k = 0; k < STORED; k++) {
        mean[k] = (1 - MLP_MEAN_MOMENTUM) * mean[k] + MLP_MEAN_MOMENTUM * (sum[k] / (float)o.batch);
    }
    return 0;
}

int mlp_head(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 4, 0, &o) != 0) return -1;
    for (int64_t n = 0; n < o.batch; n++) {
        for (int c = 0; c < CLASSES; c++) {
            float sum = o.at[2][c];
            for (int k = 0; k < STORED; k++) sum += o.at[0][n * STORED + k] * o.at[1][c * STORED + k];
            o.at[3][n * CLASSES + c] = sum;
        }
    }
    return 0;
}

/* A row: its loss, and its gradient times the loss scale. The probabilities go through the runtime's workspace. */
static int loss_row(const operands *o, int64_t n) {
    const float *logits = o->at[0] + n * CLASSES;
    const int32_t *labels = (const int32_t *)(const void *)o->at[1];
    float *p = __TVMBackendAllocWorkspace(TASTE_DL_CPU, 0, CLASSES * sizeof *p, TASTE_DL_FLOAT, 32);
    if (p == NULL) return -1;
    float highest = logits[0], sum = 0;
    for (int c = 1; c < CLASSES; c++) highest = logits[c] > highest ? logits[c] : highest;
    for (int c = 0; c < CLASSES; c++) sum += p[c] = expf(logits[c] - highest);
    float smoothing = *o->at[3], mean = 0;
    for (int c = 0; c < CLASSES; c++) mean += (logits[c] - highest) / CLASSES;
    o->at[4][n] = logf(sum) - (1.0f - smoothing) * (logits[labels[n]] - highest) - smoothing * mean;
    for (int c = 0; c < CLASSES; c++) {
        float wanted = (c == labels[n] ? 1.0f - smoothing : 0.0f) + smoothing / CLASSES;
        o->at[5][n * CLASSES + c] = *o->at[2] * (p[c] / sum - wanted);
    }
    return __TVMBackendFreeWorkspace(TASTE_DL_CPU, 0, p);
}

static int loss_task(int task, taste_parallel_group *group, void *closure) {
    const operands *o = closure;
    int64_t first, end;
    part(task, group, o->batch, &first, &end);
    for (int64_t n = first; n < end; n++) {
        if (loss_row(o, n) != 0) return -1;
    }
    return 0;
}

int mlp_loss(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 6, 0, &o) != 0) return -1;
    return __TVMBackendParallelLaunch(loss_task, &o, 0);
}

/* dlogits, s -> dw2, db2 */
int mlp_head_weight_gradient(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 4, 0, &o) != 0) return -1;
    memset(o.at[2], 0, CLASSES * STORED * sizeof(float));
    memset(o.at[3], 0, CLASSES * sizeof(float));
    for (int64_t n = 0; n < o.batch; n++) {
        for (int c = 0; c < CLASSES; c++) {
            float g = o.at[0][n * CLASSES + c];
            o.at[3][c] += g;
            for (int k = 0; k < HIDDEN; k++) o.at[2][c * STORED + k] += g * o.at[1][n * STORED + k];
        }
    }
    return 0;
}

/* dlogits, w2 -> ds */
int mlp_head_data_gradient(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 3, 0, &o) != 0) return -1;
    for (int64_t n = 0; n < o.batch; n++) {
        for (int k = 0; k < STORED; k++) {
            float sum = 0;
            for (int c = 0; c < CLASSES; c++) sum += o.at[0][n * CLASSES + c] * o.at[1][c * STORED + k];
            o.at[2][n * STORED + k] = sum;
        }
    }
    return 0;
}

typedef struct weight_gradient {
    operands o;
} weight_gradient;

/* dh, h, x -> dw1, db1: a task takes blocks of units, and adds up the samples in order. */
static int weight_gradient_task(int task, taste_parallel_group *group, void *closure) {
    const operands *o = &((const weight_gradient *)closure)->o;
    const float *dh = o->at[0], *h = o->at[1], *x = o->at[2];
    float *dw = o->at[3], *db = o->at[4];
    int64_t first, end;
    part(task, group, STORED, &first, &end);
    for (int64_t k = first; k < end; k++) {
        db[k] = 0;
        for (int i = 0; i < INPUTS; i++) dw[(k / LANES * INPUTS + i) * LANES + k % LANES] = 0;
        for (int64_t n = 0; n < o->batch; n++) {
            float g = h[n * STORED + k] > 0 ? dh[n * STORED + k] : 0;
            db[k] += g;
            for (int i = 0; i < INPUTS; i++) dw[(k / LANES * INPUTS + i) * LANES + k % LANES] += g * x[n * INPUTS + i];
        }
    }
    return 0;
}

int mlp_hidden_weight_gradient(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    weight_gradient w;
    (void)handle, (void)result;
    if (unpack(arguments, count, 5, 0, &w.o) != 0) return -1;
    return __TVMBackendParallelLaunch(weight_gradient_task, &w, 0);
}

/* dh, h, w1 -> dx */
int mlp_hidden_data_gradient(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 4, 0, &o) != 0) return -1;
    for (int64_t n = 0; n < o.batch; n++) {
        for (int i = 0; i < INPUTS; i++) {
            float sum = 0;
            for (int k = 0; k < STORED; k++) {
                float g = o.at[1][n * STORED + k] > 0 ? o.at[0][n * STORED + k] : 0;
                sum += g * o.at[2][(k / LANES * INPUTS + i) * LANES + k % LANES];
            }
            o.at[3][n * INPUTS + i] = sum;
        }
    }
    return 0;
}

/* Rows of two values: the first times a half plus the second, many times. */
static int multiply_add_task(int task, taste_parallel_group *group, void *closure) {
    operands *o = closure;
    int64_t first, end;
    part(task, group, o->batch, &first, &end);
    for (int64_t n = first; n < end; n++) {
        float sum = o->at[0][2 * n];
        for (int i = 0; i < MLP_LIMIT_STEPS; i++) sum = sum * 0.5f + o->at[0][2 * n + 1];
        o->at[0][2 * n] = sum;
    }
    return 0;
}

int mlp_multiply_add(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    operands o;
    (void)handle, (void)result;
    if (unpack(arguments, count, 1, 0, &o) != 0) return -1;
    return __TVMBackendParallelLaunch(multiply_add_task, &o, 0);
}
