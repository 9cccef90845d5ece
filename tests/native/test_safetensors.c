/* The safetensors reader: what it must take, what it must refuse, and that no damage makes it read outside its bytes. Each
 * file stands at the end of memory of its own, so that the address sanitizer sees one byte too far. */
#include <stdlib.h>
#include <string.h>

#include "check.h"

static taste_safetensors parsed;

/* A file of `header` and `data_bytes` of data, as far as `prefix_bytes`. */
static taste_status open_header(const char *header, size_t header_bytes, uint64_t data_bytes, taste_error *error) {
    unsigned char *file = malloc(header_bytes + 8);
    uint64_t needed = 0;
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)((uint64_t)header_bytes >> (8 * i));
    memcpy(file + 8, header, header_bytes);
    taste_status status =
        taste_safetensors_open(file, header_bytes + 8, header_bytes + 8 + data_bytes, &parsed, &needed, error);
    if (status == TASTE_STATUS_OK) {
        taste_safetensors_entry entry;
        uint32_t count = 0;
        while (taste_safetensors_next(&parsed, &entry)) count++;
        CHECK(count == parsed.tensor_count);
    }
    free(file);
    return status;
}

static void refuse(const char *header, uint64_t data_bytes) {
    taste_error error = {{0}};
    taste_status status = open_header(header, strlen(header), data_bytes, &error);
    CHECK(status == TASTE_STATUS_CORRUPT && strlen(error.text) > 20);
    if (status != TASTE_STATUS_CORRUPT) printf("  taken: %s\n", header);
}

static void accept(const char *header, uint64_t data_bytes) {
    taste_error error = {{0}};
    taste_status status = open_header(header, strlen(header), data_bytes, &error);
    CHECK(status == TASTE_STATUS_OK);
    if (status != TASTE_STATUS_OK) printf("  refused: %s: %s\n", header, error.text);
}

#define TENSOR(name, shape, from, to) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":[" shape "],\"data_offsets\":[" from "," to "]}"

static void check_grammar(void) {
    accept("{}", 0);
    accept("{\"__metadata__\":{}}  ", 0);
    accept("{" TENSOR("a", "2,3", "0", "24") "," TENSOR("b", "", "24", "28") "}", 28);
    accept("{\"__metadata__\":{\"a\":\"b\"}, " TENSOR("\\u00e4\\ud83d\\ude00\\n", "1", "0", "4") "}", 4);
    accept("{ \"a\" : { \"shape\" : [ 0 , 5 ] , \"data_offsets\" : [ 0 , 0 ] , \"dtype\" : \"I64\" } }", 0);
    refuse("[]", 0);
    refuse("{", 0);
    refuse("{}x", 0);
    refuse("{\"a\"}", 0);
    refuse("{\"a\":1}", 0);
    refuse("{\"a\":{}}", 0);
    refuse("{,}", 0);
    refuse("{" TENSOR("a", "1", "0", "4") ",}", 4);
    refuse("{" TENSOR("a", "1", "0", "4") "}", 8);
    refuse("{" TENSOR("a", "1", "0", "4") "}", 0);
    refuse("{" TENSOR("a", "2", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "-1", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "1.0", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "01", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "1,1,1,1,1,1,1,1,1", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "1", "4", "0") "}", 4);
    refuse("{" TENSOR("a", "1", "0", "4") "," TENSOR("b", "1", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "1", "0", "4") "," TENSOR("b", "1", "2", "6") "}", 6);
    refuse("{" TENSOR("a", "1", "0", "4") "," TENSOR("b", "1", "8", "12") "}", 12);
    refuse("{" TENSOR("b", "1", "4", "8") "," TENSOR("a", "1", "0", "4") "}", 8);
    refuse("{" TENSOR("a", "1", "0", "4") "," TENSOR("a", "1", "4", "8") "}", 8);
    refuse("{" TENSOR("a", "1", "0", "4") "," TENSOR("\\u0061", "1", "4", "8") "}", 8);
    refuse("{" TENSOR("a", "4294967296,4294967296", "0", "0") "}", 0);
    refuse("{" TENSOR("a", "18446744073709551616", "0", "4") "}", 4);
    refuse("{" TENSOR("a", "4611686018427387905", "0", "4") "}", 4);
    refuse("{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    refuse("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":1}}", 4);
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4);
    refuse("{\"__metadata__\":{\"a\":1}}", 0);
    refuse("{\"__metadata__\":{},\"__metadata__\":{}}", 0);
    refuse("{\"\\ud800\":{}}", 0);
    refuse("{\"\\u0000\":{}}", 0);
    refuse("{\"\\x\":{}}", 0);
}

/* Lengths that lie, before any header is there. */
static void check_lengths(void) {
    unsigned char prefix[8] = {0};
    uint64_t needed;
    taste_error error;
    CHECK(taste_safetensors_open(prefix, 0, 3, &parsed, &needed, &error) == TASTE_STATUS_CORRUPT);
    CHECK(taste_safetensors_open(prefix, 8, 8, &parsed, &needed, &error) == TASTE_STATUS_CORRUPT);
    CHECK(taste_safetensors_open(prefix, 4, 100, &parsed, &needed, &error) == TASTE_STATUS_DOES_NOT_FIT && needed == 8);
    prefix[0] = 50;
    CHECK(taste_safetensors_open(prefix, 8, 100, &parsed, &needed, &error) == TASTE_STATUS_DOES_NOT_FIT &&
          needed == 58);
    CHECK(taste_safetensors_open(prefix, 8, 57, &parsed, &needed, &error) == TASTE_STATUS_CORRUPT);
    memset(prefix, 0xff, sizeof prefix);
    CHECK(taste_safetensors_open(prefix, 8, UINT64_MAX, &parsed, &needed, &error) == TASTE_STATUS_CORRUPT);
    prefix[7] = 0;
    CHECK(taste_safetensors_open(prefix, 8, 1000, &parsed, &needed, &error) == TASTE_STATUS_CORRUPT);
}

/* Values of metadata by key, wherever they stand; and the optimizer's tensors behind the model's. */
static void check_metadata(void) {
    static const char *const text =
        "{" TENSOR("a", "1", "0", "4") ",\"__metadata__\":{\"k\":\"v\",\"\\u0071\":\"\\\"x\\n\",\"long\":\"12345678\"}}";
    char value[8], header[8192];
    taste_error error;
    uint64_t needed, parameters = (40 * 1002 + 1002 + 5 * 1002 + 5) * 4;
    memset(header, 0, 8);
    header[0] = (char)strlen(text);
    memcpy(header + 8, text, strlen(text));
    size_t whole = strlen(text) + 8;
    CHECK(taste_safetensors_open(header, whole, whole + 4, &parsed, &needed, &error) == TASTE_STATUS_OK);
    CHECK(taste_safetensors_metadata(&parsed, "k", sizeof value, value) && strcmp(value, "v") == 0);
    CHECK(taste_safetensors_metadata(&parsed, "q", sizeof value, value) && strcmp(value, "\"x\n") == 0);
    CHECK(!taste_safetensors_metadata(&parsed, "long", sizeof value, value));
    CHECK(!taste_safetensors_metadata(&parsed, "a", sizeof value, value));
    size_t bytes = taste_safetensors_header(taste_model_get(), 1, 2, NULL, sizeof header, header);
    CHECK(bytes < sizeof header);
    CHECK(taste_safetensors_open(header, bytes, bytes + 3 * parameters, &parsed, &needed, &error) == TASTE_STATUS_OK);
    CHECK(parsed.tensor_count == 12 && !taste_safetensors_metadata(&parsed, "k", sizeof value, value));
    taste_safetensors_entry entry;
    for (int i = 0; i < 9; i++) CHECK(taste_safetensors_next(&parsed, &entry));
    CHECK(strcmp(entry.name, "optimizer.1.hidden.weight") == 0);
}

/* The model's own header: read back, then cut at every length, then every byte changed. */
static void check_damage(void) {
    const taste_model *model = taste_model_get();
    const uint32_t kinds = 1u << TASTE_KIND_PARAMETER | 1u << TASTE_KIND_STATE;
    size_t bytes = taste_safetensors_header(model, kinds, 0, "{\"step\":\"1\"}", 0, NULL);
    char *file = malloc(bytes);
    taste_error error;
    taste_safetensors_entry entry;
    uint64_t needed, data = (40 * 1002 + 1002 + 5 * 1002 + 5 + 1002) * 4;
    CHECK(taste_safetensors_header(model, kinds, 0, "{\"step\":\"1\"}", bytes, file) == bytes);
    CHECK(taste_safetensors_open(file, bytes, bytes + data, &parsed, &needed, &error) == TASTE_STATUS_OK);
    CHECK(parsed.tensor_count == 5 && bytes % 8 == 0);
    CHECK(taste_safetensors_next(&parsed, &entry) && strcmp(entry.name, "hidden.weight") == 0);
    CHECK(entry.dims == 2 && entry.shape[0] == 1002 && entry.shape[1] == 40 && entry.first_byte == bytes);
    for (size_t length = 0; length + 8 < bytes; length++) {
        /* Only blanks of the padding may be missing. */
        int whole = memchr(file + 8 + length, '}', bytes - 8 - length) == NULL;
        CHECK(open_header(file + 8, length, data, &error) == (whole ? TASTE_STATUS_OK : TASTE_STATUS_CORRUPT));
        CHECK(taste_safetensors_open(file, bytes, length, &parsed, &needed, &error) == TASTE_STATUS_CORRUPT);
    }
    for (size_t i = 8; i < bytes; i++) {
        char was = file[i];
        for (int bit = 0; bit < 8; bit++) {
            file[i] = (char)(was ^ (1 << bit));
            taste_status status = open_header(file + 8, bytes - 8, data, &error);
            CHECK(status == TASTE_STATUS_OK || status == TASTE_STATUS_CORRUPT);
        }
        file[i] = was;
    }
    free(file);
}

void test_safetensors(void) {
    check_grammar();
    check_lengths();
    check_damage();
    check_metadata();
    CHECK(strstr(taste_header_text(), "/* cffi: begin */") != NULL &&
          strstr(taste_header_text(), "/* cffi: end */") != NULL);
}
