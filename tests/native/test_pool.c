/* The pool: every task runs once, on its own thread, failures come back, affinity is given back. */
#include "pool.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { TASKS = 64 };

static _Atomic int runs[TASKS];
static _Atomic int nested;

static int count_task(int task, taste_parallel_group *group, void *closure) {
    CHECK(group->task_count <= TASKS && task < group->task_count);
    atomic_fetch_add(&runs[task], 1);
    (void)closure;
    return 0;
}

static int nested_task(int task, taste_parallel_group *group, void *closure) {
    CHECK(group->task_count == 1);
    (void)task, (void)closure;
    atomic_fetch_add(&nested, 1);
    return 0;
}

static int nesting_task(int task, taste_parallel_group *group, void *closure) {
    (void)task, (void)group, (void)closure;
    return __TVMBackendParallelLaunch(nested_task, NULL, 0);
}

static int failing_task(int task, taste_parallel_group *group, void *closure) {
    const char *parts[] = {"task ", NULL, "failed\nhere"};
    (void)group, (void)closure;
    if (task != group->task_count - 1) return 0;
    TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 3);
    return -1;
}

static int greedy_task(int task, taste_parallel_group *group, void *closure) {
    (void)task, (void)group, (void)closure;
    return __TVMBackendAllocWorkspace(TASTE_DL_CPU, 0, TASTE_WORKSPACE_BYTES + 1, TASTE_DL_FLOAT, 32) == NULL ? -1 : 0;
}

static void check_launches(taste_pool *pool, uint32_t threads) {
    for (int count = 0; count <= TASKS; count += 16) {
        memset((void *)(uintptr_t)runs, 0, sizeof runs);
        CHECK(taste_pool_launch(pool, count_task, NULL, count) == 0);
        int expected = count > 0 ? count : (int)threads;
        for (int i = 0; i < TASKS; i++) CHECK(atomic_load(&runs[i]) == (i < expected));
    }
    for (int i = 0; i < 200; i++) CHECK(taste_pool_launch(pool, count_task, NULL, 0) == 0);
    taste_thread.failure[0] = 0;
    CHECK(taste_pool_launch(pool, failing_task, NULL, 0) != 0);
    CHECK(strcmp(taste_thread.failure, "task failed here") == 0);
    CHECK(taste_pool_launch(pool, greedy_task, NULL, 0) != 0);
    CHECK(strstr(taste_thread.failure, "workspace of") != NULL);
    CHECK(taste_pool_launch(pool, count_task, NULL, 0) == 0);
}

/* Blocks come in any order back, and the workspace is whole again. */
static void check_workspace(void) {
    static _Alignas(64) unsigned char memory[TASTE_WORKSPACE_BYTES];
    taste_workspace workspace = {.base = memory};
    taste_thread.workspace = &workspace;
    void *blocks[TASTE_WORKSPACE_DEPTH];
    for (int i = 0; i < TASTE_WORKSPACE_DEPTH; i++) {
        blocks[i] = __TVMBackendAllocWorkspace(TASTE_DL_CPU, 0, 100, TASTE_DL_FLOAT, 32);
        CHECK(blocks[i] != NULL && (uintptr_t)blocks[i] % TASTE_ALIGNMENT == 0);
    }
    CHECK(__TVMBackendAllocWorkspace(TASTE_DL_CPU, 0, 4, TASTE_DL_FLOAT, 32) == NULL);
    for (int i = 0; i < TASTE_WORKSPACE_DEPTH; i++) CHECK(__TVMBackendFreeWorkspace(TASTE_DL_CPU, 0, blocks[i]) == 0);
    CHECK(workspace.used == 0 && workspace.depth == 0);
    CHECK(__TVMBackendAllocWorkspace(TASTE_DL_CPU, 0, TASTE_WORKSPACE_BYTES, TASTE_DL_FLOAT, 32) == memory);
    CHECK(__TVMBackendFreeWorkspace(TASTE_DL_CPU, 0, memory + 1) != 0);
    CHECK(__TVMBackendFreeWorkspace(TASTE_DL_CPU, 0, memory) == 0);
    taste_thread.workspace = NULL;
    CHECK(__TVMBackendAllocWorkspace(TASTE_DL_CPU, 0, 4, TASTE_DL_FLOAT, 32) == NULL);
}

static void check_affinity(taste_pool *pool) {
    cpu_set_t before, inside, after;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    taste_pool_enter(pool);
    taste_pool_enter(pool);
    CHECK(sched_getaffinity(0, sizeof inside, &inside) == 0);
    CHECK(CPU_COUNT(&inside) == 1);
    taste_pool_leave(pool);
    taste_pool_leave(pool);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&before, &after));
}

void test_pool(void) {
    const uint32_t sizes[] = {1, 2, 3, 5};
    taste_error error;
    taste_pool *pool = NULL;
    check_workspace();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = taste_pool_bytes(sizes[i]);
        void *block = new_block(bytes);
        CHECK(taste_pool_start(sizes[i], NULL, block, bytes, &pool, &error) == TASTE_STATUS_OK);
        check_launches(pool, sizes[i]);
        taste_thread.pool = pool;
        atomic_store(&nested, 0);
        CHECK(__TVMBackendParallelLaunch(nesting_task, NULL, 0) == 0);
        CHECK(atomic_load(&nested) == (int)sizes[i]);
        taste_thread.pool = NULL;
        if (sizes[i] <= taste_pool_available_cores()) check_affinity(pool);
        taste_pool_stop(pool);
        free(block);
    }
    const uint32_t nowhere[] = {1000};
    void *block = new_block(taste_pool_bytes(1));
    CHECK(taste_pool_start(1, nowhere, block, taste_pool_bytes(1), &pool, &error) == TASTE_STATUS_USAGE);
    CHECK(strstr(error.text, "core 1000") != NULL);
    CHECK(taste_pool_start(0, NULL, block, 0, &pool, &error) == TASTE_STATUS_USAGE);
    CHECK(taste_pool_start(1, NULL, block, 64, &pool, &error) == TASTE_STATUS_DOES_NOT_FIT);
    free(block);
}
