/* Writes the header of a safetensors file that holds tensors of the model. */
#include <stdio.h>
#include <string.h>

#include "layout.h"
#include "model.h"

/* Text that may not fit: `used` counts on, so that the caller learns the size. */
typedef struct writer {
    char *out;
    size_t capacity;
    size_t used;
    uint32_t entries;
} writer;

static void put(writer *w, char c) {
    if (w->used < w->capacity) w->out[w->used] = c;
    w->used++;
}

static void put_text(writer *w, const char *text) {
    while (*text != 0) put(w, *text++);
}

static void put_number(writer *w, uint64_t number) {
    char digits[24];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    put_text(w, digits);
}

static void put_string(writer *w, const char *prefix, const char *text) {
    put(w, '"');
    put_text(w, prefix);
    for (; *text != 0; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 0x20) {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", c);
            put_text(w, escape);
            continue;
        }
        if (c == '"' || c == '\\') put(w, '\\');
        put(w, *text);
    }
    put(w, '"');
}

/* `slot`: of the optimizer, -1: the tensor itself. */
static uint64_t put_entry(writer *w, const taste_tensor *tensor, int slot, uint64_t offset) {
    static const char *const dtypes[] = {"F32", "I32", "U32"};
    uint64_t end = offset + taste_layout_count(tensor, 1) * sizeof(float);
    if (w->entries++ > 0) put(w, ',');
    put_string(w, slot < 0 ? "" : slot == 0 ? "optimizer.0." : "optimizer.1.", tensor->name);
    put_text(w, ":{\"dtype\":\"");
    put_text(w, dtypes[tensor->dtype]);
    put_text(w, "\",\"shape\":[");
    for (unsigned d = 0; d < tensor->axes; d++) {
        if (d > 0) put(w, ',');
        put_number(w, (uint64_t)tensor->axis[d].extent);
    }
    put_text(w, "],\"data_offsets\":[");
    put_number(w, offset);
    put(w, ',');
    put_number(w, end);
    put_text(w, "]}");
    return end;
}

size_t taste_safetensors_header(const taste_model *model, uint32_t kinds, uint32_t slots, const char *metadata,
                                size_t capacity, char *out_header) {
    writer w = {out_header, capacity, 8, 0};
    uint64_t offset = 0;
    put(&w, '{');
    if (metadata != NULL) {
        put_text(&w, "\"__metadata__\":");
        put_text(&w, metadata);
        w.entries++;
    }
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const taste_tensor *tensor = &model->tensors[i];
        /* Regions of a parameter set carry the numbers of their kinds. */
        if (!taste_in_parameter_set(tensor) || !(kinds >> tensor->region & 1)) continue;
        offset = put_entry(&w, tensor, -1, offset);
    }
    for (uint32_t slot = 0; slot < slots && slot < TASTE_MAX_SLOTS; slot++) {
        for (uint32_t i = 0; i < model->tensor_count; i++) {
            if (!taste_is_trained(model, &model->tensors[i])) continue;
            offset = put_entry(&w, &model->tensors[i], (int)slot, offset);
        }
    }
    put(&w, '}');
    while (w.used % 8 != 0) put(&w, ' ');
    uint64_t length = w.used - 8;
    for (int i = 0; i < 8 && capacity >= 8; i++) out_header[i] = (char)(length >> (8 * i) & 0xff);
    return w.used;
}
