/* The order of an epoch: a keyed permutation, computed and not stored, the same on every architecture. */
#ifndef TASTE_TRAIN_ORDER_H
#define TASTE_TRAIN_ORDER_H

#include <stdint.h>

/* The sample at a position of an epoch, both below `count`: a Feistel network of six rounds over the next power of four,
 * walked along its cycle until it lands below `count` (Black and Rogaway 2002). */
uint64_t order_sample(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t position);

#endif
