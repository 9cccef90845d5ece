/* The thread pool behind the kernels' parallel loops. Every thread is pinned, the caller too: left free, it can share a core
 * with a worker, and a step then runs at the speed of one thread. Between launches workers spin for a short while, since
 * the next loop is microseconds away, then give up the core, then sleep on a futex. */
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "error.h"
#include "model.h"

/* Kernels keep little on the stack. Sanitizers keep their own state on it. */
#define STACK_BYTES (128 << 10)
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#undef STACK_BYTES
#define STACK_BYTES (1 << 20)
#endif
#endif

enum { SPINS = 2000, SPIN_NS = 2000000 };

typedef struct worker {
    taste_pool *pool;
    pthread_t thread;
    uint32_t index;
    unsigned char *guard; /* a page below the stack that may not be touched; NULL if the system refused */
    taste_workspace workspace;
} worker;

struct taste_pool {
    uint32_t threads;
    int pinned;
    uint32_t cores[TASTE_MAX_THREADS];
    worker *workers;          /* threads - 1 of them */
    cpu_set_t saved_affinity; /* of the thread that entered */
    pthread_mutex_t launch;   /* sessions that share the pool take turns */
    taste_task task;
    void *closure;
    int task_count;
    char failure[sizeof((taste_thread_state *)0)->failure];
    _Alignas(64) _Atomic uint32_t generation; /* of launches; workers wait for it to change */
    _Alignas(64) _Atomic uint32_t pending;    /* workers that have not finished the launch */
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic uint32_t caller_sleeps;
    _Atomic uint32_t entered;
    _Atomic int stopping;
    _Atomic int failed;
};

_Thread_local taste_thread_state taste_thread;
static _Thread_local cpu_set_t entered_affinity;

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static void futex(_Atomic uint32_t *word, int operation, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)word, operation, value, NULL, NULL, 0);
}

/* Spins, then yields, until the word differs from `value`; gives up after a while and returns 0. */
static int spin_until_not(taste_pool *pool, _Atomic uint32_t *word, uint32_t value) {
    if (!pool->pinned) return atomic_load_explicit(word, memory_order_acquire) != value;
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
        relax();
    }
    uint64_t end = taste_now_ns() + SPIN_NS;
    do {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
        sched_yield();
    } while (atomic_load_explicit(&pool->entered, memory_order_relaxed) != 0 && taste_now_ns() < end);
    return 0;
}

/* Every task of the launch that belongs to thread `index`. */
static int run_share(taste_pool *pool, uint32_t index) {
    taste_parallel_group group = {NULL, pool->task_count};
    int failed = 0;
    taste_thread.in_task = 1;
    for (int i = (int)index; i < pool->task_count; i += (int)pool->threads)
        failed |= pool->task(i, &group, pool->closure);
    taste_thread.in_task = 0;
    /* The first to fail writes down why; the launch's end orders it before the caller's reading. */
    if (failed != 0 && atomic_exchange(&pool->failed, 1) == 0)
        memcpy(pool->failure, taste_thread.failure, sizeof pool->failure);
    return failed;
}

static int pin(const taste_pool *pool, uint32_t index) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(pool->cores[index], &set);
    return sched_setaffinity(0, sizeof set, &set);
}

static void *worker_main(void *argument) {
    worker *self = argument;
    taste_pool *pool = self->pool;
    uint32_t seen = 0;
    taste_thread.pool = pool;
    taste_thread.workspace = &self->workspace;
    if (pool->pinned) (void)pin(pool, self->index);
    for (;;) {
        while (!spin_until_not(pool, &pool->generation, seen)) {
            atomic_fetch_add(&pool->sleepers, 1);
            futex(&pool->generation, FUTEX_WAIT_PRIVATE, seen);
            atomic_fetch_sub(&pool->sleepers, 1);
        }
        seen++;
        if (atomic_load(&pool->stopping)) return NULL;
        (void)run_share(pool, self->index);
        if (atomic_fetch_sub(&pool->pending, 1) == 1 && atomic_load(&pool->caller_sleeps)) {
            futex(&pool->pending, FUTEX_WAKE_PRIVATE, 1);
        }
    }
}

static void announce(taste_pool *pool) {
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers) > 0) futex(&pool->generation, FUTEX_WAKE_PRIVATE, INT_MAX);
}

static void await_workers(taste_pool *pool) {
    uint32_t left;
    while ((left = atomic_load_explicit(&pool->pending, memory_order_acquire)) != 0) {
        if (spin_until_not(pool, &pool->pending, left)) continue;
        atomic_store(&pool->caller_sleeps, 1);
        futex(&pool->pending, FUTEX_WAIT_PRIVATE, left);
        atomic_store(&pool->caller_sleeps, 0);
    }
}

static int run_alone(taste_task task, void *closure, int count) {
    taste_parallel_group group = {NULL, count > 0 ? count : 1};
    int failed = 0;
    int outer = taste_thread.in_task;
    taste_thread.in_task = 1;
    for (int i = 0; i < group.task_count; i++) failed |= task(i, &group, closure);
    taste_thread.in_task = outer;
    return failed != 0 ? -1 : 0;
}

int taste_pool_launch(taste_pool *pool, taste_task task, void *closure, int count) {
    if (pool == NULL || pool->threads == 1 || taste_thread.in_task) return run_alone(task, closure, count);
    pthread_mutex_lock(&pool->launch);
    pool->task = task;
    pool->closure = closure;
    pool->task_count = count > 0 ? count : (int)pool->threads;
    atomic_store(&pool->failed, 0);
    atomic_store(&pool->pending, pool->threads - 1);
    announce(pool);
    (void)run_share(pool, 0);
    await_workers(pool);
    int failed = atomic_load(&pool->failed);
    if (failed) memcpy(taste_thread.failure, pool->failure, sizeof pool->failure);
    pthread_mutex_unlock(&pool->launch);
    return failed ? -1 : 0;
}

uint32_t taste_pool_threads(const taste_pool *pool) {
    return pool->threads;
}

uint32_t taste_pool_available_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count > TASTE_MAX_THREADS ? TASTE_MAX_THREADS : (uint32_t)count;
}

void taste_pool_enter(taste_pool *pool) {
    atomic_fetch_add(&pool->entered, 1);
    if (taste_thread.entered++ > 0 || !pool->pinned) return;
    CPU_ZERO(&entered_affinity);
    if (sched_getaffinity(0, sizeof entered_affinity, &entered_affinity) != 0) CPU_ZERO(&entered_affinity);
    (void)pin(pool, 0);
}

void taste_pool_leave(taste_pool *pool) {
    atomic_fetch_sub(&pool->entered, 1);
    if (--taste_thread.entered > 0 || !pool->pinned || CPU_COUNT(&entered_affinity) == 0) return;
    (void)sched_setaffinity(0, sizeof entered_affinity, &entered_affinity);
}

static uint64_t page_bytes(void) {
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* One worker's memory: its stack with a guard page, rounded up so that pages can be found in it, and its workspace. */
static uint64_t worker_bytes(void) {
    return STACK_BYTES + 2 * page_bytes() + TASTE_WORKSPACE_BYTES;
}

size_t taste_pool_bytes(uint32_t threads) {
    if (threads == 0 || threads > TASTE_MAX_THREADS) return 0;
    return taste_round_up(sizeof(taste_pool)) + (threads - 1) * (taste_round_up(sizeof(worker)) + worker_bytes());
}

/* The cores that the caller names must exist; without names the first ones are taken. */
static taste_status choose_cores(taste_pool *pool, const uint32_t *cores, taste_error *error) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
    if (cores == NULL) {
        uint32_t found = 0;
        for (uint32_t c = 0; c < CPU_SETSIZE && found < pool->threads; c++) {
            if (CPU_ISSET(c, &set)) pool->cores[found++] = c;
        }
        pool->pinned = found == pool->threads;
        return TASTE_STATUS_OK;
    }
    for (uint32_t i = 0; i < pool->threads; i++) {
        if (cores[i] >= CPU_SETSIZE || !CPU_ISSET(cores[i], &set)) {
            return taste_fail(error, TASTE_STATUS_USAGE, "core %u is not available to this process. Name others.",
                              cores[i]);
        }
        pool->cores[i] = cores[i];
    }
    pool->pinned = 1;
    return TASTE_STATUS_OK;
}

/* Lays out worker i's memory at `at` and starts it. */
static int start_worker(taste_pool *pool, uint32_t i, unsigned char *at) {
    worker *self = &pool->workers[i];
    uint64_t page = page_bytes();
    unsigned char *guard = (unsigned char *)(((uintptr_t)at + page - 1) / page * page);
    pthread_attr_t attributes;
    *self = (worker){.pool = pool, .index = i + 1};
    self->workspace.base = at + STACK_BYTES + 2 * page;
    if (mprotect(guard, page, PROT_NONE) == 0) self->guard = guard;
    pthread_attr_init(&attributes);
    int failed = pthread_attr_setstack(&attributes, guard + page, STACK_BYTES);
    if (failed == 0) failed = pthread_create(&self->thread, &attributes, worker_main, self);
    pthread_attr_destroy(&attributes);
    if (failed != 0 && self->guard != NULL) mprotect(guard, page, PROT_READ | PROT_WRITE);
    return failed;
}

static void stop_workers(taste_pool *pool, uint32_t count) {
    atomic_store(&pool->stopping, 1);
    announce(pool);
    for (uint32_t i = 0; i < count; i++) {
        worker *self = &pool->workers[i];
        pthread_join(self->thread, NULL);
        if (self->guard != NULL) mprotect(self->guard, page_bytes(), PROT_READ | PROT_WRITE);
    }
}

taste_status taste_pool_start(uint32_t threads, const uint32_t *cores, void *block, size_t block_bytes,
                              taste_pool **out_pool, taste_error *out_error) {
    size_t need = taste_pool_bytes(threads);
    if (need == 0) {
        return taste_fail(out_error, TASTE_STATUS_USAGE, "%u threads asked for. Use 1 to %d.", threads,
                          TASTE_MAX_THREADS);
    }
    if (block == NULL || (uintptr_t)block % TASTE_ALIGNMENT != 0) {
        return taste_fail(out_error, TASTE_STATUS_USAGE, "the pool's block is not aligned to %d bytes. Align it.",
                          TASTE_ALIGNMENT);
    }
    if (block_bytes < need) {
        return taste_fail(out_error, TASTE_STATUS_DOES_NOT_FIT,
                          "a pool of %u threads needs %zu bytes, its block has %zu. Enlarge it.", threads, need,
                          block_bytes);
    }
    taste_pool *pool = block;
    memset(pool, 0, sizeof *pool);
    pool->threads = threads;
    pool->workers = (worker *)((unsigned char *)block + taste_round_up(sizeof *pool));
    taste_status status = choose_cores(pool, cores, out_error);
    if (status != TASTE_STATUS_OK) return status;
    pthread_mutex_init(&pool->launch, NULL);
    unsigned char *at = (unsigned char *)pool->workers + (threads - 1) * taste_round_up(sizeof(worker));
    for (uint32_t i = 0; i + 1 < threads; i++, at += worker_bytes()) {
        int failed = start_worker(pool, i, at);
        if (failed == 0) continue;
        stop_workers(pool, i);
        return taste_fail(out_error, TASTE_STATUS_DOES_NOT_FIT,
                          "thread %u of %u did not start (%s). Use fewer threads.", i + 2, threads, strerror(failed));
    }
    *out_pool = pool;
    return TASTE_STATUS_OK;
}

void taste_pool_stop(taste_pool *pool) {
    stop_workers(pool, pool->threads - 1);
    pthread_mutex_destroy(&pool->launch);
}
