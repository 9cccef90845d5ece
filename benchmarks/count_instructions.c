/* A plugin for QEMU's user emulation: how often each block of code ran, and what a model of two caches makes of its data.
 *
 *   qemu-aarch64 -plugin libcount.so,out=FILE[,caches=on,l1=KIB:WAYS,l2=KIB:WAYS][,mark=SYSCALL] PROGRAM ...
 *
 * FILE gets one line a block, `block ADDRESS INSTRUCTIONS EXECUTIONS`, and with caches a last line
 * `memory ACCESSES L1_MISSES L2_MISSES`. Counts are exact for a program that computes in one thread. Caches: 64-byte lines,
 * least recently used, written lines allocated, one cache for all threads, no prefetching. With `mark`, what is counted is what
 * runs between the program's first and second call of that system call.
 *
 * Debian's QEMU comes without its plugin header: what is used of its interface (version 1, QEMU 4.2 to 8) is declared here.
 * Built by benchmarks/instructions.py. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info_t;
enum { CALLBACK_USES_NO_REGISTERS = 0, INLINE_ADD_U64 = 0, READS_AND_WRITES = 3 };

typedef void (*on_translation)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*on_access)(unsigned, qemu_plugin_meminfo_t, uint64_t, void *);
typedef void (*on_exit_call)(qemu_plugin_id_t, void *);
typedef void (*on_system_call)(qemu_plugin_id_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                               uint64_t, uint64_t, uint64_t);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, on_translation);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, on_access, int, int, void *);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, on_exit_call, void *);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t, on_system_call);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
unsigned qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int qemu_plugin_version = 1;

enum { LINE_SHIFT = 6, BUCKETS = 1 << 16, PATH_BYTES = 1024 };

/* A block as translated; translated again after a flush, it goes on counting. */
typedef struct block {
    uint64_t address, instructions, executions;
    struct block *next;
} block;

/* `tags` is [sets][ways], the most recently used first; a tag is the line's number + 1. */
typedef struct cache {
    uint64_t sets, ways, misses, *tags;
} cache;

static block *buckets[BUCKETS];
static cache caches[2];
static int with_caches;
static uint64_t accesses;
static int64_t mark = -1; /* a system call's number; -1: count from start to end */
static int marks;
static char out_path[PATH_BYTES];

static block *block_of(uint64_t address, uint64_t instructions) {
    block **place = &buckets[(address >> 1) % BUCKETS];
    for (block *b = *place; b != NULL; b = b->next) {
        if (b->address == address && b->instructions == instructions) return b;
    }
    block *b = calloc(1, sizeof *b);
    if (b == NULL) abort();
    *b = (block){address, instructions, 0, *place};
    return *place = b;
}

/* Whether the line is there; it is afterwards. */
static int cache_hit(cache *c, uint64_t line) {
    uint64_t tag = line + 1, *set = c->tags + line % c->sets * c->ways, way = 0;
    while (way < c->ways && set[way] != tag) way++;
    int hit = way < c->ways;
    if (!hit) {
        c->misses++;
        way = c->ways - 1;
    }
    memmove(set + 1, set, way * sizeof *set);
    set[0] = tag;
    return hit;
}

static void note_access(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void *context) {
    uint64_t last = (address + (1u << qemu_plugin_mem_size_shift(info)) - 1) >> LINE_SHIFT;
    (void)cpu;
    (void)context;
    accesses++;
    for (uint64_t line = address >> LINE_SHIFT; line <= last; line++) {
        if (!cache_hit(&caches[0], line)) (void)cache_hit(&caches[1], line);
    }
}

static void note_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    size_t count = qemu_plugin_tb_n_insns(tb);
    block *b = block_of(qemu_plugin_tb_vaddr(tb), count);
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64, &b->executions, 1);
    for (size_t i = 0; with_caches && i < count; i++) {
        qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(tb, i), note_access, CALLBACK_USES_NO_REGISTERS,
                                         READS_AND_WRITES, NULL);
    }
}

static void forget_counts(void) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (block *b = buckets[i]; b != NULL; b = b->next) b->executions = 0;
    }
    accesses = caches[0].misses = caches[1].misses = 0;
}

static void write_counts(void) {
    FILE *out = fopen(out_path, "w");
    if (out == NULL) {
        perror(out_path);
        return;
    }
    for (size_t i = 0; i < BUCKETS; i++) {
        for (block *b = buckets[i]; b != NULL; b = b->next) {
            if (b->executions == 0) continue;
            fprintf(out, "block %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", b->address, b->instructions, b->executions);
        }
    }
    if (with_caches) {
        fprintf(out, "memory %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", accesses, caches[0].misses, caches[1].misses);
    }
    fclose(out);
}

static void note_exit(qemu_plugin_id_t id, void *context) {
    (void)id;
    (void)context;
    if (mark < 0) write_counts();
}

static void note_system_call(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t a, uint64_t b, uint64_t c,
                             uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
    (void)id, (void)cpu, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
    if (number != mark) return;
    marks++;
    if (marks == 1) forget_counts();
    if (marks == 2) write_counts();
}

static int set_cache(cache *c, const char *text) {
    unsigned kib, ways;
    if (sscanf(text, "%u:%u", &kib, &ways) != 2 || ways == 0 || kib * 1024 / ways >> LINE_SHIFT == 0) return -1;
    c->ways = ways;
    c->sets = ((uint64_t)kib * 1024 / ways) >> LINE_SHIFT;
    free(c->tags);
    c->tags = calloc(c->sets * c->ways, sizeof *c->tags);
    return c->tags != NULL ? 0 : -1;
}

static int set_option(const char *option) {
    if (strncmp(option, "out=", 4) == 0 && strlen(option + 4) < sizeof out_path) {
        strcpy(out_path, option + 4);
        return 0;
    }
    if (strncmp(option, "l1=", 3) == 0) return set_cache(&caches[0], option + 3);
    if (strncmp(option, "l2=", 3) == 0) return set_cache(&caches[1], option + 3);
    if (strncmp(option, "mark=", 5) == 0) return sscanf(option + 5, "%" SCNd64, &mark) == 1 ? 0 : -1;
    if (strcmp(option, "caches=on") == 0) return with_caches = 1, 0;
    return -1;
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info_t *info, int argc, char **argv) {
    (void)info;
    if (set_cache(&caches[0], "32:4") != 0 || set_cache(&caches[1], "1024:16") != 0) return -1;
    for (int i = 0; i < argc; i++) {
        if (set_option(argv[i]) != 0) {
            fprintf(stderr, "count_instructions: bad option %s\n", argv[i]);
            return -1;
        }
    }
    if (out_path[0] == 0) {
        fprintf(stderr, "count_instructions: out=FILE is missing\n");
        return -1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, note_translation);
    qemu_plugin_register_atexit_cb(id, note_exit, NULL);
    if (mark >= 0) qemu_plugin_register_vcpu_syscall_cb(id, note_system_call);
    return 0;
}
