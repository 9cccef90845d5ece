/* A model of text: the logits of the next token are a row of a table, chosen by the token. One loss a position. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "program.h"
#include "tvm_abi.h"

enum { T = 6, V = 7 };
enum { TABLE, SCALE, D_TABLE, X, Y, LOGITS, LOSS, D_LOGITS, EVAL_X, EVAL_LOGITS, TENSORS };
enum { TABLE_BYTES = 256, ROW_BYTES = 64, LOGITS_BYTES = 192 };

#define TABLE_LAYOUT .dims = 2, .axes = 2, .shape = {V, V}, .size_bytes = TABLE_BYTES, .axis = {{V, 1, V, 0}, {V, 1, 1, 0}}
#define ROW_LAYOUT .dims = 2, .axes = 2, .shape = {-1, T}, .size_bytes = ROW_BYTES, .axis = {{-1, 1, T, 0}, {T, 1, 1, 0}}
#define LOGITS_LAYOUT \
    .dims = 3, .axes = 3, .shape = {-1, T, V}, .size_bytes = LOGITS_BYTES, \
    .axis = {{-1, 1, T * V, 0}, {T, 1, V, 0}, {V, 1, 1, 0}}
#define SHARED(in) .region = in, .program = TASTE_SHARED_PROGRAM
#define ARENA(of, at) .region = TASTE_REGION_BATCHED, .program = of, .offset_bytes = at
#define INT .dtype = TASTE_DTYPE_INT32

static const taste_tensor tensors[TENSORS] = {
    [TABLE] = {.name = "table", TABLE_LAYOUT, SHARED(TASTE_REGION_PARAMETERS), .init_kind = TASTE_INIT_UNIFORM,
               .init_scale = 1.0f},
    [SCALE] = {.name = "loss_scale", SHARED(TASTE_REGION_SCALARS), .dims = 1, .axes = 1, .shape = {1},
               .size_bytes = 64, .axis = {{1, 1, 1, 0}}},
    [D_TABLE] = {.name = "table.gradient", TABLE_LAYOUT, SHARED(TASTE_REGION_GRADIENTS)},
    [X] = {.name = "x", ROW_LAYOUT, ARENA(0, 0), INT},
    [Y] = {.name = "y", ROW_LAYOUT, ARENA(0, ROW_BYTES), INT},
    [LOGITS] = {.name = "logits", LOGITS_LAYOUT, ARENA(0, 2 * ROW_BYTES)},
    [LOSS] = {.name = "loss", ROW_LAYOUT, ARENA(0, 2 * ROW_BYTES + LOGITS_BYTES)},
    [D_LOGITS] = {.name = "logits.gradient", LOGITS_LAYOUT, ARENA(0, 3 * ROW_BYTES + LOGITS_BYTES)},
    [EVAL_X] = {.name = "x", ROW_LAYOUT, ARENA(1, 0), INT},
    [EVAL_LOGITS] = {.name = "logits", LOGITS_LAYOUT, ARENA(1, ROW_BYTES)},
};

static void *data(const taste_ffi_any *arguments, int i) {
    return ((const taste_dl_tensor *)arguments[i].value.as_pointer)->data;
}

static int64_t rows(const taste_ffi_any *arguments) {
    return ((const taste_dl_tensor *)arguments[0].value.as_pointer)->shape[0] * T;
}

/* x, table -> logits */
static int look_up(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    const int32_t *x = data(arguments, 0);
    const float *table = data(arguments, 1);
    (void)handle, (void)count, (void)result;
    for (int64_t r = 0; r < rows(arguments); r++)
        memcpy((float *)data(arguments, 2) + r * V, table + x[r] * V, V * sizeof(float));
    return 0;
}

/* logits, y, loss_scale -> loss, gradient of logits */
static int lose(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    const float *logits = data(arguments, 0), scale = *(const float *)data(arguments, 2);
    const int32_t *y = data(arguments, 1);
    float *loss = data(arguments, 3), *slope = data(arguments, 4);
    (void)handle, (void)count, (void)result;
    for (int64_t r = 0; r < rows(arguments); r++, logits += V, slope += V) {
        float sum = 0;
        for (int v = 0; v < V; v++) sum += expf(logits[v]);
        loss[r] = logf(sum) - logits[y[r]];
        for (int v = 0; v < V; v++) slope[v] = scale * (expf(logits[v]) / sum - (v == y[r] ? 1.0f : 0.0f));
    }
    return 0;
}

/* x, gradient of logits -> gradient of table */
static int scatter(void *handle, const taste_ffi_any *arguments, int32_t count, taste_ffi_any *result) {
    const int32_t *x = data(arguments, 0);
    const float *slope = data(arguments, 1);
    float *table = data(arguments, 2);
    (void)handle, (void)count, (void)result;
    memset(table, 0, V * V * sizeof *table);
    for (int64_t r = 0; r < rows(arguments); r++) {
        for (int v = 0; v < V; v++) table[x[r] * V + v] += slope[r * V + v];
    }
    return 0;
}

#define CALL(function, in_phase, ...) \
    {function, #function, (const uint16_t[]){__VA_ARGS__}, sizeof((uint16_t[]){__VA_ARGS__}) / 2, in_phase, 0, 0, 0}

static const taste_call train_calls[] = {
    CALL(look_up, TASTE_PHASE_FORWARD, X, TABLE, LOGITS),
    CALL(lose, TASTE_PHASE_LOSS, LOGITS, Y, SCALE, LOSS, D_LOGITS),
    CALL(scatter, TASTE_PHASE_BACKWARD, X, D_LOGITS, D_TABLE),
};
static const taste_call eval_calls[] = {CALL(look_up, TASTE_PHASE_FORWARD, EVAL_X, TABLE, EVAL_LOGITS)};
static const taste_block_calls train_blocks[] = {{0, 1, 2, 3, X, LOGITS, TASTE_NO_TENSOR, D_LOGITS}};
static const taste_block_calls eval_blocks[] = {{0, 1, 0, 0, EVAL_X, EVAL_LOGITS, TASTE_NO_TENSOR, TASTE_NO_TENSOR}};

static const taste_program programs[] = {
    {"train", train_calls, 3, 1, 2, train_blocks, 0, 3 * ROW_BYTES + 2 * LOGITS_BYTES, X, Y, LOGITS, LOSS, 1, 1, 0, 0},
    {"eval", eval_calls, 1, 0, 0, eval_blocks, 0, ROW_BYTES + LOGITS_BYTES, EVAL_X, TASTE_NO_TENSOR, EVAL_LOGITS,
     TASTE_NO_TENSOR, 1, 0, 0, 0},
};
static const taste_segment segments[] = {{"table", 0, TABLE_BYTES, TABLE_BYTES, TABLE_BYTES, 0, 0}};
static const char *const block_names[] = {"table"};

const taste_model taste_model_table = {
    .table_version = TASTE_TABLE_VERSION,
    .name = "text",
    .target = "test",
    .features = "",
    .build_id = "text",
    .minimum_batch = 1,
    .classes = V,
    .input_dims = 1,
    .input_shape = {T},
    .tensors = tensors,
    .tensor_count = TENSORS,
    .programs = programs,
    .program_count = 2,
    .segments = segments,
    .segment_count = 1,
    .block_names = block_names,
    .block_count = 1,
    .parameter_bytes = TABLE_BYTES,
    .loss_scale = SCALE,
    .label_smoothing = TASTE_NO_TENSOR,
    .dropout_counter = TASTE_NO_TENSOR,
};
