/* libFuzzer target of the safetensors reader: bytes as a file, the first of them as its claimed size. Whatever is taken must be
 * within the file, tensor for tensor. */
#include <stdlib.h>
#include <string.h>

#include "taste.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static taste_safetensors file;
    taste_safetensors_entry entry;
    taste_error error;
    uint64_t needed = 0, end;
    uint32_t tensors = 0;
    if (count < 2) return 0;
    /* The data themselves are not read, so the file may be said to be longer than what is here. */
    uint64_t file_bytes = count - 2 + bytes[0] * 16u + bytes[1] * 4096u;
    taste_status status = taste_safetensors_open(bytes + 2, count - 2, file_bytes, &file, &needed, &error);
    if (status == TASTE_STATUS_DOES_NOT_FIT && needed > file_bytes) abort();
    if (status != TASTE_STATUS_OK) return 0;
    char value[16];
    if (taste_safetensors_metadata(&file, "c", sizeof value, value) && memchr(value, 0, sizeof value) == NULL) abort();
    taste_safetensors_rewind(&file);
    end = needed;
    while (taste_safetensors_next(&file, &entry)) {
        if (entry.first_byte != end || entry.end_byte < entry.first_byte || entry.end_byte > file_bytes) abort();
        end = entry.end_byte;
        tensors++;
    }
    if (end != file_bytes || tensors != file.tensor_count) abort();
    return 0;
}
