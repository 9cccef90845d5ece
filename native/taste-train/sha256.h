/* SHA-256 (FIPS 180-4), for whatever is checked after it was stored. */
#ifndef TASTE_TRAIN_SHA256_H
#define TASTE_TRAIN_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_HEX_BYTES = 65 };

typedef struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char rest[64];
} sha256;

void sha256_start(sha256 *hash);
void sha256_add(sha256 *hash, const void *bytes, size_t count);

/* The digest as 64 hexadecimal digits. */
void sha256_finish(sha256 *hash, char out_hex[SHA256_HEX_BYTES]);

#endif
