#include "layout.h"

#include <string.h>

/* Position in the canonical index space, innermost axis last. */
typedef struct walk {
    int64_t extent[TASTE_MAX_DIMS];
    int64_t index[TASTE_MAX_DIMS];
    int64_t offset; /* of the outer axes, from the tensor's start */
    unsigned axes;
} walk;

static int64_t axis_extent(const taste_axis *axis, uint32_t batch_size) {
    return axis->extent < 0 ? (int64_t)batch_size : axis->extent;
}

static int64_t axis_offset(const taste_axis *axis, int64_t i) {
    return i / axis->block * axis->outer_stride + i % axis->block * axis->inner_stride;
}

uint64_t taste_layout_count(const taste_tensor *tensor, uint32_t batch_size) {
    uint64_t count = 1;
    for (unsigned d = 0; d < tensor->axes; d++) count *= (uint64_t)axis_extent(&tensor->axis[d], batch_size);
    return count;
}

int taste_layout_is_plain(const taste_tensor *tensor, uint32_t batch_size) {
    int64_t stride = 1;
    if (tensor->base_elements != 0) return 0;
    for (unsigned d = tensor->axes; d-- > 0;) {
        const taste_axis *axis = &tensor->axis[d];
        int64_t extent = axis_extent(axis, batch_size);
        /* One block that holds the whole axis counts as one run of its inner stride. */
        int64_t step = extent <= axis->block && axis->block > 1 ? axis->inner_stride : axis->outer_stride;
        if (axis->block > 1 && extent > axis->block && axis->outer_stride != axis->block * axis->inner_stride) return 0;
        if (axis->block > 1 && extent > axis->block) step = axis->inner_stride;
        if (extent > 1 && step != stride) return 0;
        stride *= extent;
    }
    return 1;
}

static walk walk_start(const taste_tensor *tensor, uint32_t batch_size, uint64_t first) {
    walk at = {.axes = tensor->axes};
    for (unsigned d = at.axes; d-- > 0;) {
        at.extent[d] = axis_extent(&tensor->axis[d], batch_size);
        at.index[d] = (int64_t)(first % (uint64_t)at.extent[d]);
        first /= (uint64_t)at.extent[d];
    }
    return at;
}

/* Offset of everything but the innermost axis. */
static void walk_locate(walk *at, const taste_tensor *tensor) {
    at->offset = tensor->base_elements;
    for (unsigned d = 0; d + 1 < at->axes; d++) at->offset += axis_offset(&tensor->axis[d], at->index[d]);
}

static void walk_next_row(walk *at) {
    at->index[at->axes - 1] = 0;
    for (unsigned d = at->axes - 1; d-- > 0;) {
        if (++at->index[d] < at->extent[d]) return;
        at->index[d] = 0;
    }
}

/* One row of the innermost axis: `count` elements from index `i`. */
static void copy_row(const taste_axis *axis, int64_t i, uint64_t count, uint32_t *stored, uint32_t *canonical,
                     int scatter) {
    for (uint64_t k = 0; k < count; k++, i++) {
        uint32_t *at = stored + (axis->block == 1 ? i * axis->outer_stride : axis_offset(axis, i));
        if (scatter)
            *at = canonical[k];
        else
            canonical[k] = *at;
    }
}

static void copy_range(const taste_tensor *tensor, uint32_t batch_size, uint64_t first, uint64_t count,
                       uint32_t *stored, uint32_t *canonical, int scatter) {
    if (count == 0) return;
    if (tensor->axes == 0 || taste_layout_is_plain(tensor, batch_size)) {
        if (scatter)
            memcpy(stored + first, canonical, count * sizeof *stored);
        else
            memcpy(canonical, stored + first, count * sizeof *stored);
        return;
    }
    walk at = walk_start(tensor, batch_size, first);
    const taste_axis *inner = &tensor->axis[at.axes - 1];
    while (count > 0) {
        int64_t i = at.index[at.axes - 1];
        uint64_t run = (uint64_t)(at.extent[at.axes - 1] - i);
        if (run > count) run = count;
        walk_locate(&at, tensor);
        copy_row(inner, i, run, stored + at.offset, canonical, scatter);
        canonical += run;
        count -= run;
        walk_next_row(&at);
    }
}

void taste_layout_scatter(const taste_tensor *tensor, uint32_t batch_size, uint64_t first, uint64_t count,
                          const void *canonical, void *stored) {
    /* The cast away of const is undone by `scatter`: the canonical side is only read. */
    copy_range(tensor, batch_size, first, count, stored, (uint32_t *)(uintptr_t)canonical, 1);
}

void taste_layout_gather(const taste_tensor *tensor, uint32_t batch_size, uint64_t first, uint64_t count,
                         const void *stored, void *canonical) {
    copy_range(tensor, batch_size, first, count, (uint32_t *)(uintptr_t)stored, canonical, 0);
}

void taste_layout_write(const taste_tensor *tensor, uint32_t batch_size, const void *canonical, void *stored) {
    uint64_t count = taste_layout_count(tensor, batch_size);
    uint64_t times = tensor->region == TASTE_REGION_BATCHED ? batch_size : 1;
    uint64_t bytes = tensor->size_bytes * times;
    if (bytes != count * sizeof(uint32_t)) memset(stored, 0, bytes);
    taste_layout_scatter(tensor, batch_size, 0, count, canonical, stored);
}
