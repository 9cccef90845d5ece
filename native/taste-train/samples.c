#include "samples.h"

#include <string.h>

#include "error.h"
#include "generator.h"
#include "io.h"

static taste_status check_x(const samples *s, const taste_model_facts *facts, const char *path, taste_error *error) {
    int same = strcmp(s->x.dtype, "F32") == 0 && s->x.dims == facts->input_dims + 1 && s->x.shape[0] > 0;
    for (uint32_t d = 0; same && d < facts->input_dims; d++)
        same = s->x.shape[d + 1] == (uint64_t)facts->input_shape[d];
    if (same) return TASTE_STATUS_OK;
    return taste_fail(
        error, TASTE_STATUS_INCOMPATIBLE,
        "x of %.120s is %s with %u dimensions, not float32 samples as model %s takes them. Pack the data for it.", path,
        s->x.dtype, s->x.dims, facts->name);
}

/* y must be what the program is trained with; `eval` has no target and compares labels only. */
static taste_status check_y(const samples *s, const trainer *t, const char *path, taste_error *error) {
    uint64_t row_bytes = s->y.dims > 0 && s->y.shape[0] > 0 ? (s->y.end_byte - s->y.first_byte) / s->y.shape[0] : 0;
    int wants_labels = 1;
    taste_tensor_facts target;
    if (t->facts.target >= 0) {
        (void)taste_model_tensor(t->model, (uint32_t)t->facts.target, &target);
        wants_labels = target.dtype == 'i';
    }
    int right_type = strcmp(s->y.dtype, wants_labels ? "I32" : "F32") == 0;
    if (right_type && s->y.dims > 0 && s->y.shape[0] == s->count && row_bytes == t->y_sample_bytes)
        return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                      "y of %.120s is %s, %llu bytes a row; %s of %llu bytes for each of %llu samples are needed. Pack "
                      "the data again.",
                      path, s->y.dtype, (unsigned long long)row_bytes, wants_labels ? "int32 labels" : "float32 rows",
                      (unsigned long long)t->y_sample_bytes, (unsigned long long)s->count);
}

taste_status samples_open(const char *path, const trainer *trainer, int needs_y, samples *out, taste_error *error) {
    taste_model_facts facts;
    (void)taste_model_describe(trainer->model, &facts);
    memset(out, 0, sizeof *out);
    taste_status status = tensor_file_open(path, &out->file, error);
    if (status != TASTE_STATUS_OK) return status;
    if (!tensor_file_find(&out->file, "x", &out->x)) {
        return taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s has no tensor 'x'. Give a samples file.", path);
    }
    status = check_x(out, &facts, path, error);
    if (status != TASTE_STATUS_OK) return status;
    out->count = out->x.shape[0];
    out->has_y = tensor_file_find(&out->file, "y", &out->y);
    if (!out->has_y && needs_y) {
        return taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s has no tensor 'y'. Give a samples file.", path);
    }
    out->labels = out->has_y && strcmp(out->y.dtype, "I32") == 0;
    return out->has_y && (needs_y || out->labels) ? check_y(out, trainer, path, error) : TASTE_STATUS_OK;
}

void samples_close(samples *samples) {
    tensor_file_close(&samples->file);
}

taste_status samples_read(const samples *samples, const trainer *trainer, uint64_t first, uint32_t rows,
                          taste_error *error) {
    const tensor_file *file = &samples->file;
    uint64_t x_bytes = trainer->x_sample_bytes, y_bytes = trainer->y_sample_bytes;
    for (uint32_t done = 0; done < rows;) {
        uint64_t row = (first + done) % samples->count;
        uint64_t run = samples->count - row < rows - done ? samples->count - row : rows - done;
        unsigned char *x = (unsigned char *)trainer->x + done * x_bytes;
        taste_status status =
            io_read_at(file->file, file->path, samples->x.first_byte + row * x_bytes, run * x_bytes, x, error);
        if (status == TASTE_STATUS_OK && samples->has_y) {
            unsigned char *y = (unsigned char *)trainer->y + done * y_bytes;
            status = io_read_at(file->file, file->path, samples->y.first_byte + row * y_bytes, run * y_bytes, y, error);
        }
        if (status != TASTE_STATUS_OK) return status;
        done += (uint32_t)run;
    }
    return TASTE_STATUS_OK;
}

void samples_make_up(const trainer *trainer) {
    taste_model_facts facts;
    taste_tensor_facts target = {.dtype = 'i'};
    uint64_t key = taste_generator_key(0, "x"), y_key = taste_generator_key(0, "y");
    uint64_t x_count = trainer->batch_size * trainer->x_sample_bytes / 4;
    uint64_t y_count = trainer->batch_size * trainer->y_sample_bytes / 4;
    (void)taste_model_describe(trainer->model, &facts);
    if (trainer->facts.target >= 0) (void)taste_model_tensor(trainer->model, (uint32_t)trainer->facts.target, &target);
    for (uint64_t i = 0; i < x_count; i++) ((float *)trainer->x)[i] = 2 * taste_generator_uniform(key, i) - 1;
    for (uint64_t i = 0; i < y_count; i++) {
        if (target.dtype == 'i')
            ((int32_t *)trainer->y)[i] =
                (int32_t)(taste_splitmix64(y_key + i) % (facts.classes > 0 ? facts.classes : 1));
        else
            ((float *)trainer->y)[i] = taste_generator_uniform(y_key, i);
    }
}
