/* Whether something other than the step set the pace: heat, supply voltage, swapping, another load. */
#ifndef TASTE_TRAIN_TAINT_H
#define TASTE_TRAIN_TAINT_H

#include <stddef.h>
#include <stdint.h>

enum { TAINT_TEXT_BYTES = 192 };

/* Counters of the system, read before and after the measured windows. */
typedef struct taint_counters {
    uint64_t pages_swapped_in;
    uint64_t waiting_ns;     /* of this process's threads, for a core */
    uint64_t throttle_bits;  /* Raspberry Pi firmware: 0-3 now, 16-19 since boot */
    uint64_t throttle_count; /* x86: of all cores */
    uint64_t frequency_khz;  /* of the first core; 0: unknown */
} taint_counters;

void taint_read(const char *root, taint_counters *out);

/* 1 and the reason in `out_text` if the measurement between the two readings cannot be trusted. */
int taint_judge(const taint_counters *before, const taint_counters *after, double elapsed_s, uint32_t threads,
                char out_text[TAINT_TEXT_BYTES]);

/* 1 if this program runs under an emulator of another architecture. */
int taint_is_emulated(const char *root);

#endif
