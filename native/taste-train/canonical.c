#include "canonical.h"

#include <math.h>
#include <stdio.h>

#include "error.h"

static int is_trained(const canonical *c, uint32_t slot, uint32_t tensor) {
    return taste_slot_read(c->session, slot, tensor, 0, 0, NULL) == TASTE_STATUS_OK;
}

int canonical_next(const canonical *c, canonical_item *item) {
    taste_model_facts model;
    (void)taste_model_describe(c->model, &model);
    for (; item->next < model.tensor_count * (1 + c->slots); item->next++) {
        item->tensor = item->next % model.tensor_count;
        item->slot = (int32_t)(item->next / model.tensor_count) - 1;
        (void)taste_model_tensor(c->model, item->tensor, &item->facts);
        /* The kinds of a session (activations, scalars) have no place in a file. */
        if (item->slot < 0 && (item->facts.kind > TASTE_KIND_CONSTANT || !(c->kinds >> item->facts.kind & 1))) continue;
        if (item->slot >= 0 && !is_trained(c, (uint32_t)item->slot, item->tensor)) continue;
        if (item->slot < 0)
            snprintf(item->name, sizeof item->name, "%s", item->facts.name);
        else
            snprintf(item->name, sizeof item->name, "optimizer.%d.%s", item->slot, item->facts.name);
        item->next++;
        return 1;
    }
    return 0;
}

void canonical_get(const canonical *c, const canonical_item *item, uint64_t first, size_t count, float *out_values) {
    if (item->slot < 0)
        (void)taste_parameters_read_range(c->parameters, item->tensor, first, count, out_values);
    else
        (void)taste_slot_read(c->session, (uint32_t)item->slot, item->tensor, first, count, out_values);
}

void canonical_put(const canonical *c, const canonical_item *item, uint64_t first, size_t count, const float *values) {
    if (item->slot < 0)
        (void)taste_parameters_write_range(c->parameters, item->tensor, first, count, values);
    else
        (void)taste_slot_write(c->session, (uint32_t)item->slot, item->tensor, first, count, values);
}

taste_status canonical_walk(const canonical *c, canonical_visit visit, void *context, taste_error *error) {
    canonical_item item = {.next = 0};
    size_t piece = c->staging_bytes / sizeof(float);
    while (canonical_next(c, &item)) {
        for (uint64_t first = 0; first < item.facts.element_count; first += piece) {
            uint64_t left = item.facts.element_count - first;
            size_t n = left < piece ? (size_t)left : piece;
            canonical_get(c, &item, first, n, c->staging);
            taste_status status = visit(context, &item, c->staging, n, error);
            if (status != TASTE_STATUS_OK) return status;
        }
    }
    return TASTE_STATUS_OK;
}

static taste_status hash_piece(void *context, const canonical_item *item, const float *values, size_t count,
                               taste_error *error) {
    sha256_add(context, values, count * sizeof *values);
    for (size_t i = 0; item->facts.dtype == 'f' && i < count; i++) {
        if (isfinite(values[i])) continue;
        return taste_fail(error, TASTE_STATUS_NON_FINITE,
                          "'%.100s' holds NaN or Inf. Lower the learning rate or clip the gradient.", item->name);
    }
    return TASTE_STATUS_OK;
}

taste_status canonical_hash(const canonical *c, sha256 *hash, taste_error *error) {
    return canonical_walk(c, hash_piece, hash, error);
}
