/* Canonical <-> stored: copies between row-major values and a tensor's memory through its taste_axis table. */
#ifndef TASTE_LAYOUT_H
#define TASTE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "program.h"

/* Elements of a tensor at this batch size (of the canonical view). */
uint64_t taste_layout_count(const taste_tensor *tensor, uint32_t batch_size);

/* Whether the stored tensor is the canonical one, byte for byte. */
int taste_layout_is_plain(const taste_tensor *tensor, uint32_t batch_size);

/* Copies canonical elements [first, first + count) into or out of the tensor's memory at `stored`. */
void taste_layout_scatter(const taste_tensor *tensor, uint32_t batch_size, uint64_t first, uint64_t count,
                          const void *canonical, void *stored);
void taste_layout_gather(const taste_tensor *tensor, uint32_t batch_size, uint64_t first, uint64_t count,
                         const void *stored, void *canonical);

/* Writes the whole tensor: everything outside the canonical elements becomes zero, which kernels rely on. */
void taste_layout_write(const taste_tensor *tensor, uint32_t batch_size, const void *canonical, void *stored);

#endif
