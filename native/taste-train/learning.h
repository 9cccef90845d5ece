/* Continual learning: tasks as streams, each sample once, and a buffer of earlier ones that every step draws from. */
#ifndef TASTE_TRAIN_LEARNING_H
#define TASTE_TRAIN_LEARNING_H

#include "evaluate.h"
#include "progress.h"
#include "run_folder.h"
#include "stream.h"

/* What a checkpoint keeps in front of the buffer. Times are the only thing in it that another run would not repeat. */
typedef struct learned {
    uint64_t samples;   /* rows trained on, replayed ones included */
    uint64_t evaluated; /* tasks: rows of `accuracy` that are there */
    uint64_t settled;   /* the last task (from 1) whose running statistics were brought up to date */
    double seconds;     /* of the steps */
    double accuracy[];  /* [tasks][tasks]: after task t, on task k <= t */
} learned;

/* Where everything lies in trainer.beside, and how large it is. */
typedef struct learning_plan {
    uint32_t tasks, classes, groups;
    uint32_t stream_rows, replay_rows; /* of a step */
    uint64_t sample_bytes;
    taste_replay_options replay;
    uint64_t replay_bytes; /* 0: no replay */
    uint64_t learned, buffer, of, seen, counts, train_rows, train_first, test_rows, test_first, slots, raw, labels;
    uint64_t state_bytes; /* `learned` and the buffer behind it: what checkpoints keep */
    uint64_t bytes;
} learning_plan;

typedef struct learning {
    const options *options;
    const trainer *t;
    learning_plan plan;
    task_plan tasks;
    stream train, test;
    learned *learned;
    taste_replay *replay; /* NULL: none */
    uint16_t *seen;       /* a class: 0 where its task has begun */
    uint32_t *slots;
    unsigned char *raw; /* the rows of the stream in this step, as bytes */
    int32_t *labels;
    uint64_t seed;
    float rate;
    uint32_t minimum; /* rows that a step needs */
    int has_statistics;
    place at;         /* updates, task, samples of the task */
    int diverged;
    double loss;
    progress progress;
    run_folder folder;
    checkpoint_facts facts;
    canonical weights, whole;
} learning;

/* lr(b) = lr * b / 20 up to the cap, or lr. */
float learning_rate(const options *options);

/* Sizes, before anything is opened but the files' headers. USAGE: a buffer with fewer places than classes, ... */
taste_status learning_plan_make(const options *options, learning_plan *out, taste_error *error);

/* Streams, buffer and folder; goes on from a checkpoint with --resume. */
taste_status learning_open(const options *options, const trainer *t, const learning_plan *plan, const samples *train,
                           const samples *test, learning *out, taste_error *error);

/* Classes that rows are told apart within, at the present task: as for taste_session_set_class_groups. */
const uint16_t *learning_groups(learning *run);

/* The next chunk of the stream: `passes` updates, each with its own draw, then the chunk is offered to the buffer. A chunk too
 * small for the model is only offered. NON_FINITE: diverged. */
taste_status learning_step(learning *run, taste_error *error);

/* Accuracy on every task so far, behind the last one trained, with running statistics of the present weights. */
taste_status learning_evaluate(learning *run, taste_error *error);

taste_status learning_save_checkpoint(learning *run, taste_error *error);
taste_status learning_save_if_due(learning *run, taste_error *error);

#endif
