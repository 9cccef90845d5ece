/* The CPU's frequency through cpufreq, policy by policy; what was set before is put back on every exit, and after a kill -9 at the
 * next start. */
#ifndef TASTE_TRAIN_FREQUENCY_H
#define TASTE_TRAIN_FREQUENCY_H

#include <stdint.h>

#include "taste.h"

enum { FREQUENCY_POLICIES = 16, FREQUENCY_STEPS = 128, FREQUENCY_WORD_BYTES = 64 };

/* One policy: cores that share a clock. Frequencies in kHz, ascending. */
typedef struct frequency_policy {
    uint32_t number;
    uint32_t count;
    uint64_t steps[FREQUENCY_STEPS];
    int exact; /* the kernel lists its steps; else they are cut every 100 MHz */
    char governor[FREQUENCY_WORD_BYTES];
    uint64_t lowest, highest, current;
    uint64_t setspeed; /* 0: of no meaning under this governor */
    int has_userspace;
    char cores[FREQUENCY_WORD_BYTES];
} frequency_policy;

/* The policies of the board, at most FREQUENCY_POLICIES; 0: no cpufreq. */
uint32_t frequency_policies(const char *root, frequency_policy *out);

/* Every policy runs at its highest step that is not above `khz` (or its lowest), by the governor userspace where there is one, else
 * by the same lowest and highest frequency. What was set before is first written to a file that outlives this process, and the
 * file is locked: BUSY where another process holds it. INCOMPATIBLE: no cpufreq; IO: no right to it; UNSTABLE: the kernel does not
 * follow. May be called again with another frequency. */
taste_status frequency_set(const char *root, uint64_t khz, taste_error *error);

/* Puts back what frequency_set found. OK where it was not called. */
taste_status frequency_restore(taste_error *error);

/* Puts back what a process left that is gone: 1 where something was. A file from before a reboot is only removed. */
int frequency_repair(const char *root, taste_error *error);

#endif
