/* How much memory this process may still take. */
#ifndef TASTE_TRAIN_MEMORY_H
#define TASTE_TRAIN_MEMORY_H

#include <stdint.h>

/* The smallest of what is free (MemAvailable), what the control groups leave (v1 and v2) and RLIMIT_AS, RLIMIT_DATA.
 * UINT64_MAX where nothing is known. `root` stands before /proc and /sys. */
uint64_t memory_available_bytes(const char *root);

/* VmHWM of this process: the most memory that was ever resident. 0 where /proc does not say. */
uint64_t memory_peak_bytes(void);

/* VmRSS: what is resident now. 0 where /proc does not say. */
uint64_t memory_resident_bytes(void);

/* A number after `key` in a text of lines such as /proc/meminfo; 0: found. */
int memory_find_number(const char *text, const char *key, uint64_t *out_number);

/* Asks the kernel to end this process before any other one when memory runs out. */
void memory_volunteer(void);

#endif
