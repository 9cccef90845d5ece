/* What a verb runs on: one mapped block with parameters, pool, session and buffers. */
#ifndef TASTE_TRAIN_TRAINER_H
#define TASTE_TRAIN_TRAINER_H

#include <signal.h>

#include "canonical.h"
#include "footprint.h"
#include "options.h"

/* A batch and one row as a packed file has it. */
typedef struct batch_buffer {
    void *x; /* 4 bytes an element */
    void *y;
    unsigned char *raw;
} batch_buffer;

typedef struct trainer {
    const taste_model *model;
    uint32_t program;
    taste_program_facts facts;
    uint32_t batch_size;
    uint32_t threads;
    footprint footprint;
    unsigned char *block; /* NULL: not mapped */
    taste_parameters *parameters;
    taste_pool *pool; /* NULL: not started */
    taste_session *session;
    uint32_t eval_program;   /* of a trainer that trains, to be run in between; else the program itself */
    batch_buffer batches[2]; /* the second only where the program trains */
    float *logits;
    float *staging;
    unsigned char *beside; /* options.beside_bytes of them */
    uint64_t x_sample_bytes;
    uint64_t y_sample_bytes;
    uint64_t logits_sample_bytes;
} trainer;

/* Set by Ctrl-C; loops look at it between steps. */
extern volatile sig_atomic_t trainer_interrupted;

/* Threads that a run will use: what was asked for, the named cores, or all that there are. */
uint32_t trainer_threads(const options *options);

/* The program that runs with these options: the one they name, else one that trains: train_fused where every step is one
 * micro-batch without clipping, its gradients are not to be read, and the build has it, or train. The bits are the same. */
const char *trainer_program(const options *options, const taste_model *model);

/* What a run of this program will need. */
footprint_need trainer_need(const options *options, const taste_model *model, uint32_t program);

/* Checks CPU and memory, announces the plan, maps and touches the block, fills the parameters from the weights file or the
 * seed, starts the pool. `kinds` of tensors without a weights file or seeded value are an error for verbs whose result
 * would mean nothing (`needs_weights`). trainer_close undoes it, whatever the outcome. */
taste_status trainer_open(const options *options, const char *program, int needs_weights, trainer *out,
                          taste_error *error);
void trainer_close(trainer *trainer);

/* Its tensors of these kinds (a sum of 1 << taste_kind), without slots. */
canonical trainer_canonical(const trainer *trainer, uint32_t kinds);

/* The session's own error text, with its status, into `error`. */
taste_status trainer_failed(const trainer *trainer, taste_status status, taste_error *error);

#endif
