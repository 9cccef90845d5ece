#include "weights.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "error.h"
#include "io.h"

static taste_status map_header(tensor_file *file, uint64_t header_bytes, uint64_t file_bytes, taste_error *error) {
    uint64_t needed, padded = (header_bytes + 63) / 64 * 64;
    file->mapped_bytes = padded + sizeof(taste_safetensors);
    file->mapped = mmap(NULL, file->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (file->mapped == MAP_FAILED) {
        file->mapped = NULL;
        return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT,
                          "no memory for the header of %.160s (%llu bytes). Free some.", file->path,
                          (unsigned long long)header_bytes);
    }
    file->header = (taste_safetensors *)((unsigned char *)file->mapped + padded);
    taste_status status = io_read_at(file->file, file->path, 0, header_bytes, file->mapped, error);
    if (status != TASTE_STATUS_OK) return status;
    return taste_safetensors_open(file->mapped, header_bytes, file_bytes, file->header, &needed, error);
}

/* Puts the file's name in front of what the parser says. */
static taste_status with_path(const char *path, taste_status status, taste_error *error) {
    char text[TASTE_ERROR_BYTES];
    if (status != TASTE_STATUS_CORRUPT || strstr(error->text, path) != NULL) return status;
    snprintf(text, sizeof text, "%s", error->text);
    return taste_fail(error, status, "%.120s: %.180s", path, text);
}

taste_status tensor_file_open(const char *path, tensor_file *out, taste_error *error) {
    /* First only the length: what is mapped depends on it, and it is checked against the file's size. */
    taste_safetensors *none = NULL;
    unsigned char prefix[8];
    uint64_t bytes, needed = 0;
    *out = (tensor_file){.file = -1, .path = path};
    taste_status status = io_open_to_read(path, &out->file, &bytes, error);
    if (status != TASTE_STATUS_OK) return status;
    size_t have = bytes < sizeof prefix ? (size_t)bytes : sizeof prefix;
    status = io_read_at(out->file, path, 0, have, prefix, error);
    if (status != TASTE_STATUS_OK) return status;
    status = taste_safetensors_open(prefix, have, bytes, none, &needed, error);
    if (status == TASTE_STATUS_DOES_NOT_FIT) status = map_header(out, needed, bytes, error);
    return with_path(path, status, error);
}

void tensor_file_forget_header(tensor_file *file) {
    if (file->mapped != NULL) munmap(file->mapped, file->mapped_bytes);
    file->mapped = NULL;
    file->header = NULL;
}

void tensor_file_close(tensor_file *file) {
    tensor_file_forget_header(file);
    if (file->file >= 0) close(file->file);
    file->file = -1;
}

int tensor_file_find(tensor_file *file, const char *name, taste_safetensors_entry *out_entry) {
    /* From where the last search ended, since files are mostly read in their own order; then once from the start. */
    for (int round = 0; round < 2; round++) {
        while (taste_safetensors_next(file->header, out_entry)) {
            if (strcmp(out_entry->name, name) == 0) return 1;
        }
        taste_safetensors_rewind(file->header);
    }
    return 0;
}

/* Shape as text, for messages: [64,3,3,3]. */
static const char *shape_text(const uint64_t *shape, uint32_t dims, char out[128]) {
    size_t used = (size_t)snprintf(out, 128, "[");
    for (uint32_t d = 0; d < dims && used < 100; d++) {
        used += (size_t)snprintf(out + used, 128 - used, "%s%llu", d > 0 ? "," : "", (unsigned long long)shape[d]);
    }
    snprintf(out + used, 128 - used, "]");
    return out;
}

static taste_status check_entry(const taste_safetensors_entry *entry, const taste_tensor_facts *facts,
                                taste_error *error) {
    const char *dtype = facts->dtype == 'f' ? "F32" : facts->dtype == 'i' ? "I32" : "U32";
    int same = strcmp(entry->dtype, dtype) == 0 && entry->dims == facts->dims;
    for (uint32_t d = 0; same && d < facts->dims; d++) same = entry->shape[d] == (uint64_t)facts->shape[d];
    if (same) return TASTE_STATUS_OK;
    char theirs[128], ours[128];
    return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                      "the weights file has '%.100s' as %s %s, the model as %s %s. Use weights of this model.",
                      entry->name, entry->dtype, shape_text(entry->shape, entry->dims, theirs), dtype,
                      shape_text((const uint64_t *)facts->shape, facts->dims, ours));
}

static taste_status load_tensor(const tensor_file *file, const taste_safetensors_entry *entry, uint32_t tensor,
                                uint64_t count, taste_parameters *parameters, void *staging, size_t staging_bytes,
                                taste_error *error) {
    size_t piece = staging_bytes / 4;
    for (uint64_t first = 0; first < count; first += piece) {
        size_t n = count - first < piece ? (size_t)(count - first) : piece;
        taste_status status = io_read_at(file->file, file->path, entry->first_byte + first * 4, n * 4, staging, error);
        if (status != TASTE_STATUS_OK) return status;
        (void)taste_parameters_write_range(parameters, tensor, first, n, staging);
    }
    return TASTE_STATUS_OK;
}

/* Kinds that a parameter set holds. */
static int is_stored(taste_kind kind) {
    return kind == TASTE_KIND_PARAMETER || kind == TASTE_KIND_STATE || kind == TASTE_KIND_CONSTANT;
}

taste_status weights_load(const char *path, const taste_model *model, taste_parameters *parameters, void *staging,
                          size_t staging_bytes, taste_error *error) {
    tensor_file file;
    taste_model_facts model_facts;
    taste_status status = tensor_file_open(path, &file, error);
    (void)taste_model_describe(model, &model_facts);
    for (uint32_t i = 0; i < model_facts.tensor_count && status == TASTE_STATUS_OK; i++) {
        taste_tensor_facts facts;
        taste_safetensors_entry entry;
        (void)taste_model_tensor(model, i, &facts);
        if (!is_stored(facts.kind)) continue;
        if (!tensor_file_find(&file, facts.name, &entry)) {
            if (facts.kind == TASTE_KIND_CONSTANT) continue; /* has the value that the build gave it */
            status = taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                                "%.100s has no tensor '%.100s'. Use weights of this model.", path, facts.name);
            break;
        }
        status = check_entry(&entry, &facts, error);
        if (status != TASTE_STATUS_OK) break;
        status = load_tensor(&file, &entry, i, facts.element_count, parameters, staging, staging_bytes, error);
    }
    tensor_file_close(&file);
    return status;
}

/* The header of a file of the model's tensors, through the staging buffer. */
static taste_status put_header(io_writer *writer, const taste_model *model, uint32_t kinds, const char *metadata,
                               void *staging, size_t staging_bytes, taste_error *error) {
    size_t bytes = taste_safetensors_header(model, kinds, 0, metadata, staging_bytes, staging);
    if (bytes <= staging_bytes) return io_append(writer, staging, bytes, error);
    io_discard(writer);
    return taste_fail(error, TASTE_STATUS_INTERNAL,
                      "a header of %zu bytes is larger than the buffer of %zu. Report this.", bytes, staging_bytes);
}

static taste_status append_piece(void *context, const canonical_item *item, const float *values, size_t count,
                                 taste_error *error) {
    (void)item;
    return io_append(context, values, count * sizeof *values, error);
}

taste_status weights_save(const char *path, const canonical *c, uint64_t step, taste_error *error) {
    taste_model_facts model_facts;
    io_writer writer;
    char metadata[128];
    (void)taste_model_describe(c->model, &model_facts);
    snprintf(metadata, sizeof metadata, "{\"build_id\":\"%.64s\",\"step\":\"%llu\"}", model_facts.build_id,
             (unsigned long long)step);
    taste_status status = io_create(&writer, path, error);
    if (status == TASTE_STATUS_OK)
        status = put_header(&writer, c->model, c->kinds, metadata, c->staging, c->staging_bytes, error);
    if (status == TASTE_STATUS_OK) status = canonical_walk(c, append_piece, &writer, error);
    return status == TASTE_STATUS_OK ? io_commit(&writer, error) : status;
}

taste_status weights_save_gradients(const char *path, const taste_model *model, taste_session *session,
                                    taste_error *error) {
    const uint32_t kinds = 1u << TASTE_KIND_PARAMETER;
    taste_model_facts model_facts;
    io_writer writer;
    (void)taste_model_describe(model, &model_facts);
    uint64_t largest = taste_safetensors_header(model, kinds, 0, NULL, 0, NULL);
    for (uint32_t i = 0; i < model_facts.tensor_count; i++) {
        taste_tensor_facts facts;
        (void)taste_model_tensor(model, i, &facts);
        if (facts.kind == TASTE_KIND_PARAMETER && facts.element_count * 4 > largest) largest = facts.element_count * 4;
    }
    /* A tool for looking into a step, not for training: it takes memory of its own. */
    float *values = mmap(NULL, largest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (values == MAP_FAILED)
        return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT, "no memory for gradients (%s). Free some.",
                          strerror(errno));
    taste_status status = io_create(&writer, path, error);
    if (status == TASTE_STATUS_OK) status = put_header(&writer, model, kinds, NULL, values, largest, error);
    for (uint32_t i = 0; i < model_facts.tensor_count && status == TASTE_STATUS_OK; i++) {
        taste_tensor_facts facts;
        (void)taste_model_tensor(model, i, &facts);
        if (facts.kind != TASTE_KIND_PARAMETER) continue;
        memset(values, 0, facts.element_count * 4); /* stays so where the program does not train it */
        (void)taste_gradient_read(session, facts.name, facts.element_count, values);
        status = io_append(&writer, values, facts.element_count * 4, error);
    }
    munmap(values, largest);
    return status == TASTE_STATUS_OK ? io_commit(&writer, error) : status;
}
