/* A session: everything of a run that is not a parameter. */
#ifndef TASTE_SESSION_H
#define TASTE_SESSION_H

#include "parameters.h"
#include "pool.h"
#include "tvm_abi.h"
#include "update_rule.h"

enum {
    TASTE_CHUNK_ELEMENTS = 16384, /* the optimizer's unit of work: fixed, so that sums do not depend on the threads */
    TASTE_MAX_ARGUMENTS = 64      /* of a kernel call */
};

/* What a program was opened for, and what its tensors are bound to at the moment. */
typedef struct taste_binding {
    uint32_t largest_batch; /* 0: not opened */
    uint32_t bound_batch;   /* 0: not bound */
} taste_binding;

struct taste_session {
    const taste_model *model;
    taste_pool *pool;
    taste_error error;
    uint64_t updated_segments; /* of all opened programs */
    const taste_parameters *bound_set;
    taste_binding *bindings;           /* a program */
    taste_dl_tensor *tensors;          /* a tensor of the table; arguments point at them */
    int64_t (*shapes)[TASTE_MAX_DIMS]; /* a tensor */
    uint64_t *gradient_offsets;        /* a segment: where its gradients start; only updated ones have any */
    double *partials;                  /* a chunk, or a thread: its part of a sum over gradients */
    unsigned char *scalars;
    unsigned char *gradients; /* NULL: no opened program keeps them */
    unsigned char *slots;       /* optimizer state: slot_count blocks of gradient_bytes */
    unsigned char *accumulator; /* NULL: none */
    unsigned char *arena;
    uint64_t gradient_bytes;
    uint32_t slot_count;
    float label_smoothing;
    const uint16_t *groups; /* a class: its group; NULL: one of all. The caller's */
    int32_t by_effective_batch;
    float *statistics; /* the states before a micro-batch; only where gradients are accumulated */
    uint32_t accumulated; /* micro-batches since the last update */
    uint32_t accumulated_samples;
    uint32_t seed;              /* of the dropout masks */
    uint32_t step;              /* optimizer steps done */
    taste_update update;        /* of the step under way, where a program updates within backward */
    uint64_t update_ns;         /* that it has taken so far */
    taste_workspace workspace; /* of the calling thread */
};

/* Where a tensor of the arena, the scalars or the gradients lies at this batch size; NULL: not in this session. */
void *taste_session_at(const taste_session *session, const taste_tensor *tensor, uint32_t batch_size);

/* Where the gradient (or accumulated gradient, or optimizer slot: the same offsets in `block`) of a parameter lies; NULL: it
 * is not trained here. */
void *taste_session_of_parameter(const taste_session *session, const taste_tensor *parameter, unsigned char *block);

/* Points every tensor of a program at its memory for this batch size and parameter set. Cheap if nothing changed. */
taste_status taste_session_bind(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                uint32_t batch_size);

/* USAGE where a program updates parameters within its steps. */
taste_status taste_session_check_separate(taste_session *session, uint32_t program);

/* Before backward of a program that updates parameters within it: what its updates do. */
taste_status taste_session_begin_update(taste_session *session, const taste_parameters *parameters, uint32_t program,
                                        const taste_hyper *hyper);

/* The update that a call without a kernel stands for. NON_FINITE: the gradient is; the parameter is spoilt. */
taste_status taste_session_update_parameter(taste_session *session, const taste_call *call);

/* Adds the gradients to the accumulated ones. */
void taste_session_accumulate(taste_session *session, uint32_t batch_size);

#endif
