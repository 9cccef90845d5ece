/* Canonical <-> stored, against the formula of cross/storage.py applied one element at a time. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "layout.h"
#include "mlp.h"

/* Offset of one canonical element. */
static int64_t offset_of(const taste_tensor *t, const int64_t *index) {
    int64_t offset = t->base_elements;
    for (unsigned d = 0; d < t->axes; d++) {
        const taste_axis *a = &t->axis[d];
        offset += index[d] / a->block * a->outer_stride + index[d] % a->block * a->inner_stride;
    }
    return offset;
}

static void unravel(const taste_tensor *t, uint32_t batch, uint64_t i, int64_t *index) {
    for (unsigned d = t->axes; d-- > 0;) {
        uint64_t extent = t->axis[d].extent < 0 ? batch : (uint64_t)t->axis[d].extent;
        index[d] = (int64_t)(i % extent);
        i /= extent;
    }
}

static void check_tensor(const taste_tensor *t, uint32_t batch) {
    uint64_t bytes = t->size_bytes * (t->region == TASTE_REGION_BATCHED ? batch : 1),
             count = taste_layout_count(t, batch);
    uint32_t *stored = new_block(bytes), *expected = calloc(bytes / 4, 4), *values = malloc(count * 4),
             *back = malloc(count * 4);
    for (uint64_t i = 0; i < count; i++) {
        int64_t index[TASTE_MAX_DIMS];
        values[i] = (uint32_t)i + 1;
        unravel(t, batch, i, index);
        int64_t at = offset_of(t, index);
        CHECK(at >= 0 && (uint64_t)at < bytes / 4 && expected[at] == 0);
        expected[at] = values[i];
    }
    taste_layout_write(t, batch, values, stored);
    /* Fill-up between samples and rounding at the end is nobody's; everything else must be as expected, zeros too. */
    CHECK(memcmp(stored, expected, count * 4 == bytes ? bytes : bytes / 64 * 64) == 0);
    taste_layout_gather(t, batch, 0, count, stored, back);
    CHECK(memcmp(values, back, count * 4) == 0);
    memset(stored, 0, bytes);
    for (uint64_t first = 0; first < count; first += 7) {
        uint64_t n = count - first < 7 ? count - first : 7;
        taste_layout_scatter(t, batch, first, n, values + first, stored);
    }
    CHECK(memcmp(stored, expected, bytes) == 0);
    memset(back, 0, count * 4);
    for (uint64_t first = 0; first < count; first += 11) {
        uint64_t n = count - first < 11 ? count - first : 11;
        taste_layout_gather(t, batch, first, n, stored, back + first);
    }
    CHECK(memcmp(values, back, count * 4) == 0);
    free(stored), free(expected), free(values), free(back);
}

void test_layout(void) {
    const taste_tensor plain = {.axes = 3,
                                .region = TASTE_REGION_BATCHED,
                                .size_bytes = 64,
                                .axis = {{-1, 1, 15, 0}, {3, 1, 5, 0}, {5, 1, 1, 0}}};
    /* [N, 5, 3, 2] as blocks of 4 channels with a border of one row above, two columns to the right. */
    const taste_tensor blocked = {.axes = 4,
                                  .region = TASTE_REGION_BATCHED,
                                  .size_bytes = 2 * 4 * 4 * 4 * 4,
                                  .base_elements = 16,
                                  .axis = {{-1, 1, 128, 0}, {5, 4, 64, 1}, {3, 1, 16, 0}, {2, 1, 4, 0}}};
    /* OIHW [6, 5, 3, 3] as [2, 2, 3, 3, 4, 4]. */
    const taste_tensor weight = {.axes = 4,
                                 .region = TASTE_REGION_PARAMETERS,
                                 .size_bytes = 2 * 2 * 9 * 16 * 4,
                                 .axis = {{6, 4, 288, 1}, {5, 4, 144, 4}, {3, 1, 48, 0}, {3, 1, 16, 0}}};
    const taste_tensor vector = {.axes = 3,
                                 .region = TASTE_REGION_PARAMETERS,
                                 .size_bytes = 64,
                                 .axis = {{6, 4, 4, 1}, {1, 1, 1, 0}, {1, 1, 1, 0}}};
    const taste_tensor scalar = {.axes = 0, .region = TASTE_REGION_PARAMETERS, .size_bytes = 64};
    /* Blocked, but stored as it is seen. */
    const taste_tensor straight = {
        .axes = 1, .region = TASTE_REGION_PARAMETERS, .size_bytes = 64, .axis = {{16, 8, 8, 1}}};
    const taste_tensor *const all[] = {&plain, &blocked, &weight, &vector, &scalar, &straight};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        for (uint32_t batch = 1; batch <= 4; batch++) check_tensor(all[i], batch);
    }
    CHECK(taste_layout_is_plain(&plain, 3) && taste_layout_is_plain(&straight, 1) && taste_layout_is_plain(&vector, 1));
    CHECK(!taste_layout_is_plain(&blocked, 1) && !taste_layout_is_plain(&weight, 1));
    for (uint32_t i = 0; i < 6; i++) check_tensor(&taste_model_table.tensors[i], 1);
}
