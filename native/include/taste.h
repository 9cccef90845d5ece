/* libtaste: trains a neural network on this board, with the kernels and tables linked into the same file.
 *
 * Intended usage
 *   1. taste_model_get() and taste_model_check_cpu(): the model, and whether this CPU can run it.
 *   2. Ask for sizes (taste_parameters_bytes, taste_pool_bytes, taste_session_bytes), get blocks of that size from
 *      wherever you like, aligned to TASTE_ALIGNMENT, and open the three objects in them (taste_parameters_init,
 *      taste_pool_start, taste_session_init). Fill the parameters: taste_parameters_seed or taste_parameters_write.
 *   3. For every batch: taste_session_step. With an effective batch larger than what fits: taste_session_gradients for
 *      every micro-batch (in a session opened with `accumulate`), then taste_session_update once.
 *   4. Read the results (taste_parameters_read, taste_tensor_read), then taste_pool_stop. Nothing else has to be closed:
 *      the blocks are yours.
 *
 * Ownership. The library allocates nothing: no malloc, no I/O, no print, no exit, no abort. A block belongs to its object
 * until you stop using the object; it must not move. The model's tables are constant and live as long as the process.
 * Units. Sizes and offsets end in _bytes, times in _ns (monotonic clock), everything else counts things.
 * Alignment. Every block starts at a multiple of TASTE_ALIGNMENT bytes. Values handed in and out (x, y, tensors) need
 * the alignment of their element only.
 * Layout. All values are handed in and out in canonical layout: row-major NCHW, OIHW, rows x columns, 4 bytes an element.
 * Results. A function returns a status; results go through the last argument. After a failure the session's error text
 * (or the taste_error handed in, which may be NULL) holds one line: what failed with its numbers. What to do.
 * Threads. A session, and a parameter set while it is written, belong to one thread at a time. Sessions of different
 * threads may share a pool, a model and a parameter set that only `eval` reads. A step gives the same bits for any number
 * of threads.
 */
#ifndef TASTE_H
#define TASTE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* taste_header_text() returns this file; Python's cffi is given what stands between this mark and the next. */
/* cffi: begin */

/* Also the exit codes of taste-train. */
typedef enum taste_status {
    TASTE_STATUS_OK = 0,
    TASTE_STATUS_INTERNAL = 1, /* a kernel refused its arguments: a fault of the build */
    TASTE_STATUS_USAGE = 2,    /* a wrong argument of the caller */
    TASTE_STATUS_DOES_NOT_FIT =
        10,                     /* memory: a block is too small, or a batch larger than the session was opened for */
    TASTE_STATUS_NO_SPACE = 11, /* disk full */
    TASTE_STATUS_IO = 12,
    TASTE_STATUS_INCOMPATIBLE = 13, /* wrong CPU, or tensors of another model */
    TASTE_STATUS_CORRUPT = 14,      /* a damaged file */
    TASTE_STATUS_NON_FINITE = 15,   /* the loss or a gradient is NaN or Inf */
    TASTE_STATUS_BUSY = 16,         /* the folder of the run is in use */
    TASTE_STATUS_UNSTABLE = 18,     /* the board does not hold what was set */
    TASTE_STATUS_BAD_DATA = 23,     /* a data set that does not give what is asked of it */
    TASTE_STATUS_INTERRUPTED = 130
} taste_status;

enum { TASTE_ALIGNMENT = 64, TASTE_ERROR_BYTES = 320, TASTE_TENSOR_DIMS = 8, TASTE_MAX_THREADS = 256, TASTE_MAX_SLOTS = 2 };

/* Phases of a run, to be added up. Within one run they happen in this order. */
enum { TASTE_RUN_FORWARD = 1, TASTE_RUN_LOSS = 2, TASTE_RUN_BACKWARD = 4, TASTE_RUN_ALL = 7 };

/* What a tensor is. */
typedef enum taste_kind {
    TASTE_KIND_PARAMETER = 0, /* in a parameter set, trained */
    TASTE_KIND_STATE = 1,     /* in a parameter set, running statistics */
    TASTE_KIND_CONSTANT = 2,  /* in a parameter set, never updated */
    TASTE_KIND_GRADIENT = 3,  /* in a session; taste_gradient_read takes the parameter's name */
    TASTE_KIND_ACTIVATION =
        4,                /* in a session's arena: valid from its kernel until its memory is used again; boundaries,
                                  inputs and outputs of a program for the whole run */
    TASTE_KIND_SCALAR = 5 /* in a session: run-time scalars */
} taste_kind;

typedef struct taste_error {
    char text[320];
} taste_error;

typedef struct taste_model taste_model;           /* constant tables; see taste_model_get */
typedef struct taste_parameters taste_parameters; /* a parameter set: parameters, states, constants */
typedef struct taste_pool taste_pool;             /* pinned threads */
typedef struct taste_session taste_session;       /* gradients, optimizer state, arena, error text */

/* ---- Model ---- */

typedef struct taste_model_facts {
    const char *name;
    const char *target;
    const char *features; /* that the CPU must have, space separated */
    const char *build_id; /* also in manifest.json */
    uint32_t vector_bits;
    uint32_t minimum_batch; /* of programs that train: 2 where a batch norm would see one value a channel */
    uint32_t classes;
    uint32_t seed;
    uint32_t input_dims;
    int64_t input_shape[8]; /* of one sample */
    uint32_t program_count;
    uint32_t block_count;
    uint32_t segment_count;
    uint32_t tensor_count;
    uint64_t parameter_bytes; /* as stored */
    uint64_t state_bytes;
    uint64_t constant_bytes;
} taste_model_facts;

/* One program. Tensor fields are indices for taste_model_tensor, -1 where there is none. */
typedef struct taste_program_facts {
    const char *name;
    int32_t input;
    int32_t target;
    int32_t output;
    int32_t loss;
    int32_t updates;      /* 1: it trains (has gradients and an optimizer step) */
    int32_t fused_update; /* 1: its backward updates each parameter as soon as its gradient is there and is needed no more:
                             no gradients are kept, so there is no accumulation, no clipping and no taste_gradient_read */
    uint32_t call_count;
    uint64_t arena_fixed_bytes;
    uint64_t arena_per_sample_bytes;
} taste_program_facts;

/* One block of one program. Tensor fields as above: what a caller supplies to start at this block's edge. */
typedef struct taste_block_facts {
    const char *name;
    int32_t input;
    int32_t output;
    int32_t input_gradient;
    int32_t output_gradient;
} taste_block_facts;

typedef struct taste_tensor_facts {
    const char *name;
    taste_kind kind;
    int32_t program; /* index of the only program that has it, -1: shared by all */
    char dtype;      /* 'f' float32, 'i' int32, 'u' uint32 */
    uint32_t dims;
    int64_t shape[8];       /* canonical; -1 in front: the batch */
    uint64_t element_count; /* of one sample where the tensor is batched */
} taste_tensor_facts;

/* The model linked into this file. Never NULL. */
const taste_model *taste_model_get(void);

/* This header's text. */
const char *taste_header_text(void);

/* Facts of the model, of a program, a block or a tensor. USAGE where the index is out of range. */
taste_status taste_model_describe(const taste_model *model, taste_model_facts *out_facts);
taste_status taste_model_program(const taste_model *model, uint32_t program, taste_program_facts *out_facts);
taste_status taste_model_block(const taste_model *model, uint32_t program, uint32_t block,
                               taste_block_facts *out_facts);
taste_status taste_model_tensor(const taste_model *model, uint32_t tensor, taste_tensor_facts *out_facts);

/* One kernel call of a program. Counts are fixed + batch_size * per_sample. */
typedef struct taste_call_facts {
    const char *name; /* operator, then the tensor that it makes */
    uint64_t fixed_flops;
    uint64_t per_sample_flops; /* of the direct algorithm, whatever the kernel's own */
    uint64_t fixed_bytes;
    uint64_t per_sample_bytes; /* of every tensor that it reads or writes, once each */
} taste_call_facts;

/* Facts of call `call` of a program. USAGE where an index is out of range. */
taste_status taste_model_call(const taste_model *model, uint32_t program, uint32_t call, taste_call_facts *out_facts);

/* Name of a segment (the parameters and states of one block), NULL where the index is out of range. */
const char *taste_model_segment_name(const taste_model *model, uint32_t segment);

/* Index of the program called `name` ("train", "eval", "train_fused"). USAGE if there is none. */
taste_status taste_model_find_program(const taste_model *model, const char *name, uint32_t *out_program);

/* OK if this CPU has every feature and exactly the vector length that the kernels were built for; else INCOMPATIBLE and
 * the reason. Call it first: kernels run on a lesser CPU die on an illegal instruction or give wrong numbers. */
taste_status taste_model_check_cpu(const taste_model *model, taste_error *out_error);

/* ---- Parameter sets ---- */

/* Size of the block for one parameter set. */
size_t taste_parameters_bytes(const taste_model *model);

/* Opens a parameter set in `block` (zeros). DOES_NOT_FIT if `block_bytes` is too small, USAGE if it is not aligned. */
taste_status taste_parameters_init(const taste_model *model, void *block, size_t block_bytes,
                                   taste_parameters **out_parameters, taste_error *out_error);

/* Fills every tensor with its seeded initial value: the same bits on every architecture. Tensors without an initial
 * value of their own (constants of the graph) become zero and are counted in `out_unset`, which may be NULL. */
taste_status taste_parameters_seed(taste_parameters *parameters, uint64_t seed, uint32_t *out_unset);

/* Reads or writes the parameter, state or constant called `name`; `count` must be its number of elements. Elements are
 * float32, or the tensor's own 4-byte type. USAGE: unknown name or wrong count. */
taste_status taste_parameters_write(taste_parameters *parameters, const char *name, const void *values, size_t count,
                                    taste_error *out_error);
taste_status taste_parameters_read(const taste_parameters *parameters, const char *name, size_t count, void *out_values,
                                   taste_error *out_error);

/* The same in pieces: elements [first, first + count) of the tensor with index `tensor`. What lies outside the canonical
 * elements stays as it is: zero since taste_parameters_init. */
taste_status taste_parameters_write_range(taste_parameters *parameters, uint32_t tensor, uint64_t first, size_t count,
                                          const void *values);
taste_status taste_parameters_read_range(const taste_parameters *parameters, uint32_t tensor, uint64_t first,
                                         size_t count, void *out_values);

/* ---- Pool ---- */

/* Size of the block for a pool of `threads` threads: the calling one and threads - 1 workers with their stacks. */
size_t taste_pool_bytes(uint32_t threads);

/* Starts threads - 1 workers in `block`. Thread i is pinned to cores[i]; thread 0 is whoever runs a session, and is pinned
 * while it does. `cores` NULL: the first `threads` CPUs that this process may use; a pool larger than that is not pinned.
 * USAGE: wrong arguments. DOES_NOT_FIT: block too small, or the system refuses a thread. */
taste_status taste_pool_start(uint32_t threads, const uint32_t *cores, void *block, size_t block_bytes,
                              taste_pool **out_pool, taste_error *out_error);

/* Pins the calling thread and keeps the workers awake until taste_pool_leave, which undoes both. A run does this by
 * itself; a loop of short steps is faster with one enter around it. Enter may be nested. */
void taste_pool_enter(taste_pool *pool);
void taste_pool_leave(taste_pool *pool);

/* Ends the workers and waits for them. No session may be running on the pool. */
void taste_pool_stop(taste_pool *pool);

/* Number of CPUs this process may use, at least 1. */
uint32_t taste_pool_available_cores(void);

/* ---- Session ---- */

/* One program at the largest batch size that it will be run with. */
typedef struct taste_use {
    uint32_t program;
    uint32_t batch_size;
} taste_use;

/* What a session will be able to do. */
typedef struct taste_session_options {
    uint32_t slots;     /* floats of optimizer state a parameter: SGD 0, with momentum 1, Adam and AdamW 2 */
    int32_t accumulate; /* 1: has room for accumulated gradients */
} taste_session_options;

typedef enum taste_optimizer {
    TASTE_OPTIMIZER_SGD = 0,
    TASTE_OPTIMIZER_ADAM = 1,
    TASTE_OPTIMIZER_ADAMW = 2
} taste_optimizer;

/* Scalars of one optimizer step, as PyTorch defines them. With g = gradient * clip + weight_decay * w:
 * SGD    w -= learning_rate * g; with momentum m = momentum * m + g; w -= learning_rate * (nesterov ? g + momentum * m : m)
 * Adam   m += (1 - beta1) * (g - m); v = beta2 * v + (1 - beta2) * g * g;
 *        w -= learning_rate / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + epsilon), t = steps done + 1
 * AdamW  the same with g = gradient * clip, after w *= 1 - learning_rate * weight_decay. */
typedef struct taste_hyper {
    float learning_rate;
    float momentum; /* SGD */
    float weight_decay;
    float gradient_clip; /* largest L2 norm of all gradients together (torch clip_grad_norm_); 0: no clipping */
    int32_t nesterov;    /* SGD */
    int32_t optimizer;   /* taste_optimizer */
    float beta1;         /* Adam, AdamW */
    float beta2;
    float epsilon;
    int32_t no_decay_norm; /* 1: no weight decay for parameters of fewer than two dimensions (biases, norms) */
} taste_hyper;

/* What a step did. */
typedef struct taste_step {
    double loss;         /* mean of the rows' losses */
    uint32_t correct;    /* labels that have the largest logit of their row (0 where targets are not labels) */
    float gradient_norm; /* before clipping; 0 without clipping */
    uint64_t load_ns;    /* x and y into the arena */
    uint64_t forward_ns;
    uint64_t backward_ns; /* with the loss */
    uint64_t update_ns;
} taste_step;

/* Size of the block for a session over `uses`: fixed parts + the largest arena of the list. An arena is
 * arena_fixed_bytes + batch_size * arena_per_sample_bytes. USAGE: unknown program, batch size 0 or below the minimum. */
taste_status taste_session_bytes(const taste_model *model, const taste_use *uses, size_t use_count,
                                 const taste_session_options *options, size_t *out_bytes, taste_error *out_error);

/* Opens a session in `block`, running on `pool`. Errors as above, and DOES_NOT_FIT for too small a block. */
taste_status taste_session_init(const taste_model *model, const taste_use *uses, size_t use_count,
                                const taste_session_options *options, taste_pool *pool, void *block, size_t block_bytes,
                                taste_session **out_session, taste_error *out_error);

/* One line: what the last failed call on this session failed at. */
const char *taste_session_error(const taste_session *session);

/* Optimizer steps done so far (Adam's t and the dropout masks depend on it), and the seed of the masks. taste_session_update
 * counts on from here; a new session is at step 0 with the model's seed. */
void taste_session_set_step(taste_session *session, uint32_t seed, uint32_t step);

/* Share of the target that the loss spreads evenly over all classes (PyTorch's label_smoothing); 0 in a new session. USAGE:
 * outside [0, 1), or a loss without it. */
taste_status taste_session_set_label_smoothing(taste_session *session, float smoothing);

/* Keeps classes apart: a row is classified among the classes of its label's group only, those c with groups[c] ==
 * groups[label]. Others have probability 0: they count for neither loss nor gradient nor `correct`. `groups` holds a number for
 * each class and stays the caller's; it may change between steps. NULL, as in a new session: one group of all. USAGE: a loss
 * without labels, or with label smoothing. */
taste_status taste_session_set_class_groups(taste_session *session, const uint16_t *groups);

/* Runs phases (a sum of TASTE_RUN_...) of blocks [first_block, end_block) of a program: forward in order, the loss, backward
 * in reverse order. The loss runs only if end_block is the last block. The boundary tensors that the range reads must be
 * there: from an earlier run of this session, or written with taste_tensor_write. In a build with `--recompute blocks`
 * backward runs over all blocks only, and of a program with fused_update not at all: USAGE otherwise. */
taste_status taste_session_run(taste_session *session, taste_parameters *parameters, uint32_t program, uint32_t phases,
                               uint32_t first_block, uint32_t end_block, uint32_t batch_size);

/* 1: running statistics move at the pace of effective batches, in a session that accumulates. A micro-batch of b rows of an
 * effective batch of G moves them by 1 - 0.9^(b/G) where they would move by 0.1 (PyTorch's momentum; others in proportion).
 * 0 in a new session: every micro-batch moves them by the whole momentum. */
void taste_session_set_time_constant(taste_session *session, int32_t by_effective_batch);

/* Copies a batch into a program's input and target (y may be NULL: only the input). x: float32 or int32 [batch_size,
 * sample]; y: int32 labels, one a row of logits, checked against the number of classes, or float32 [batch_size, ...]. */
taste_status taste_session_load(taste_session *session, uint32_t program, uint32_t batch_size, const void *x,
                                const void *y);

/* load, forward, loss, backward: the gradients of sum(row losses) / (effective_batch * rows a
 * sample). With `accumulate` they are added to
 * those since the last update, so micro-batches of any sizes that sum up to effective_batch give its exact mean.
 * NON_FINITE: the loss is NaN or Inf; parameters are untouched, the error text names the tensor. */
taste_status taste_session_gradients(taste_session *session, taste_parameters *parameters, uint32_t program,
                                     uint32_t batch_size, uint32_t effective_batch, const void *x, const void *y,
                                     taste_step *out_step);

/* One optimizer step over the segments that `program` updates, from the gradients (accumulated ones where there are any).
 * NON_FINITE: a gradient is NaN or Inf (the text names it); with clipping nothing was changed, else parameters are spoilt. */
taste_status taste_session_update(taste_session *session, taste_parameters *parameters, uint32_t program,
                                  const taste_hyper *hyper, taste_step *out_step);

/* taste_session_gradients with effective_batch = batch_size, then taste_session_update; or, of a program with fused_update,
 * both in one: the same bits. USAGE where such a program is to clip, or finds micro-batches accumulated. A gradient that is
 * NaN or Inf stops it there (NON_FINITE): parameters are spoilt. */
taste_status taste_session_step(taste_session *session, taste_parameters *parameters, uint32_t program,
                                uint32_t batch_size, const void *x, const void *y, const taste_hyper *hyper,
                                taste_step *out_step);

/* load and forward, with their times. */
taste_status taste_session_infer(taste_session *session, taste_parameters *parameters, uint32_t program,
                                 uint32_t batch_size, const void *x, taste_step *out_step);

/* taste_session_infer, and the output: logits float32 [batch_size, classes]. */
taste_status taste_session_predict(taste_session *session, taste_parameters *parameters, uint32_t program,
                                   uint32_t batch_size, const void *x, float *out_logits);

/* Runs all calls of a loaded batch once, like taste_session_run, and gives the time of each: `count` must be the program's
 * call_count. A clock is read between calls, so a run takes a little longer than others. `hyper`: of the updates of a program
 * with fused_update; NULL otherwise. */
taste_status taste_session_profile(taste_session *session, taste_parameters *parameters, uint32_t program,
                                   uint32_t batch_size, const taste_hyper *hyper, uint32_t count,
                                   uint64_t *out_call_ns);

/* What this CPU can do at most with all threads of a pool. */
typedef struct taste_limits {
    double flops_per_s; /* multiply-adds on registers alone, by a kernel of this build */
    double bytes_per_s; /* a[i] = b[i] + s * c[i] over `memory`: two reads and a write an element */
} taste_limits;

/* Measures both, the best of several runs: a quarter of a second or so. `memory`, aligned to TASTE_ALIGNMENT, should be some
 * times as large as the caches; its contents are lost. DOES_NOT_FIT if it holds less than a kibibyte a thread, USAGE if it is
 * not aligned. */
taste_status taste_pool_measure(taste_pool *pool, const taste_model *model, void *memory, size_t memory_bytes,
                                taste_limits *out_limits, taste_error *out_error);

/* Reads or writes a tensor of the session's arena (boundaries, their gradients, inputs, outputs) by name, at this batch size;
 * `count` must be its number of elements. */
taste_status taste_tensor_write(taste_session *session, uint32_t program, uint32_t batch_size, const char *name,
                                const void *values, size_t count);
taste_status taste_tensor_read(taste_session *session, uint32_t program, uint32_t batch_size, const char *name,
                               size_t count, void *out_values);

/* Reads the gradient of the parameter called `name`, as the last taste_session_gradients or run left it, accumulated where the
 * session accumulates. USAGE: unknown name, wrong count, not trained in this session. */
taste_status taste_gradient_read(taste_session *session, const char *name, size_t count, float *out_values);

/* Reads or writes elements [first, first + count) of an optimizer slot (0: momentum, Adam's m; 1: its v) of the parameter with
 * index `tensor`. USAGE: no such slot, tensor or range, or one that is not trained in this session. */
taste_status taste_slot_read(const taste_session *session, uint32_t slot, uint32_t tensor, uint64_t first, size_t count,
                             float *out_values);
taste_status taste_slot_write(taste_session *session, uint32_t slot, uint32_t tensor, uint64_t first, size_t count,
                              const float *values);

/* ---- Replay: samples of a stream, kept to be trained on again ---- */

/* Which samples stay. All decisions use random numbers counted from 0: number i is
 *     u(i) = splitmix64(splitmix64(seed ^ fnv1a64("replay")) + i),  splitmix64(x) as in Steele, Lea, Flood 2014,
 * and "below n" means the high 64 bits of u(i) * n, a product of 128 bits. An added sample has the number a = 1, 2, ...
 * RESERVOIR       a <= capacity: slot a - 1. Then j = below a; slot j if j < capacity, else it is not kept. Of a stream of a
 *                 samples each is kept with probability capacity / a.
 * CLASS_BALANCED  the next free slot while there is one. Then the largest class (the first of equals), and all as large as it,
 *                 become "full" for ever. A class that is not full takes a random slot of the largest. A full one with m
 *                 samples stored and n seen, this one included: j = below n; if j < m, a random slot of its own class, else
 *                 it is not kept. A random slot of a class: below count, again and again until one is of the class.
 * RING            every class has capacity / classes slots (taken from the free ones as they are needed) and overwrites its
 *                 oldest. */
typedef enum taste_replay_policy {
    TASTE_REPLAY_RESERVOIR = 0,
    TASTE_REPLAY_CLASS_BALANCED = 1,
    TASTE_REPLAY_RING = 2
} taste_replay_policy;

typedef struct taste_replay_options {
    uint32_t capacity; /* samples; at least `classes` */
    uint32_t sample_bytes;
    uint32_t classes;
    int32_t policy; /* taste_replay_policy */
    uint64_t seed;
} taste_replay_options;

typedef struct taste_replay taste_replay;

/* Size of the block of a buffer; 0: options that make no sense, or fewer slots than classes. */
size_t taste_replay_bytes(const taste_replay_options *options);

/* Opens an empty buffer in `block`. */
taste_status taste_replay_init(const taste_replay_options *options, void *block, size_t block_bytes,
                               taste_replay **out_replay, taste_error *out_error);

/* Opens a block whose bytes were kept (the first taste_replay_bytes of them are the whole state, random numbers included) and
 * goes on. INCOMPATIBLE: made with other options. CORRUPT: no buffer, or one that contradicts itself. */
taste_status taste_replay_open(const taste_replay_options *options, void *block, size_t block_bytes,
                               taste_replay **out_replay, taste_error *out_error);

/* Offers a sample of sample_bytes bytes. The work does not depend on the capacity. USAGE: a label that is no class. */
taste_status taste_replay_add(taste_replay *replay, const void *sample, int32_t label, taste_error *out_error);

/* Samples stored: they are in slots 0 to count - 1. */
uint32_t taste_replay_count(const taste_replay *replay);

/* Draws `count` different slots, all sets equally likely; fewer where fewer are stored. Returns how many. Floyd: for
 * j = stored - count, ..., stored - 1: t = below j + 1; t, or j where t was drawn already. */
uint32_t taste_replay_draw(taste_replay *replay, uint32_t count, uint32_t *out_slots);

/* The bytes and the label in a slot, until the next add; NULL and -1 where there is none. */
const void *taste_replay_sample(const taste_replay *replay, uint32_t slot);
int32_t taste_replay_label(const taste_replay *replay, uint32_t slot);

/* ---- safetensors, over bytes in memory ---- */

enum { TASTE_SAFETENSORS_MAX_TENSORS = 4096, TASTE_SAFETENSORS_MAX_HEADER_BYTES = 4194304 };

/* A header that has been checked whole. Private. */
typedef struct taste_safetensors {
    const char *header;
    uint64_t header_bytes; /* of the JSON */
    uint64_t data_bytes;
    uint64_t cursor;
    uint32_t tensor_count;
    uint64_t seen[8192]; /* hashes of the names, to find duplicates without allocating */
} taste_safetensors;

typedef struct taste_safetensors_entry {
    char name[256]; /* as UTF-8, escapes resolved */
    char dtype[8];  /* "F32", "I32", ... */
    uint32_t dims;
    uint64_t shape[8];
    uint64_t first_byte; /* from the file's start */
    uint64_t end_byte;
} taste_safetensors_entry;

/* Checks the first bytes of a file of `file_bytes` bytes. `prefix` must hold the 8 bytes of the length and, once
 * `out_needed_bytes` says how many, the whole header: with a shorter prefix DOES_NOT_FIT is returned and
 * `out_needed_bytes` set. CORRUPT: anything not as the format says (sizes, JSON, types, gaps, overlaps, duplicates). */
taste_status taste_safetensors_open(const void *prefix, size_t prefix_bytes, uint64_t file_bytes,
                                    taste_safetensors *out_file, uint64_t *out_needed_bytes, taste_error *out_error);

/* The next tensor of the file; 0 when there are no more. taste_safetensors_rewind starts again. */
int32_t taste_safetensors_next(taste_safetensors *file, taste_safetensors_entry *out_entry);
void taste_safetensors_rewind(taste_safetensors *file);

/* Copies the value of `key` in the file's metadata, escapes resolved; 0: there is none, or it does not fit. */
int32_t taste_safetensors_metadata(const taste_safetensors *file, const char *key, size_t capacity, char *out_value);

/* Writes the header (length, JSON, padding) of a file that holds `metadata` (a JSON object of strings, or NULL), the model's
 * tensors of these kinds (a sum of 1 << kind) in the table's order, and behind them, for each of `slots` optimizer slots,
 * a tensor optimizer.SLOT.NAME for every trained parameter. Returns its size, whether or not it fitted into `capacity`
 * bytes. The data follow in the same order, canonical. */
size_t taste_safetensors_header(const taste_model *model, uint32_t kinds, uint32_t slots, const char *metadata,
                                size_t capacity, char *out_header);

/* cffi: end */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
