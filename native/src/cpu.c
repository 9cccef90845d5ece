/* Whether this CPU can run the kernels. Names of features are those of cross/boards.toml. */
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "error.h"
#include "model.h"

typedef struct feature {
    const char *name;
    int present;
} feature;

enum { MAX_FEATURES = 32 };

#if defined(__x86_64__)
#include <cpuid.h>

/* What the operating system saves on a context switch; without that a register set cannot be used. */
static uint64_t saved_state(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0; /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

static void probe(feature features[MAX_FEATURES], uint32_t *vector_bits) {
    uint32_t a, b, c = 0, d, b7 = 0, c7 = 0, a71 = 0;
    uint64_t state = saved_state();
    int avx = (state & 0x6) == 0x6, avx512 = (state & 0xe6) == 0xe6;
    (void)__get_cpuid(1, &a, &b, &c, &d);
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) b7 = c7 = 0;
    uint32_t unused_b, unused_c, unused_d;
    if (!__get_cpuid_count(7, 1, &a71, &unused_b, &unused_c, &unused_d)) a71 = 0;
    const feature found[] = {
        {"sse4_2", c >> 20 & 1},
        {"avx", avx && (c >> 28 & 1)},
        {"f16c", avx && (c >> 29 & 1)},
        {"fma", avx && (c >> 12 & 1)},
        {"avx2", avx && (b7 >> 5 & 1)},
        {"avx512f", avx512 && (b7 >> 16 & 1)},
        {"avx512dq", avx512 && (b7 >> 17 & 1)},
        {"avx512cd", avx512 && (b7 >> 28 & 1)},
        {"avx512bw", avx512 && (b7 >> 30 & 1)},
        {"avx512vl", avx512 && (b7 >> 31 & 1)},
        {"avx512vnni", avx512 && (c7 >> 11 & 1)},
        {"avx512bf16", avx512 && (a71 >> 5 & 1)},
    };
    memcpy(features, found, sizeof found);
    *vector_bits = 0; /* fixed by the feature: nothing to compare */
}

#elif defined(__aarch64__)

static void probe(feature features[MAX_FEATURES], uint32_t *vector_bits) {
    unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
    const feature found[] = {
        {"neon", caps >> 1 & 1},                       /* HWCAP_ASIMD */
        {"crc", caps >> 7 & 1},                        /* HWCAP_CRC32 */
        {"lse", caps >> 8 & 1},                        /* HWCAP_ATOMICS */
        {"fp16", (caps >> 9 & 1) && (caps >> 10 & 1)}, /* HWCAP_FPHP, HWCAP_ASIMDHP */
        {"dotprod", caps >> 20 & 1},                   /* HWCAP_ASIMDDP */
        {"sve", caps >> 22 & 1},                       /* HWCAP_SVE */
        {"i8mm", caps2 >> 13 & 1},                     /* HWCAP2_I8MM */
        {"bf16", caps2 >> 14 & 1},                     /* HWCAP2_BF16 */
    };
    memcpy(features, found, sizeof found);
    *vector_bits = 0;
}

#elif defined(__riscv)
#include <sys/syscall.h>

enum { SYSCALL_RISCV_HWPROBE = 258, KEY_IMA_EXT_0 = 4 };

typedef struct hwprobe_pair {
    int64_t key;
    uint64_t value;
} hwprobe_pair;

/* Extensions that AT_HWCAP has no letter for. Kernels before 6.4 know no such call: 0. */
static uint64_t probe_extensions(void) {
    hwprobe_pair pair = {KEY_IMA_EXT_0, 0};
    if (syscall(SYSCALL_RISCV_HWPROBE, &pair, 1L, 0L, NULL, 0L) != 0 || pair.key != KEY_IMA_EXT_0) return 0;
    return pair.value;
}

static uint32_t vector_length_bits(void) {
    unsigned long bytes;
    __asm__ volatile("csrr %0, 0xc22" : "=r"(bytes)); /* vlenb */
    return (uint32_t)bytes * 8;
}

static void probe(feature features[MAX_FEATURES], uint32_t *vector_bits) {
    unsigned long caps = getauxval(AT_HWCAP);
    uint64_t extensions = probe_extensions();
    const char gc[] = "IMAFDC";
    int general = 1, vector = caps >> ('V' - 'A') & 1;
    for (const char *c = gc; *c != 0; c++) general &= (int)(caps >> (*c - 'A') & 1);
    *vector_bits = vector ? vector_length_bits() : 0;
    const feature found[] = {
        {"rv64gc", general},
        {"v", vector},
        {"zvl128b", vector && *vector_bits >= 128},
        {"zvl256b", vector && *vector_bits >= 256},
        {"zvl512b", vector && *vector_bits >= 512},
        {"zba", extensions >> 3 & 1},
        {"zbb", extensions >> 4 & 1},
        {"zbs", extensions >> 5 & 1},
        {"zfh", extensions >> 27 & 1},
        {"zicond", extensions >> 35 & 1},
    };
    memcpy(features, found, sizeof found);
}

#else
static void probe(feature features[MAX_FEATURES], uint32_t *vector_bits) {
    features[0] = (feature){NULL, 0};
    *vector_bits = 0;
}
#endif

static int has(const feature features[MAX_FEATURES], const char *name, size_t length) {
    for (int i = 0; i < MAX_FEATURES && features[i].name != NULL; i++) {
        if (strlen(features[i].name) == length && memcmp(features[i].name, name, length) == 0)
            return features[i].present;
    }
    return 0;
}

taste_status taste_model_check_cpu(const taste_model *model, taste_error *out_error) {
    feature features[MAX_FEATURES] = {{NULL, 0}};
    uint32_t vector_bits;
    probe(features, &vector_bits);
    for (const char *name = model->features; *name != 0;) {
        size_t length = strcspn(name, " ");
        if (length > 0 && !has(features, name, length)) {
            return taste_fail(out_error, TASTE_STATUS_INCOMPATIBLE,
                              "this CPU lacks '%.*s', which the build for %s needs. Build for this board's own target.",
                              (int)length, name, model->target);
        }
        name += length + (name[length] == ' ');
    }
    if (vector_bits != 0 && model->vector_bits != 0 && vector_bits != model->vector_bits) {
        return taste_fail(
            out_error, TASTE_STATUS_INCOMPATIBLE,
            "this CPU's vectors have %u bits, the build for %s is for %u. Build for this board's own target.",
            vector_bits, model->target, model->vector_bits);
    }
    return TASTE_STATUS_OK;
}
