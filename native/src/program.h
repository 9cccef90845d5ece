/* The tables that the compiler (cross/link.py) emits and the runtime walks. Data only: no control flow is generated.
 *
 * One `const taste_model taste_model_table` is linked into every binary. Everything in it is read-only.
 *
 * Addresses. A tensor lives in one region; `offset_bytes` counts from the region's start. In TASTE_REGION_BATCHED offset
 * and size are per sample: at batch b the tensor starts at offset_bytes * b. This is what makes a program's memory the
 * closed form fixed_bytes + b * per_sample_bytes. Every fixed tensor is aligned to 64 bytes, every size rounded up to 64.
 */
#ifndef TASTE_PROGRAM_H
#define TASTE_PROGRAM_H

#include <stdint.h>

enum { TASTE_MAX_DIMS = 8, TASTE_TABLE_VERSION = 4, TASTE_NO_TENSOR = 0xffff, TASTE_SHARED_PROGRAM = 0xff };

typedef enum taste_region {
    TASTE_REGION_PARAMETERS = 0, /* in a parameter set; contiguous, in segment order */
    TASTE_REGION_STATES = 1,     /* in a parameter set: running statistics, updated by the train program */
    TASTE_REGION_CONSTANTS = 2,  /* in a parameter set: never updated */
    TASTE_REGION_GRADIENTS = 3,  /* in the session; the offset of a gradient is the offset of its parameter */
    TASTE_REGION_FIXED = 4,      /* arena, independent of the batch */
    TASTE_REGION_BATCHED = 5,    /* arena, offset and size per sample */
    TASTE_REGION_SCALARS = 6     /* session: run-time scalars (loss_scale, label_smoothing, dropout_counter), 64 bytes each */
} taste_region;

typedef enum taste_dtype { TASTE_DTYPE_FLOAT32 = 0, TASTE_DTYPE_INT32 = 1, TASTE_DTYPE_UINT32 = 2 } taste_dtype;

typedef enum taste_init_kind { TASTE_INIT_NONE = 0, TASTE_INIT_UNIFORM = 1, TASTE_INIT_CONSTANT = 2 } taste_init_kind;

typedef enum taste_phase { TASTE_PHASE_FORWARD = 0, TASTE_PHASE_LOSS = 1, TASTE_PHASE_BACKWARD = 2 } taste_phase;

/* One canonical axis. Element i of it lies (i / block) * outer_stride + (i % block) * inner_stride elements from the base. */
typedef struct taste_axis {
    int64_t extent; /* -1: the batch */
    int64_t block;
    int64_t outer_stride;
    int64_t inner_stride;
} taste_axis;

typedef struct taste_tensor {
    const char *name;
    uint8_t dtype;   /* taste_dtype */
    uint8_t region;  /* taste_region */
    uint8_t program; /* index of the only program that has it, or TASTE_SHARED_PROGRAM */
    uint8_t init_kind;
    float init_scale;
    uint8_t dims; /* physical: what kernels see */
    uint8_t axes; /* canonical: what users see (NCHW, OIHW, rows x columns) */
    uint16_t segment;
    int64_t shape[TASTE_MAX_DIMS]; /* physical; -1 in front: the batch */
    taste_axis axis[TASTE_MAX_DIMS];
    int64_t base_elements;  /* of canonical element 0, from the tensor's start */
    uint64_t offset_bytes;  /* BATCHED: per sample */
    uint64_t size_bytes;    /* BATCHED: per sample */
} taste_tensor;

/* A kernel's calling convention: TVM's packed one. Arguments are DLTensor pointers. 0 is success. */
struct taste_ffi_any;
typedef int (*taste_kernel)(void *handle, const struct taste_ffi_any *arguments, int32_t argument_count,
                            struct taste_ffi_any *result);

typedef struct taste_call {
    taste_kernel kernel; /* NULL: the optimizer's update of arguments[0], a parameter, by arguments[1], its gradient */
    const char *name; /* operator and its place, for `profile` */
    const uint16_t *arguments; /* indices into taste_model.tensors */
    uint8_t argument_count;
    uint8_t phase; /* taste_phase */
    uint16_t block;
    uint64_t fixed_flops;
    uint64_t per_sample_flops;
} taste_call;

/* Calls [forward_first, forward_end) and [backward_first, backward_end) of one block. */
typedef struct taste_block_calls {
    uint32_t forward_first, forward_end;
    uint32_t backward_first, backward_end;
    uint16_t input;           /* boundary tensor that the block reads */
    uint16_t output;          /* boundary tensor that it yields */
    uint16_t input_gradient;  /* TASTE_NO_TENSOR where there is none */
    uint16_t output_gradient; /* TASTE_NO_TENSOR where there is none */
} taste_block_calls;

typedef struct taste_program {
    const char *name; /* "train", "eval", ... */
    const taste_call *calls;
    uint32_t call_count;
    uint32_t loss_first, loss_end; /* calls of the loss */
    const taste_block_calls *blocks; /* taste_model.block_count of them */
    uint64_t fixed_bytes;      /* arena */
    uint64_t per_sample_bytes; /* arena */
    uint16_t input;  /* canonical float32 [N, ...], or int32 [N, ...] tokens */
    uint16_t target; /* int32 [N, ...] labels, one a row of logits, or float32 [N, ...]; TASTE_NO_TENSOR in eval */
    uint16_t output; /* logits [N, ..., classes] */
    uint16_t loss;   /* float32 [N, ...], one loss a row of logits, not scaled; TASTE_NO_TENSOR in eval */
    uint64_t read_segments;    /* bit masks over segments (the first 64 blocks' parameters; block i is bit min(i, 63)) */
    uint64_t updated_segments;
    uint8_t joined_backward; /* backward of a block reads what other blocks keep: it runs over all of them or not at all */
    uint8_t fused_update;    /* backward updates parameters too; their gradients live in the arena, each for a few calls */
} taste_program;

/* Parameters and states of one block. Its parameters stand in three groups: trained ones of two and more dimensions, trained
 * ones of fewer (biases, norms: weight decay may leave them out), frozen ones. So each kind of work is a prefix. */
typedef struct taste_segment {
    const char *name;
    uint64_t parameter_offset_bytes, parameter_bytes;
    uint64_t decayed_bytes; /* the first group */
    uint64_t updated_bytes; /* the first two: gradients and optimizer state exist for these only */
    uint64_t state_offset_bytes, state_bytes;
} taste_segment;

/* A kernel that multiplies and adds in registers and nothing else: what it reaches is the limit of this CPU for the code of
 * this build. Its argument is float32 [rows, row_elements]; each row is one task, and changed in place. */
typedef struct taste_limit {
    taste_kernel kernel;
    uint32_t row_elements;
    uint64_t row_flops;
} taste_limit;

typedef struct taste_model {
    uint32_t table_version;
    const char *name;
    const char *target;   /* target name, e.g. "rpi4" */
    const char *features; /* what the CPU must have, space separated: "avx2 fma", "neon", "v zvl256b" */
    const char *build_id; /* hex; the same in manifest.json */
    uint32_t vector_bits; /* vector length the kernels are built for; 0 scalar. On riscv64 with V: exactly vlenb * 8 */
    uint32_t minimum_batch; /* 2 where a batch norm would see one value a channel */
    uint32_t classes;
    uint32_t seed; /* of the seeded initial weights */
    uint8_t input_dims;
    int64_t input_shape[TASTE_MAX_DIMS]; /* of one sample */
    const taste_tensor *tensors;
    uint32_t tensor_count;
    const taste_program *programs;
    uint32_t program_count;
    const taste_segment *segments;
    uint32_t segment_count;
    const char *const *block_names;
    uint32_t block_count;
    uint64_t parameter_bytes; /* sizes of the regions of a parameter set and of the gradients */
    uint64_t state_bytes;
    uint64_t constant_bytes;
    uint16_t loss_scale;      /* scalar tensor float32 [1]: gradients are scaled by it; TASTE_NO_TENSOR: none */
    uint16_t label_smoothing; /* scalar tensor float32 [1]; TASTE_NO_TENSOR: the loss has none */
    uint16_t dropout_counter; /* scalar tensor uint32 [4]: seed, step, first sample, 0; TASTE_NO_TENSOR: no dropout */
    uint32_t input_values;    /* int32 inputs lie in [0, input_values); 0: the input is float32 */
    taste_limit limit;
} taste_model;

extern const taste_model taste_model_table;

#endif
