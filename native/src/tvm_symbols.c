/* The outside symbols of compiled kernels. Kernels are called without a context, so each finds its session and pool in
 * taste_thread. */
#include <stdio.h>
#include <string.h>

#include "pool.h"

static int parallel_launch(taste_task task, void *closure, int task_count) {
    return taste_pool_launch(taste_thread.pool, task, closure, task_count);
}

static void *refuse_workspace(uint64_t size_bytes, uint64_t free_bytes) {
    snprintf(taste_thread.failure, sizeof taste_thread.failure, "workspace of %llu bytes asked for, %llu are free",
             (unsigned long long)size_bytes, (unsigned long long)free_bytes);
    return NULL;
}

static void *allocate_workspace(int device_type, int device_id, uint64_t size_bytes, int type_code, int type_bits) {
    taste_workspace *workspace = taste_thread.workspace;
    (void)device_type, (void)device_id, (void)type_code, (void)type_bits;
    if (workspace == NULL) return refuse_workspace(size_bytes, 0);
    uint64_t start = (workspace->used + TASTE_ALIGNMENT - 1) / TASTE_ALIGNMENT * TASTE_ALIGNMENT;
    if (workspace->depth == TASTE_WORKSPACE_DEPTH || start > TASTE_WORKSPACE_BYTES ||
        size_bytes > TASTE_WORKSPACE_BYTES - start) {
        return refuse_workspace(size_bytes, TASTE_WORKSPACE_BYTES - workspace->used);
    }
    workspace->start[workspace->depth++] = start;
    workspace->used = start + size_bytes;
    return workspace->base + start;
}

/* Blocks come back in any order; memory is free again once everything above it has come back. */
static int free_workspace(int device_type, int device_id, void *block) {
    taste_workspace *workspace = taste_thread.workspace;
    (void)device_type, (void)device_id;
    if (workspace == NULL) return -1;
    for (uint32_t i = 0; i < workspace->depth; i++) {
        if (workspace->base + workspace->start[i] != (unsigned char *)block) continue;
        workspace->start[i] |= 1; /* starts are multiples of 64: the lowest bit marks a returned block */
        while (workspace->depth > 0 && (workspace->start[workspace->depth - 1] & 1)) {
            workspace->used = workspace->start[--workspace->depth] & ~(uint64_t)1;
        }
        return 0;
    }
    return -1;
}

int (*__TVMBackendParallelLaunch)(taste_task, void *, int) = parallel_launch;
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate_workspace;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = free_workspace;

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t part_count) {
    size_t used = 0;
    size_t capacity = sizeof taste_thread.failure;
    (void)kind;
    taste_thread.failure[0] = 0;
    for (int32_t i = 0; i < part_count && used + 1 < capacity; i++) {
        if (parts[i] == NULL) continue;
        int written = snprintf(taste_thread.failure + used, capacity - used, "%s", parts[i]);
        if (written > 0) used += (size_t)written;
    }
    /* One line of error text: kernels write several. */
    for (char *c = taste_thread.failure; *c != 0; c++) {
        if (*c == '\n') *c = ' ';
    }
}
