/* The seeded generator: counter-based, so element i needs no state and is the same on every architecture. cross/initialise.py
 * is its twin in numpy. splitmix64: Steele, Lea, Flood 2014. FNV-1a: Fowler, Noll, Vo. */
#ifndef TASTE_GENERATOR_H
#define TASTE_GENERATOR_H

#include <stdint.h>

uint64_t taste_splitmix64(uint64_t x);
uint64_t taste_fnv1a64(const char *text);

/* The key of a named tensor under a seed. */
uint64_t taste_generator_key(uint64_t seed, const char *name);

/* Element i, uniform in [0, 1) with 24 bits. */
float taste_generator_uniform(uint64_t key, uint64_t i);

#endif
