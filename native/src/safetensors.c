/* The safetensors header: 8 bytes of length (little endian), a JSON object, then the tensors' bytes. The reader takes the
 * subset of JSON that the format needs, checks everything before anything is used, and keeps no memory of its own but the
 * caller's struct. Stricter than the format in one thing, as its own writers are: tensors stand in the header in the order
 * of their data, each starting where the one before ended. */
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "generator.h"
#include "layout.h"
#include "model.h"

enum { SEEN_SLOTS = 8192, LENGTH_BYTES = 8 };

/* Reading position. Every function returns 0 when the text is not what it expects. */
typedef struct reader {
    const char *at;
    const char *end;
} reader;

static void skip_space(reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r')) r->at++;
}

static int take(reader *r, char c) {
    skip_space(r);
    if (r->at == r->end || *r->at != c) return 0;
    r->at++;
    return 1;
}

static int peek(reader *r, char c) {
    skip_space(r);
    return r->at < r->end && *r->at == c;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* Four hexadecimal digits after \u. */
static int take_unit(reader *r, uint32_t *unit) {
    *unit = 0;
    for (int i = 0; i < 4; i++) {
        if (r->at == r->end) return 0;
        int digit = hex_digit(*r->at++);
        if (digit < 0) return 0;
        *unit = *unit * 16 + (uint32_t)digit;
    }
    return 1;
}

/* A code point after \u, with its second half where it is a surrogate pair, as UTF-8 in `out`; 0: malformed. */
static unsigned take_code_point(reader *r, unsigned char out[4]) {
    uint32_t c, low;
    if (!take_unit(r, &c) || c == 0 || (c >= 0xdc00 && c <= 0xdfff)) return 0;
    if (c >= 0xd800 && c <= 0xdbff) {
        if (r->end - r->at < 2 || r->at[0] != '\\' || r->at[1] != 'u') return 0;
        r->at += 2;
        if (!take_unit(r, &low) || low < 0xdc00 || low > 0xdfff) return 0;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    unsigned length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (unsigned i = length; i-- > 1; c >>= 6) out[i] = (unsigned char)(0x80 | (c & 0x3f));
    out[0] = (unsigned char)(lead[length] | c);
    return length;
}

/* One character of a string; returns its bytes in `out`, 0: malformed. */
static unsigned take_character(reader *r, unsigned char out[4]) {
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    char c = *r->at++;
    out[0] = (unsigned char)c;
    if ((unsigned char)c < 0x20) return 0;
    if (c != '\\') return 1;
    if (r->at == r->end) return 0;
    c = *r->at++;
    if (c == 'u') return take_code_point(r, out);
    const char *known = c == 0 ? NULL : strchr(escapes, c);
    if (known == NULL) return 0;
    out[0] = (unsigned char)meanings[known - escapes];
    return 1;
}

/* A JSON string, unescaped into `out` (or skipped, where `out` is NULL). */
static int take_string(reader *r, char *out, size_t capacity) {
    size_t used = 0;
#ifdef TASTE_PLANT_SKIP_BOUND /* a fuzzer that does not notice this is worth nothing */
    capacity = SIZE_MAX;
#endif
    if (!take(r, '"')) return 0;
    while (r->at < r->end) {
        if (*r->at == '"') {
            r->at++;
            if (out != NULL) out[used] = 0;
            return 1;
        }
        unsigned char bytes[4];
        unsigned length = take_character(r, bytes);
        if (length == 0) return 0;
        if (out == NULL) continue;
        if (used + length >= capacity) return 0;
        memcpy(out + used, bytes, length);
        used += length;
    }
    return 0;
}

static int take_number(reader *r, uint64_t *number) {
    skip_space(r);
    if (r->at == r->end || *r->at < '0' || *r->at > '9') return 0;
    const char *first = r->at;
    *number = 0;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9') {
        uint64_t digit = (uint64_t)(*r->at++ - '0');
        if (*number > (UINT64_MAX - digit) / 10) return 0;
        *number = *number * 10 + digit;
    }
    return *first != '0' || r->at - first == 1;
}

/* [a, b, ...] of at most `capacity` numbers. */
static int take_numbers(reader *r, uint64_t *numbers, uint32_t capacity, uint32_t *count) {
    *count = 0;
    if (!take(r, '[')) return 0;
    if (take(r, ']')) return 1;
    do {
        if (*count == capacity || !take_number(r, &numbers[(*count)++])) return 0;
    } while (take(r, ','));
    return take(r, ']');
}

/* {"key": "value", ...}: metadata, only checked. */
static int skip_metadata(reader *r) {
    if (!take(r, '{')) return 0;
    if (take(r, '}')) return 1;
    do {
        if (!take_string(r, NULL, 0) || !take(r, ':') || !take_string(r, NULL, 0)) return 0;
    } while (take(r, ','));
    return take(r, '}');
}

/* {"dtype": ..., "shape": ..., "data_offsets": ...}, each once, in any order. */
static int take_entry(reader *r, taste_safetensors_entry *entry) {
    char key[16];
    uint64_t offsets[2];
    uint32_t count = 0;
    unsigned seen = 0;
    if (!take(r, '{')) return 0;
    do {
        if (!take_string(r, key, sizeof key) || !take(r, ':')) return 0;
        unsigned field;
        if (strcmp(key, "dtype") == 0) {
            field = 1;
            if (!take_string(r, entry->dtype, sizeof entry->dtype)) return 0;
        } else if (strcmp(key, "shape") == 0) {
            field = 2;
            if (!take_numbers(r, entry->shape, TASTE_TENSOR_DIMS, &entry->dims)) return 0;
        } else if (strcmp(key, "data_offsets") == 0) {
            field = 4;
            if (!take_numbers(r, offsets, 2, &count) || count != 2) return 0;
        } else {
            return 0;
        }
        if (seen & field) return 0;
        seen |= field;
    } while (take(r, ','));
    if (seen != 7 || !take(r, '}')) return 0;
    entry->first_byte = offsets[0];
    entry->end_byte = offsets[1];
    return 1;
}

/* Bytes of one element; 0: a type that we do not know. */
static uint64_t dtype_bytes(const char *dtype) {
    static const struct {
        const char *name;
        uint64_t bytes;
    } known[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2},
                 {"I8", 1},  {"U64", 8}, {"U32", 4}, {"U16", 2},  {"U8", 1},  {"BOOL", 1}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, dtype) == 0) return known[i].bytes;
    }
    return 0;
}

/* Whether shape and type give exactly the bytes of the entry. */
static int sizes_agree(const taste_safetensors_entry *entry) {
    uint64_t bytes = dtype_bytes(entry->dtype);
    if (bytes == 0 || entry->end_byte < entry->first_byte) return 0;
    for (uint32_t d = 0; d < entry->dims; d++) {
        if (entry->shape[d] == 0) return entry->end_byte == entry->first_byte;
        if (bytes > UINT64_MAX / entry->shape[d]) return 0;
        bytes *= entry->shape[d];
    }
    return entry->end_byte - entry->first_byte == bytes;
}

/* Notes the name; 0 if it was there already. Zero marks a free slot. */
static int note_name(taste_safetensors *file, const char *name) {
    uint64_t hash = taste_fnv1a64(name) | 1;
    for (uint64_t slot = hash / 2 % SEEN_SLOTS;; slot = (slot + 1) % SEEN_SLOTS) {
        if (file->seen[slot] == hash) return 0;
        if (file->seen[slot] != 0) continue;
        file->seen[slot] = hash;
        return 1;
    }
}

/* Reads the whole object once; NULL if it is right, else what is wrong. */
static const char *check_header(taste_safetensors *file) {
    reader r = {file->header, file->header + file->header_bytes};
    taste_safetensors_entry entry;
    uint64_t end = 0;
    int metadata = 0;
    if (!take(&r, '{')) return "the header is not a JSON object";
    if (!peek(&r, '}')) {
        do {
            if (!take_string(&r, entry.name, sizeof entry.name) || !take(&r, ':'))
                return "a tensor's name is malformed";
            if (strcmp(entry.name, "__metadata__") == 0) {
                if (metadata++ || !skip_metadata(&r)) return "the metadata are malformed";
                continue;
            }
            if (!take_entry(&r, &entry)) return "a tensor's entry is malformed";
            if (!sizes_agree(&entry)) return "a tensor's shape, type and offsets disagree";
            if (entry.first_byte != end || entry.end_byte > file->data_bytes)
                return "the tensors' offsets leave gaps or overlap";
            if (file->tensor_count++ == TASTE_SAFETENSORS_MAX_TENSORS) return "there are more tensors than can be read";
            if (!note_name(file, entry.name)) return "a tensor's name occurs twice";
            end = entry.end_byte;
        } while (take(&r, ','));
    }
    if (!take(&r, '}')) return "the header is not a JSON object";
    skip_space(&r);
    if (r.at != r.end) return "there is text after the header's object";
    return end == file->data_bytes ? NULL : "the file is longer than its tensors";
}

taste_status taste_safetensors_open(const void *prefix, size_t prefix_bytes, uint64_t file_bytes,
                                    taste_safetensors *out_file, uint64_t *out_needed_bytes, taste_error *out_error) {
    const unsigned char *bytes = prefix;
    uint64_t length = 0;
    if (file_bytes < LENGTH_BYTES) {
        return taste_fail(out_error, TASTE_STATUS_CORRUPT,
                          "a safetensors file of %llu bytes has no header. Copy the file again.",
                          (unsigned long long)file_bytes);
    }
    *out_needed_bytes = LENGTH_BYTES;
    if (prefix_bytes < LENGTH_BYTES) return TASTE_STATUS_DOES_NOT_FIT;
    for (int i = LENGTH_BYTES; i-- > 0;) length = length << 8 | bytes[i];
    if (length < 2 || length > TASTE_SAFETENSORS_MAX_HEADER_BYTES || length > file_bytes - LENGTH_BYTES) {
        return taste_fail(out_error, TASTE_STATUS_CORRUPT,
                          "a safetensors header of %llu bytes in a file of %llu. Copy the file again.",
                          (unsigned long long)length, (unsigned long long)file_bytes);
    }
    *out_needed_bytes = LENGTH_BYTES + length;
    if (prefix_bytes < *out_needed_bytes) return TASTE_STATUS_DOES_NOT_FIT;
    memset(out_file, 0, sizeof *out_file);
    out_file->header = (const char *)bytes + LENGTH_BYTES;
    out_file->header_bytes = length;
    out_file->data_bytes = file_bytes - LENGTH_BYTES - length;
    const char *wrong = check_header(out_file);
    taste_safetensors_rewind(out_file);
    if (wrong == NULL) return TASTE_STATUS_OK;
    return taste_fail(out_error, TASTE_STATUS_CORRUPT, "safetensors: %s. Copy the file again.", wrong);
}

void taste_safetensors_rewind(taste_safetensors *file) {
    file->cursor = 0;
}

int32_t taste_safetensors_next(taste_safetensors *file, taste_safetensors_entry *out_entry) {
    reader r = {file->header + file->cursor, file->header + file->header_bytes};
    memset(out_entry, 0, sizeof *out_entry);
    if (file->cursor == 0 && !take(&r, '{')) return 0;
    for (;;) {
        (void)take(&r, ',');
        if (peek(&r, '}') || !take_string(&r, out_entry->name, sizeof out_entry->name) || !take(&r, ':')) return 0;
        if (strcmp(out_entry->name, "__metadata__") != 0) break;
        if (!skip_metadata(&r)) return 0;
    }
    if (!take_entry(&r, out_entry)) return 0;
    file->cursor = (uint64_t)(r.at - file->header);
    out_entry->first_byte += LENGTH_BYTES + file->header_bytes;
    out_entry->end_byte += LENGTH_BYTES + file->header_bytes;
    return 1;
}

/* The value of `key` in a metadata object; 0: not there. */
static int find_value(reader *r, const char *key, char *out_value, size_t capacity) {
    char name[64];
    int found = 0;
    if (!take(r, '{') || take(r, '}')) return 0;
    do {
        reader start = *r;
        int wanted = take_string(r, name, sizeof name) && strcmp(name, key) == 0;
        *r = start;
        if (!take_string(r, NULL, 0) || !take(r, ':')) return 0;
        start = *r;
        if (wanted && !take_string(r, out_value, capacity)) return 0;
        found |= wanted;
        *r = start;
        if (!take_string(r, NULL, 0)) return 0;
    } while (!found && take(r, ','));
    return found;
}

int32_t taste_safetensors_metadata(const taste_safetensors *file, const char *key, size_t capacity, char *out_value) {
    reader r = {file->header, file->header + file->header_bytes};
    taste_safetensors_entry entry;
    if (!take(&r, '{') || peek(&r, '}')) return 0;
    do {
        if (!take_string(&r, entry.name, sizeof entry.name) || !take(&r, ':')) return 0;
        if (strcmp(entry.name, "__metadata__") == 0) return find_value(&r, key, out_value, capacity);
        if (!take_entry(&r, &entry)) return 0;
    } while (take(&r, ','));
    return 0;
}
