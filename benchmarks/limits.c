/* What this machine can do at most: fused multiply-adds and memory, one thread and all. Stands alone.
 *
 *   cc -O3 -march=native -pthread benchmarks/limits.c -o limits && ./limits [THREADS [SECONDS]]
 *   python -m ziglang cc -target aarch64-linux-musl -mcpu=cortex_a72 -O3 -static benchmarks/limits.c -o limits-rpi4
 *
 * Prints one JSON object a line: `fma` in GFLOP/s (a multiply-add is two), `memory` in GB/s for arrays of 32 KiB to 128 MiB
 * a thread: `read` sums one array, `copy` counts what is read and what is written, `triad` is a = b + 3 c. Each is the best
 * of five runs of SECONDS (0.2) in which all threads are at work: a limit is what the machine has shown to reach. `handover` is
 * how long a cache line takes from the first core to another one and is seen there: tens of nanoseconds where the two have a
 * cache in common, hundreds where not. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if defined __AVX512F__
enum { LANES = 16, SUMS = 16 };
#elif defined __AVX__
enum { LANES = 8, SUMS = 12 };
#elif defined __riscv_v_min_vlen
enum { LANES = __riscv_v_min_vlen / 32, SUMS = 16 };
#elif defined __riscv
enum { LANES = 1, SUMS = 16 };
#else
enum { LANES = 4, SUMS = 16 };
#endif
enum { MOST_THREADS = 256, RUNS = 5, STEPS_A_CHECK = 4096, HANDOVERS = 20000 };

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));
typedef enum what { FMA, READ, COPY, TRIAD } what;

/* One thread's work; `done` are multiply-adds or bytes, `seconds` what they took. */
typedef struct worker {
    pthread_t thread;
    what what;
    int core;
    size_t vectors; /* of each array */
    vector *a, *b, *c;
    double limit_s, done, seconds;
    float result;
    pthread_barrier_t *start;
} worker;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float sum_of(vector v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

/* Independent sums, enough to hide the latency of the multiply-add; registers only. */
static void multiply_add(worker *w) {
    vector sums[SUMS], x = (vector){0} + 0.999999f, y = (vector){0} + 1e-7f;
    /* Unrolled everywhere: an array that is once indexed by a variable lives in memory. */
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++) sums[i] = (vector){0} + (float)(i + w->core);
    for (int step = 0; step < STEPS_A_CHECK; step++) {
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sums[i] = sums[i] * x + y;
    }
#pragma GCC unroll 16
    for (int i = 1; i < SUMS; i++) sums[0] += sums[i];
    w->result += sum_of(sums[0]);
    w->done += (double)STEPS_A_CHECK * SUMS * LANES;
}

static void read_once(worker *w) {
    vector sums[4] = {{0}};
    for (size_t i = 0; i < w->vectors; i += 4)
        for (int k = 0; k < 4; k++) sums[k] += w->b[i + (size_t)k];
    w->result += sum_of(sums[0] + sums[1] + sums[2] + sums[3]);
    w->done += (double)(w->vectors * sizeof(vector));
}

static void copy_once(worker *w) {
    for (size_t i = 0; i < w->vectors; i++) w->a[i] = w->b[i] + 0.0f;
    w->done += 2.0 * (double)(w->vectors * sizeof(vector));
}

static void triad_once(worker *w) {
    for (size_t i = 0; i < w->vectors; i++) w->a[i] = w->b[i] + 3.0f * w->c[i];
    w->done += 3.0 * (double)(w->vectors * sizeof(vector));
}

static void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET((size_t)core, &cores);
    (void)sched_setaffinity(0, sizeof cores, &cores);
}

static void *work(void *context) {
    static void (*const kernels[])(worker *) = {multiply_add, read_once, copy_once, triad_once};
    worker *w = context;
    pin(w->core);
    kernels[w->what](w);
    pthread_barrier_wait(w->start);
    w->done = 0;
    double start = now_s();
    do {
        kernels[w->what](w);
        __asm__ volatile("" ::"r"(w->a) : "memory");
        w->seconds = now_s() - start;
    } while (w->seconds < w->limit_s);
    return NULL;
}

/* Work a second of all threads together, once. */
static double run(worker *workers, int threads) {
    pthread_barrier_t start;
    double rate = 0;
    if (pthread_barrier_init(&start, NULL, (unsigned)threads) != 0) return 0;
    for (int i = 0; i < threads; i++) {
        workers[i].start = &start;
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) abort();
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(workers[i].thread, NULL);
        rate += workers[i].done / workers[i].seconds;
    }
    pthread_barrier_destroy(&start);
    return rate;
}

/* A ball that two cores throw to each other: the first makes it odd, the second even. */
typedef struct ball {
    _Alignas(128) _Atomic unsigned turn;
    int core;
} ball;

static void wait_for(ball *b, unsigned turn) {
    while (atomic_load_explicit(&b->turn, memory_order_acquire) != turn) {
    }
}

static void *throw_back(void *context) {
    ball *b = context;
    pin(b->core);
    for (unsigned i = 0; i < HANDOVERS; i++) {
        wait_for(b, 2 * i + 1);
        atomic_store_explicit(&b->turn, 2 * i + 2, memory_order_release);
    }
    return NULL;
}

/* Nanoseconds of one throw between two cores, the best of all runs. */
static double handover_ns(int first, int second) {
    double least_s = 0;
    pin(first);
    for (int run_number = 0; run_number < RUNS; run_number++) {
        static ball b;
        pthread_t other;
        atomic_store(&b.turn, 0);
        b.core = second;
        if (pthread_create(&other, NULL, throw_back, &b) != 0) abort();
        /* The first throw waits for the thread to start. */
        atomic_store_explicit(&b.turn, 1, memory_order_release);
        wait_for(&b, 2);
        double start = now_s();
        for (unsigned i = 1; i < HANDOVERS; i++) {
            atomic_store_explicit(&b.turn, 2 * i + 1, memory_order_release);
            wait_for(&b, 2 * i + 2);
        }
        double seconds = now_s() - start;
        if (least_s == 0 || seconds < least_s) least_s = seconds;
        pthread_join(other, NULL);
    }
    return 1e9 * least_s / (2.0 * (HANDOVERS - 1));
}

static double best(worker *workers, int threads, what what) {
    double most = 0;
    for (int i = 0; i < threads; i++) workers[i].what = what;
    for (int i = 0; i < RUNS; i++) {
        double rate = run(workers, threads);
        most = rate > most ? rate : most;
    }
    return most;
}

static int map_arrays(worker *w, size_t bytes) {
    vector **arrays[] = {&w->a, &w->b, &w->c};
    w->vectors = bytes / sizeof(vector);
    for (int k = 0; k < 3; k++) {
        free(*arrays[k]);
        *arrays[k] = aligned_alloc(64, bytes);
        if (*arrays[k] == NULL) return -1;
        for (size_t i = 0; i < w->vectors; i++) (*arrays[k])[i] = (vector){0} + (float)k;
    }
    return 0;
}

static int measure(worker *workers, int threads) {
    static const size_t sizes[] = {32 << 10, 256 << 10, 2 << 20, 16 << 20, 128 << 20};
    printf("{\"test\": \"fma\", \"threads\": %d, \"lanes\": %d, \"gflops\": %.1f}\n", threads, LANES,
           2e-9 * best(workers, threads, FMA));
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        for (int i = 0; i < threads; i++) {
            if (map_arrays(&workers[i], sizes[k]) != 0) {
                fprintf(stderr, "error: no memory for arrays of %zu KiB. Use fewer threads.\n", sizes[k] >> 10);
                return 10;
            }
        }
        printf("{\"test\": \"memory\", \"threads\": %d, \"kib\": %zu, \"read_gb_per_s\": %.1f, ", threads, sizes[k] >> 10,
               1e-9 * best(workers, threads, READ));
        printf("\"copy_gb_per_s\": %.1f, ", 1e-9 * best(workers, threads, COPY));
        printf("\"triad_gb_per_s\": %.1f}\n", 1e-9 * best(workers, threads, TRIAD));
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv) {
    static worker workers[MOST_THREADS];
    cpu_set_t allowed;
    int threads = argc > 1 ? atoi(argv[1]) : (int)sysconf(_SC_NPROCESSORS_ONLN), count = 0;
    double limit_s = argc > 2 ? atof(argv[2]) : 0.2;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
    if (threads < 1 || threads > MOST_THREADS || threads > CPU_COUNT(&allowed) || !(limit_s > 0)) {
        fprintf(stderr, "error: limits [THREADS [SECONDS]]: 1 to %d threads here, seconds above 0.\n", CPU_COUNT(&allowed));
        return 2;
    }
    for (int core = 0; core < CPU_SETSIZE && count < threads; core++) {
        if (CPU_ISSET((size_t)core, &allowed)) workers[count++] = (worker){.core = core, .limit_s = limit_s};
    }
    for (int i = 1; i < threads; i++) {
        printf("{\"test\": \"handover\", \"cores\": [%d, %d], \"ns\": %.0f}\n", workers[0].core, workers[i].core,
               handover_ns(workers[0].core, workers[i].core));
        fflush(stdout);
    }
    int code = measure(workers, 1);
    return code == 0 && threads > 1 ? measure(workers, threads) : code;
}
