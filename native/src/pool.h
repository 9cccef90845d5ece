/* The pool's private face: what the kernels' outside symbols and the optimizer stand on. */
#ifndef TASTE_POOL_H
#define TASTE_POOL_H

#include "taste.h"
#include "tvm_abi.h"

enum {
    TASTE_WORKSPACE_BYTES = 131072, /* a thread's scratch memory for kernels */
    TASTE_WORKSPACE_DEPTH = 8       /* blocks of it that may be held at once */
};

/* A stack of scratch blocks over fixed memory. */
typedef struct taste_workspace {
    unsigned char *base;
    uint64_t used;
    uint32_t depth;
    uint64_t start[TASTE_WORKSPACE_DEPTH];
} taste_workspace;

/* What this thread is doing. Kernels are called without a context argument, so it has to be thread-local. */
typedef struct taste_thread_state {
    taste_pool *pool;           /* that launches go to; NULL outside a run */
    taste_workspace *workspace; /* NULL outside a run */
    int in_task;                /* a launch inside a task runs on this thread alone */
    uint32_t entered;           /* depth of taste_pool_enter */
    char failure[192];          /* what a kernel said when it failed */
} taste_thread_state;

extern _Thread_local taste_thread_state taste_thread;

/* Runs tasks 0 .. count - 1 (count 0: one a thread) on the calling thread and the workers; -1 if any failed, its words in
 * taste_thread.failure. Which thread runs a task is fixed: task i runs on thread i modulo the number of threads. */
int taste_pool_launch(taste_pool *pool, taste_task task, void *closure, int count);

uint32_t taste_pool_threads(const taste_pool *pool);

#endif
