/* The test model's tables, written by hand as cross/link.py writes a real model's. */
#include <stddef.h>

#include "kernels_mlp.h"
#include "mlp.h"
#include "program.h"

#ifndef TABLE_FEATURES
#define TABLE_FEATURES ""
#endif
#ifndef TABLE_VECTOR_BITS
#define TABLE_VECTOR_BITS 0
#endif

/* With FREEZE_HEAD_BIAS the last parameter has no gradient, as in a build that trains only some of them. */
#ifdef FREEZE_HEAD_BIAS
#define HEAD_UPDATED_BYTES W2_BYTES
#define HEAD_BIAS_GRADIENT .region = TASTE_REGION_FIXED, .program = 0, .offset_bytes = B1_BYTES
#else
#define HEAD_UPDATED_BYTES HEAD_BYTES
#define HEAD_BIAS_GRADIENT STORED_IN(TASTE_REGION_GRADIENTS, HIDDEN_BYTES + W2_BYTES, 2)
#endif

#define ROUND(bytes) (((bytes) + 63) / 64 * 64)
#define FLOATS(count) ROUND((count) * 4)

enum {
    W1,
    B1,
    W2,
    B2,
    MEAN,
    CONSTANT,
    LOSS_SCALE,
    SMOOTHING,
    DROPOUT,
    DW1,
    DB1,
    DW2,
    DB2,
    X,
    Y,
    H,
    S,
    LOGITS,
    LOSS,
    DLOGITS,
    DS,
    DH,
    DX,
    SUMS,
    EVAL_X,
    EVAL_H,
    EVAL_S,
    EVAL_LOGITS,
    FUSED_X,
    FUSED_Y,
    FUSED_H,
    FUSED_S,
    FUSED_LOGITS,
    FUSED_LOSS,
    FUSED_DLOGITS,
    FUSED_DS,
    FUSED_DH,
    FUSED_DX,
    FUSED_SUMS,
    FUSED_DW1,
    FUSED_DB1,
    FUSED_DW2,
    FUSED_DB2,
    TENSORS
};

enum {
    W1_BYTES = FLOATS(INPUTS * STORED),
    B1_BYTES = FLOATS(STORED),
    W2_BYTES = FLOATS(CLASSES * STORED),
    B2_BYTES = FLOATS(CLASSES),
    HIDDEN_BYTES = W1_BYTES + B1_BYTES,
    HEAD_BYTES = W2_BYTES + B2_BYTES,
    X_BYTES = FLOATS(INPUTS),
    H_BYTES = FLOATS(STORED),
    ROW_BYTES = 64,
    X_AT = 0,
    Y_AT = X_AT + X_BYTES,
    H_AT = Y_AT + ROW_BYTES,
    S_AT = H_AT + H_BYTES,
    LOGITS_AT = S_AT + H_BYTES,
    LOSS_AT = LOGITS_AT + ROW_BYTES,
    DLOGITS_AT = LOSS_AT + ROW_BYTES,
    DS_AT = DLOGITS_AT + ROW_BYTES,
    DH_AT = DS_AT + H_BYTES,
    DX_AT = DH_AT + H_BYTES,
    TRAIN_BYTES = DX_AT + X_BYTES,
    EVAL_H_AT = X_BYTES,
    EVAL_S_AT = EVAL_H_AT + H_BYTES,
    EVAL_LOGITS_AT = EVAL_S_AT + H_BYTES,
    EVAL_BYTES = EVAL_LOGITS_AT + ROW_BYTES
};

#define W1_LAYOUT \
    .dims = 3, .axes = 2, .shape = {BLOCKS, INPUTS, LANES}, .size_bytes = W1_BYTES, \
    .axis = {{HIDDEN, LANES, INPUTS * LANES, 1}, {INPUTS, 1, LANES, 0}}
#define B1_LAYOUT \
    .dims = 2, .axes = 1, .shape = {BLOCKS, LANES}, .size_bytes = B1_BYTES, .axis = {{HIDDEN, LANES, LANES, 1}}
#define W2_LAYOUT \
    .dims = 2, .axes = 2, .shape = {CLASSES, STORED}, .size_bytes = W2_BYTES, \
    .axis = {{CLASSES, 1, STORED, 0}, {HIDDEN, LANES, LANES, 1}}
#define B2_LAYOUT .dims = 1, .axes = 1, .shape = {CLASSES}, .size_bytes = B2_BYTES, .axis = {{CLASSES, 1, 1, 0}}
#define X_LAYOUT \
    .dims = 4, .axes = 4, .shape = {-1, 2, 4, 5}, .size_bytes = X_BYTES, \
    .axis = {{-1, 1, 40, 0}, {2, 1, 20, 0}, {4, 1, 5, 0}, {5, 1, 1, 0}}
#define H_LAYOUT \
    .dims = 3, .axes = 2, .shape = {-1, BLOCKS, LANES}, .size_bytes = H_BYTES, \
    .axis = {{-1, 1, STORED, 0}, {HIDDEN, LANES, LANES, 1}}
#define LOGITS_LAYOUT \
    .dims = 2, .axes = 2, .shape = {-1, CLASSES}, .size_bytes = ROW_BYTES, \
    .axis = {{-1, 1, CLASSES, 0}, {CLASSES, 1, 1, 0}}
#define ROW_LAYOUT .dims = 1, .axes = 1, .shape = {-1}, .size_bytes = ROW_BYTES, .axis = {{-1, 1, 1, 0}}
#define SCALAR_LAYOUT(count) .dims = 1, .axes = 1, .shape = {count}, .size_bytes = 64, .axis = {{count, 1, 1, 0}}
#define STORED_IN(where, at, in_segment) \
    .region = where, .program = TASTE_SHARED_PROGRAM, .offset_bytes = at, .segment = in_segment
#define ARENA(of, at) .region = TASTE_REGION_BATCHED, .program = of, .offset_bytes = at
#define UNIFORM(scale) .init_kind = TASTE_INIT_UNIFORM, .init_scale = scale
#define SET(value) .init_kind = TASTE_INIT_CONSTANT, .init_scale = value

static const taste_tensor tensors[TENSORS] = {
    [W1] = {.name = "hidden.weight", W1_LAYOUT, STORED_IN(TASTE_REGION_PARAMETERS, 0, 0), UNIFORM(0.15811388f)},
    [B1] = {.name = "hidden.bias", B1_LAYOUT, STORED_IN(TASTE_REGION_PARAMETERS, W1_BYTES, 0), UNIFORM(0.15811388f)},
    [W2] = {.name = "head.weight", W2_LAYOUT, STORED_IN(TASTE_REGION_PARAMETERS, HIDDEN_BYTES, 2), UNIFORM(0.03159f)},
    [B2] = {.name = "head.bias", B2_LAYOUT, STORED_IN(TASTE_REGION_PARAMETERS, HIDDEN_BYTES + W2_BYTES, 2), SET(0)},
    [MEAN] = {.name = "scale.mean", B1_LAYOUT, STORED_IN(TASTE_REGION_STATES, 0, 1), SET(0)},
    [CONSTANT] = {.name = "scale.constant", B1_LAYOUT, STORED_IN(TASTE_REGION_CONSTANTS, 0, 1), SET(1.25f)},
    [LOSS_SCALE] = {.name = "loss_scale", SCALAR_LAYOUT(1), STORED_IN(TASTE_REGION_SCALARS, 0, 0)},
    [SMOOTHING] = {.name = "label_smoothing", SCALAR_LAYOUT(1), STORED_IN(TASTE_REGION_SCALARS, 128, 0)},
    [DROPOUT] = {.name = "dropout_counter",
                 SCALAR_LAYOUT(4),
                 STORED_IN(TASTE_REGION_SCALARS, 64, 0),
                 .dtype = TASTE_DTYPE_UINT32},
    [DW1] = {.name = "hidden.weight.gradient", W1_LAYOUT, STORED_IN(TASTE_REGION_GRADIENTS, 0, 0)},
    [DB1] = {.name = "hidden.bias.gradient", B1_LAYOUT, STORED_IN(TASTE_REGION_GRADIENTS, W1_BYTES, 0)},
    [DW2] = {.name = "head.weight.gradient", W2_LAYOUT, STORED_IN(TASTE_REGION_GRADIENTS, HIDDEN_BYTES, 2)},
    [DB2] = {.name = "head.bias.gradient", B2_LAYOUT, HEAD_BIAS_GRADIENT},
    [X] = {.name = "x", X_LAYOUT, ARENA(0, X_AT)},
    [Y] = {.name = "y", ROW_LAYOUT, ARENA(0, Y_AT), .dtype = TASTE_DTYPE_INT32},
    [H] = {.name = "hidden", H_LAYOUT, ARENA(0, H_AT)},
    [S] = {.name = "scaled", H_LAYOUT, ARENA(0, S_AT)},
    [LOGITS] = {.name = "logits", LOGITS_LAYOUT, ARENA(0, LOGITS_AT)},
    [LOSS] = {.name = "loss", ROW_LAYOUT, ARENA(0, LOSS_AT)},
    [DLOGITS] = {.name = "logits.gradient", LOGITS_LAYOUT, ARENA(0, DLOGITS_AT)},
    [DS] = {.name = "scaled.gradient", H_LAYOUT, ARENA(0, DS_AT)},
    [DH] = {.name = "hidden.gradient", H_LAYOUT, ARENA(0, DH_AT)},
    [DX] = {.name = "x.gradient", X_LAYOUT, ARENA(0, DX_AT)},
    [SUMS] = {.name = "sums", B1_LAYOUT, .region = TASTE_REGION_FIXED, .program = 0},
    [EVAL_X] = {.name = "x", X_LAYOUT, ARENA(1, 0)},
    [EVAL_H] = {.name = "hidden", H_LAYOUT, ARENA(1, EVAL_H_AT)},
    [EVAL_S] = {.name = "scaled", H_LAYOUT, ARENA(1, EVAL_S_AT)},
    [EVAL_LOGITS] = {.name = "logits", LOGITS_LAYOUT, ARENA(1, EVAL_LOGITS_AT)},
    [FUSED_X] = {.name = "x", X_LAYOUT, ARENA(2, X_AT)},
    [FUSED_Y] = {.name = "y", ROW_LAYOUT, ARENA(2, Y_AT), .dtype = TASTE_DTYPE_INT32},
    [FUSED_H] = {.name = "hidden", H_LAYOUT, ARENA(2, H_AT)},
    [FUSED_S] = {.name = "scaled", H_LAYOUT, ARENA(2, S_AT)},
    [FUSED_LOGITS] = {.name = "logits", LOGITS_LAYOUT, ARENA(2, LOGITS_AT)},
    [FUSED_LOSS] = {.name = "loss", ROW_LAYOUT, ARENA(2, LOSS_AT)},
    [FUSED_DLOGITS] = {.name = "logits.gradient", LOGITS_LAYOUT, ARENA(2, DLOGITS_AT)},
    [FUSED_DS] = {.name = "scaled.gradient", H_LAYOUT, ARENA(2, DS_AT)},
    [FUSED_DH] = {.name = "hidden.gradient", H_LAYOUT, ARENA(2, DH_AT)},
    [FUSED_DX] = {.name = "x.gradient", X_LAYOUT, ARENA(2, DX_AT)},
    [FUSED_SUMS] = {.name = "sums", B1_LAYOUT, .region = TASTE_REGION_FIXED, .program = 2},
    [FUSED_DW1] = {.name = "hidden.weight.gradient", W1_LAYOUT, .region = TASTE_REGION_FIXED, .program = 2, .offset_bytes = B1_BYTES},
    [FUSED_DB1] = {.name = "hidden.bias.gradient", B1_LAYOUT, .region = TASTE_REGION_FIXED, .program = 2, .offset_bytes = B1_BYTES + W1_BYTES},
    [FUSED_DW2] = {.name = "head.weight.gradient", W2_LAYOUT, .region = TASTE_REGION_FIXED, .program = 2, .offset_bytes = B1_BYTES},
    [FUSED_DB2] = {.name = "head.bias.gradient", B2_LAYOUT, .region = TASTE_REGION_FIXED, .program = 2, .offset_bytes = B1_BYTES + W2_BYTES},
};

#define CALL(function, in_phase, in_block, ...) \
    {function, #function, (const uint16_t[]){__VA_ARGS__}, sizeof((uint16_t[]){__VA_ARGS__}) / 2, in_phase, in_block, \
     0,        0}

static const taste_call train_calls[] = {
    CALL(mlp_hidden, TASTE_PHASE_FORWARD, 0, X, W1, B1, H),
    CALL(mlp_scale, TASTE_PHASE_FORWARD, 1, H, CONSTANT, S),
    CALL(mlp_mean, TASTE_PHASE_FORWARD, 1, S, SUMS, MEAN),
    CALL(mlp_head, TASTE_PHASE_FORWARD, 2, S, W2, B2, LOGITS),
    CALL(mlp_loss, TASTE_PHASE_LOSS, 2, LOGITS, Y, LOSS_SCALE, SMOOTHING, LOSS, DLOGITS),
    CALL(mlp_head_weight_gradient, TASTE_PHASE_BACKWARD, 2, DLOGITS, S, DW2, DB2),
    CALL(mlp_head_data_gradient, TASTE_PHASE_BACKWARD, 2, DLOGITS, W2, DS),
    CALL(mlp_scale, TASTE_PHASE_BACKWARD, 1, DS, CONSTANT, DH),
    CALL(mlp_hidden_weight_gradient, TASTE_PHASE_BACKWARD, 0, DH, H, X, DW1, DB1),
    CALL(mlp_hidden_data_gradient, TASTE_PHASE_BACKWARD, 0, DH, H, W1, DX),
};

static const taste_call eval_calls[] = {
    CALL(mlp_hidden, TASTE_PHASE_FORWARD, 0, EVAL_X, W1, B1, EVAL_H),
    CALL(mlp_scale, TASTE_PHASE_FORWARD, 1, EVAL_H, CONSTANT, EVAL_S),
    CALL(mlp_head, TASTE_PHASE_FORWARD, 2, EVAL_S, W2, B2, EVAL_LOGITS),
};

#define UPDATE(parameter, gradient, in_block) \
    {NULL, "update " #parameter, (const uint16_t[]){parameter, gradient}, 2, TASTE_PHASE_BACKWARD, in_block, 0, 0}

/* The gradients of the head lie where those of the hidden layer will. */
static const taste_call fused_calls[] = {
    CALL(mlp_hidden, TASTE_PHASE_FORWARD, 0, FUSED_X, W1, B1, FUSED_H),
    CALL(mlp_scale, TASTE_PHASE_FORWARD, 1, FUSED_H, CONSTANT, FUSED_S),
    CALL(mlp_mean, TASTE_PHASE_FORWARD, 1, FUSED_S, FUSED_SUMS, MEAN),
    CALL(mlp_head, TASTE_PHASE_FORWARD, 2, FUSED_S, W2, B2, FUSED_LOGITS),
    CALL(mlp_loss, TASTE_PHASE_LOSS, 2, FUSED_LOGITS, FUSED_Y, LOSS_SCALE, SMOOTHING, FUSED_LOSS, FUSED_DLOGITS),
    CALL(mlp_head_weight_gradient, TASTE_PHASE_BACKWARD, 2, FUSED_DLOGITS, FUSED_S, FUSED_DW2, FUSED_DB2),
    CALL(mlp_head_data_gradient, TASTE_PHASE_BACKWARD, 2, FUSED_DLOGITS, W2, FUSED_DS),
    UPDATE(W2, FUSED_DW2, 2),
#ifndef FREEZE_HEAD_BIAS
    UPDATE(B2, FUSED_DB2, 2),
#endif
    CALL(mlp_scale, TASTE_PHASE_BACKWARD, 1, FUSED_DS, CONSTANT, FUSED_DH),
    CALL(mlp_hidden_weight_gradient, TASTE_PHASE_BACKWARD, 0, FUSED_DH, FUSED_H, FUSED_X, FUSED_DW1, FUSED_DB1),
    CALL(mlp_hidden_data_gradient, TASTE_PHASE_BACKWARD, 0, FUSED_DH, FUSED_H, W1, FUSED_DX),
    UPDATE(W1, FUSED_DW1, 0),
    UPDATE(B1, FUSED_DB1, 0),
};

enum { FUSED_CALLS = sizeof fused_calls / sizeof *fused_calls };

static const taste_block_calls fused_blocks[] = {
    {0, 1, FUSED_CALLS - 4, FUSED_CALLS, FUSED_X, FUSED_H, FUSED_DX, FUSED_DH},
    {1, 3, FUSED_CALLS - 5, FUSED_CALLS - 4, FUSED_H, FUSED_S, FUSED_DH, FUSED_DS},
    {3, 4, 5, FUSED_CALLS - 5, FUSED_S, FUSED_LOGITS, FUSED_DS, FUSED_DLOGITS},
};

static const taste_block_calls train_blocks[] = {
    {0, 1, 8, 10, X, H, DX, DH},
    {1, 3, 7, 8, H, S, DH, DS},
    {3, 4, 5, 7, S, LOGITS, DS, DLOGITS},
};

static const taste_block_calls eval_blocks[] = {
    {0, 1, 0, 0, EVAL_X, EVAL_H, TASTE_NO_TENSOR, TASTE_NO_TENSOR},
    {1, 2, 0, 0, EVAL_H, EVAL_S, TASTE_NO_TENSOR, TASTE_NO_TENSOR},
    {2, 3, 0, 0, EVAL_S, EVAL_LOGITS, TASTE_NO_TENSOR, TASTE_NO_TENSOR},
};

static const taste_program programs[] = {
    {.name = "train",
     .calls = train_calls,
     .call_count = 10,
     .loss_first = 4,
     .loss_end = 5,
     .blocks = train_blocks,
     .fixed_bytes = B1_BYTES + B2_BYTES,
     .per_sample_bytes = TRAIN_BYTES,
     .input = X,
     .target = Y,
     .output = LOGITS,
     .loss = LOSS,
     .read_segments = 7,
     .updated_segments = 5},
    {.name = "eval",
     .calls = eval_calls,
     .call_count = 3,
     .blocks = eval_blocks,
     .fixed_bytes = 0,
     .per_sample_bytes = EVAL_BYTES,
     .input = EVAL_X,
     .target = TASTE_NO_TENSOR,
     .output = EVAL_LOGITS,
     .loss = TASTE_NO_TENSOR,
     .read_segments = 7,
     .updated_segments = 0},
    {.name = "train_fused",
     .calls = fused_calls,
     .call_count = FUSED_CALLS,
     .loss_first = 4,
     .loss_end = 5,
     .blocks = fused_blocks,
     .fixed_bytes = B1_BYTES + W1_BYTES + B1_BYTES,
     .per_sample_bytes = TRAIN_BYTES,
     .input = FUSED_X,
     .target = FUSED_Y,
     .output = FUSED_LOGITS,
     .loss = FUSED_LOSS,
     .read_segments = 7,
     .updated_segments = 5,
     .fused_update = 1},
};

static const taste_segment segments[] = {
    {"hidden", 0, HIDDEN_BYTES, W1_BYTES, HIDDEN_BYTES, 0, 0},
    {"scale", HIDDEN_BYTES, 0, 0, 0, 0, B1_BYTES},
    {"head", HIDDEN_BYTES, HEAD_BYTES, W2_BYTES, HEAD_UPDATED_BYTES, B1_BYTES, 0},
};

static const char *const block_names[] = {"hidden", "scale", "head"};

const taste_model taste_model_table = {
    .table_version = TASTE_TABLE_VERSION,
    .name = "mlp",
    .target = "test",
    .features = TABLE_FEATURES,
    .build_id = "0123456789abcdef",
    .vector_bits = TABLE_VECTOR_BITS,
    .minimum_batch = 1,
    .classes = CLASSES,
    .seed = 7,
    .input_dims = 3,
    .input_shape = {2, 4, 5},
    .tensors = tensors,
    .tensor_count = TENSORS,
    .programs = programs,
    .program_count = 3,
    .segments = segments,
    .segment_count = 3,
    .block_names = block_names,
    .block_count = 3,
    .parameter_bytes = HIDDEN_BYTES + HEAD_BYTES,
    .state_bytes = B1_BYTES,
    .constant_bytes = B1_BYTES,
    .loss_scale = LOSS_SCALE,
    .label_smoothing = SMOOTHING,
    .dropout_counter = DROPOUT,
    .limit = {mlp_multiply_add, 2, 2 * MLP_LIMIT_STEPS},
};
