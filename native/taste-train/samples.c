#include "samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "generator.h"
#include "io.h"
#include "order.h"

static int is_tensor(const taste_safetensors_entry *entry, const char *dtype, uint32_t dims, const int64_t *shape) {
    int same = strcmp(entry->dtype, dtype) == 0 && entry->dims == dims + 1 && entry->shape[0] > 0;
    for (uint32_t d = 0; same && d < dims; d++) same = entry->shape[d + 1] == (uint64_t)shape[d];
    return same;
}

static taste_status check_x(samples *s, const trainer *t, const char *path, taste_error *error) {
    taste_model_facts facts;
    taste_tensor_facts input;
    (void)taste_model_describe(t->model, &facts);
    (void)taste_model_tensor(t->model, (uint32_t)t->facts.input, &input);
    s->tokens = input.dtype == 'i';
    s->packed = is_tensor(&s->x, "U8", facts.input_dims, facts.input_shape);
    s->count = s->x.dims > 0 ? s->x.shape[0] : 0;
    s->x_elements = input.element_count;
    if (s->packed || is_tensor(&s->x, s->tokens ? "I32" : "F32", facts.input_dims, facts.input_shape))
        return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                      "x of %.120s is %s with %u dimensions, not bytes or %s samples as model %s takes them. Pack the "
                      "data for it.",
                      path, s->x.dtype, s->x.dims, s->tokens ? "int32" : "float32", facts.name);
}

/* y must be what the program is trained with; `eval` has no target and compares labels only. */
static taste_status check_y(samples *s, const trainer *t, const char *path, taste_error *error) {
    int wants_labels = 1;
    taste_tensor_facts target;
    if (t->facts.target >= 0) {
        (void)taste_model_tensor(t->model, (uint32_t)t->facts.target, &target);
        wants_labels = target.dtype == 'i';
    }
    uint64_t elements = 1;
    for (uint32_t d = 1; d < s->y.dims; d++) elements *= s->y.shape[d];
    s->y_elements = t->y_sample_bytes / 4;
    int right_type = strcmp(s->y.dtype, wants_labels ? "I32" : "F32") == 0;
    if (s->tokens && wants_labels) right_type |= strcmp(s->y.dtype, "U8") == 0;
    if (right_type && s->y.dims > 0 && s->y.shape[0] == s->count && elements == s->y_elements) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                      "y of %.120s is %s, %llu values a row; %s, %llu for each of %llu samples, are needed. Pack the data "
                      "again.",
                      path, s->y.dtype, (unsigned long long)elements, wants_labels ? "int32 labels" : "float32 values",
                      (unsigned long long)s->y_elements, (unsigned long long)s->count);
}

/* A JSON list of `count` numbers under a key of the metadata. */
static int read_list(const samples *s, const char *key, uint32_t count, double *out) {
    char text[1024];
    if (!taste_safetensors_metadata(s->file.header, key, sizeof text, text)) return 0;
    char *at = text, *end;
    for (uint32_t i = 0; i < count; i++) {
        while (*at == ' ') at++;
        if (*at != (i == 0 ? '[' : ',')) return 0;
        out[i] = strtod(++at, &end);
        if (end == at || !(out[i] > -1e6 && out[i] < 1e6)) return 0;
        at = end;
    }
    return strcmp(at + strspn(at, " "), "]") == 0;
}

static taste_status read_image(samples *s, const char *path, taste_error *error) {
    double mean[AUGMENT_CHANNELS], std[AUGMENT_CHANNELS];
    augment_image *image = &s->image;
    if (s->x.dims != 4 || s->x.shape[1] > AUGMENT_CHANNELS || s->x.shape[2] > INT32_MAX || s->x.shape[3] > INT32_MAX) {
        return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                          "x of %.120s is no set of images with at most %d channels. Pack the data again.", path,
                          AUGMENT_CHANNELS);
    }
    *image = (augment_image){(uint32_t)s->x.shape[1], (uint32_t)s->x.shape[2], (uint32_t)s->x.shape[3], {0}, {0}};
    int whole = read_list(s, "mean", image->channels, mean) && read_list(s, "std", image->channels, std);
    for (uint32_t c = 0; whole && c < image->channels; c++) {
        whole = std[c] > 0;
        image->scale[c] = (float)(1 / (255 * std[c]));
        image->shift[c] = (float)(-mean[c] / std[c]);
    }
    if (whole) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_CORRUPT,
                      "%.120s has no mean and std for %u channels in its metadata. Pack the data again.", path,
                      image->channels);
}

/* What a run is bound to, and for packed data a check that nothing of them was damaged. */
static taste_status check_data(samples *s, const trainer *t, const char *path, taste_error *error) {
    const taste_safetensors *header = s->file.header;
    char stored[SHA256_HEX_BYTES];
    uint64_t start = 8 + header->header_bytes;
    sha256 hash;
    sha256_start(&hash);
    for (uint64_t done = 0; done < header->data_bytes;) {
        uint64_t left = header->data_bytes - done;
        size_t n = left < t->footprint.staging_bytes ? (size_t)left : t->footprint.staging_bytes;
        taste_status status = io_read_at(s->file.file, path, start + done, n, t->staging, error);
        if (status != TASTE_STATUS_OK) return status;
        sha256_add(&hash, t->staging, n);
        done += n;
    }
    sha256_finish(&hash, s->digest);
    if (!taste_safetensors_metadata(header, "sha256", sizeof stored, stored) || strcmp(stored, s->digest) == 0)
        return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_CORRUPT,
                      "the data of %.120s have SHA-256 %.12s..., not %.12s... as packed. Copy the file again.", path,
                      s->digest, stored);
}

taste_status samples_open(const char *path, const trainer *trainer, int needs_y, samples *out, taste_error *error) {
    memset(out, 0, sizeof *out);
    taste_status status = tensor_file_open(path, &out->file, error);
    if (status != TASTE_STATUS_OK) return status;
    if (!tensor_file_find(&out->file, "x", &out->x)) {
        return taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s has no tensor 'x'. Give a samples file.", path);
    }
    status = check_x(out, trainer, path, error);
    if (status == TASTE_STATUS_OK && out->packed && !out->tokens) status = read_image(out, path, error);
    if (status != TASTE_STATUS_OK) return status;
    out->has_y = tensor_file_find(&out->file, "y", &out->y);
    if (!out->has_y && needs_y) {
        return taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s has no tensor 'y'. Give a samples file.", path);
    }
    out->labels = out->has_y && strcmp(out->y.dtype, "F32") != 0;
    if (out->has_y && (needs_y || out->labels)) status = check_y(out, trainer, path, error);
    out->has_domain = tensor_file_find(&out->file, "domain", &out->domain) && strcmp(out->domain.dtype, "I32") == 0 &&
                      out->domain.dims == 1 && out->domain.shape[0] == out->count;
    if (status == TASTE_STATUS_OK) status = check_data(out, trainer, path, error);
    tensor_file_forget_header(&out->file);
    return status;
}

void samples_close(samples *samples) {
    tensor_file_close(&samples->file);
}

/* Bytes to int32, or 4-byte values as they are. */
static taste_status read_plain(const tensor_file *file, const taste_safetensors_entry *entry, uint64_t row,
                               uint64_t elements, unsigned char *raw, void *out, taste_error *error) {
    int bytes = strcmp(entry->dtype, "U8") == 0;
    uint64_t row_bytes = elements * (bytes ? 1 : 4);
    taste_status status =
        io_read_at(file->file, file->path, entry->first_byte + row * row_bytes, row_bytes, bytes ? raw : out, error);
    for (uint64_t i = 0; bytes && status == TASTE_STATUS_OK && i < elements; i++) ((int32_t *)out)[i] = raw[i];
    return status;
}

/* Here, since a ReLU makes zeros of NaN: the loss may be finite, and the first that is not a weight's gradient. */
static taste_status check_finite(const samples *samples, uint64_t row, const float *x, taste_error *error) {
    uint64_t count = samples->x_elements;
#ifdef TASTE_PLANT_GO_ON /* a harness that does not notice this is worth nothing */
    count = 0;
#endif
    for (uint64_t i = 0; i < count; i++) {
        if (isfinite(x[i])) continue;
        return taste_fail(error, TASTE_STATUS_NON_FINITE, "sample %llu of %.160s has %s at value %llu. Repair the data.",
                          (unsigned long long)row, samples->file.path, isnan(x[i]) ? "NaN" : "Inf",
                          (unsigned long long)i);
    }
    return TASTE_STATUS_OK;
}

taste_status samples_read(const samples *samples, const samples_request *request, const batch_buffer *batch,
                          taste_error *error) {
    const tensor_file *file = &samples->file;
    uint64_t x_elements = samples->x_elements, y_elements = samples->y_elements;
    for (uint32_t i = 0; i < request->rows; i++) {
        uint64_t position = request->first + i, row = position;
        if (request->list != NULL)
            row = request->list[i];
        else if (request->keyed)
            row = order_sample(request->seed, request->epoch, samples->count, position);
        float *x = (float *)batch->x + i * x_elements;
        taste_status status;
        if (samples->packed && !samples->tokens) {
            augment_draw draw =
                augment_choose(request->augment, &samples->image, request->seed, request->epoch, position);
            status = io_read_at(file->file, file->path, samples->x.first_byte + row * x_elements, x_elements,
                                batch->raw, error);
            if (status == TASTE_STATUS_OK) augment_apply(&samples->image, &draw, batch->raw, x);
        } else {
            status = read_plain(file, &samples->x, row, x_elements, batch->raw, x, error);
        }
        if (status == TASTE_STATUS_OK && !samples->packed && !samples->tokens)
            status = check_finite(samples, row, x, error);
        if (status == TASTE_STATUS_OK && samples->has_y && y_elements > 0) {
            status = read_plain(file, &samples->y, row, y_elements, batch->raw,
                                (int32_t *)batch->y + i * y_elements, error);
        }
        if (status != TASTE_STATUS_OK) return status;
    }
    return TASTE_STATUS_OK;
}

taste_status samples_count(const char *path, uint64_t *out_count, taste_error *error) {
    tensor_file file;
    taste_safetensors_entry x;
    taste_status status = tensor_file_open(path, &file, error);
    if (status == TASTE_STATUS_OK && (!tensor_file_find(&file, "x", &x) || x.dims == 0)) {
        status = taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s has no tensor 'x'. Give a samples file.", path);
    }
    if (status == TASTE_STATUS_OK) *out_count = x.shape[0];
    tensor_file_close(&file);
    return status;
}

taste_status samples_read_column(const samples *samples, const taste_safetensors_entry *column, uint64_t first,
                                 size_t count, int32_t *out, taste_error *error) {
    const tensor_file *file = &samples->file;
    return io_read_at(file->file, file->path, column->first_byte + first * sizeof *out, count * sizeof *out, out, error);
}

taste_status samples_read_bytes(const samples *samples, uint64_t row, unsigned char *out, taste_error *error) {
    const tensor_file *file = &samples->file;
    uint64_t bytes = samples->x_elements;
    return io_read_at(file->file, file->path, samples->x.first_byte + row * bytes, bytes, out, error);
}

void samples_make_up(const trainer *trainer) {
    taste_model_facts facts;
    taste_tensor_facts input, target = {.dtype = 'i'};
    const batch_buffer *batch = &trainer->batches[0];
    uint64_t key = taste_generator_key(0, "x"), y_key = taste_generator_key(0, "y");
    uint64_t x_count = trainer->batch_size * trainer->x_sample_bytes / 4;
    uint64_t y_count = trainer->batch_size * trainer->y_sample_bytes / 4;
    (void)taste_model_describe(trainer->model, &facts);
    (void)taste_model_tensor(trainer->model, (uint32_t)trainer->facts.input, &input);
    if (trainer->facts.target >= 0) (void)taste_model_tensor(trainer->model, (uint32_t)trainer->facts.target, &target);
    uint64_t classes = facts.classes > 0 ? facts.classes : 1;
    for (uint64_t i = 0; i < x_count; i++) {
        if (input.dtype == 'i')
            ((int32_t *)batch->x)[i] = (int32_t)(taste_splitmix64(key + i) % classes);
        else
            ((float *)batch->x)[i] = 2 * taste_generator_uniform(key, i) - 1;
    }
    for (uint64_t i = 0; i < y_count; i++) {
        if (target.dtype == 'i')
            ((int32_t *)batch->y)[i] = (int32_t)(taste_splitmix64(y_key + i) % classes);
        else
            ((float *)batch->y)[i] = taste_generator_uniform(y_key, i);
    }
}
