/* A data set cut into tasks that come one after the other. */
#ifndef TASTE_TRAIN_STREAM_H
#define TASTE_TRAIN_STREAM_H

#include "samples.h"

enum { STREAM_DOMAINS = 4096, STREAM_NO_TASK = 0xffff };

/* What belongs to which task: classes, or domains (a speaker, a camera). */
typedef struct task_plan {
    int by_domain;
    uint32_t tasks;
    uint32_t groups; /* classes or domains that there are */
    uint16_t *of;    /* the task of each; STREAM_NO_TASK behind the last group */
    uint32_t capacity;
} task_plan;

/* The rows of a file by task. */
typedef struct stream {
    const samples *samples;
    uint32_t *rows;  /* task by task, each in the file's order */
    uint32_t *first; /* tasks + 1: where a task's rows start */
} stream;

/* How many tasks the options ask for: --tasks, or the highest of --task-of and one. USAGE: a list that cannot be read. */
taste_status task_plan_count(const learn_options *options, uint32_t *out_tasks, taste_error *error);

/* Fills `plan->of`: from the list, or the classes (domains) up to the largest of the file in the keyed order of the order seed,
 * shared out evenly. USAGE: a class that the model does not have. BAD_DATA: no domains in the file. */
taste_status task_plan_make(const learn_options *options, const samples *train, uint32_t classes, task_plan *plan,
                            taste_error *error);

/* Sorts a file's rows into tasks; of each class the first `per_class` (0: all). `counts` has room for `classes` numbers.
 * BAD_DATA: an undeclared class or domain, or a task without samples. */
taste_status stream_fill(const task_plan *plan, uint32_t per_class, uint32_t classes, uint32_t *counts, stream *s,
                         taste_error *error);

#endif
