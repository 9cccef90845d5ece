#include "generator.h"

uint64_t taste_splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint64_t taste_fnv1a64(const char *text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const unsigned char *c = (const unsigned char *)text; *c != 0; c++) hash = (hash ^ *c) * 0x100000001b3u;
    return hash;
}

uint64_t taste_generator_key(uint64_t seed, const char *name) {
    return taste_splitmix64(seed ^ taste_fnv1a64(name));
}

float taste_generator_uniform(uint64_t key, uint64_t i) {
    return (float)(taste_splitmix64(key + i) >> 40) * 0x1p-24f;
}
