#include "order.h"

#include "generator.h"

enum { ROUNDS = 6 };

uint64_t order_sample(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t position) {
    uint64_t key = taste_splitmix64(taste_generator_key(seed, "order") + epoch);
    unsigned half = 1;
    while (half < 31 && (uint64_t)1 << (2 * half) < count) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, at = position;
    do {
        uint64_t left = at >> half, right = at & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t mixed = left ^ (taste_splitmix64(key + (round << 32) + right) & mask);
            left = right;
            right = mixed;
        }
        at = left << half | right;
    } while (at >= count);
    return at;
}
