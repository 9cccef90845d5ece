/* taste-train eval: logits of every sample once, and loss and accuracy where there are labels. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "error.h"
#include "io.h"
#include "json.h"
#include "samples.h"
#include "trainer.h"
#include "verbs.h"

typedef struct tally {
    uint64_t correct;
    double loss; /* sum over the rows */
} tally;

/* Cross-entropy of a row in double, and whether the first largest logit is the label's. */
static void tally_row(const float *logits, uint32_t classes, int32_t label, tally *sum) {
    uint32_t best = 0;
    double total = 0;
    for (uint32_t c = 1; c < classes; c++) {
        if (logits[c] > logits[best]) best = c;
    }
    for (uint32_t c = 0; c < classes; c++) total += exp((double)logits[c] - logits[best]);
    sum->loss += log(total) - ((double)logits[label] - logits[best]);
    sum->correct += best == (uint32_t)label;
}

static taste_status tally_batch(const trainer *t, uint32_t rows, uint32_t classes, uint64_t first, tally *sum,
                                taste_error *error) {
    const int32_t *labels = t->y;
    for (uint32_t i = 0; i < rows; i++) {
        if (labels[i] < 0 || (uint32_t)labels[i] >= classes) {
            return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                              "sample %llu has label %d, the model %u classes. Pack the data for it.",
                              (unsigned long long)(first + i), labels[i], classes);
        }
        tally_row(t->logits + (uint64_t)i * classes, classes, labels[i], sum);
    }
    return TASTE_STATUS_OK;
}

/* The header of a safetensors file with one tensor, logits float32 [count, classes]. */
static taste_status start_logits(io_writer *writer, const char *path, uint64_t count, uint32_t classes,
                                 taste_error *error) {
    char header[256];
    int length = snprintf(header + 8, sizeof header - 8,
                          "{\"logits\":{\"dtype\":\"F32\",\"shape\":[%llu,%u],\"data_offsets\":[0,%llu]}}",
                          (unsigned long long)count, classes, (unsigned long long)(count * classes * sizeof(float)));
    while (length % 8 != 0) header[8 + length++] = ' ';
    for (int i = 0; i < 8; i++) header[i] = (char)((uint64_t)length >> (8 * i) & 0xff);
    taste_status status = io_create(writer, path, error);
    return status == TASTE_STATUS_OK ? io_append(writer, header, (size_t)length + 8, error) : status;
}

static taste_status run(const trainer *t, const samples *data, io_writer *writer, tally *sum, taste_error *error) {
    uint32_t classes = (uint32_t)(footprint_sample_bytes(t->model, t->facts.output) / sizeof(float));
    for (uint64_t first = 0; first < data->count; first += t->batch_size) {
        uint32_t rows = data->count - first < t->batch_size ? (uint32_t)(data->count - first) : t->batch_size;
        if (trainer_interrupted) {
            return taste_fail(error, TASTE_STATUS_INTERRUPTED, "interrupted after %llu of %llu samples. Run it again.",
                              (unsigned long long)first, (unsigned long long)data->count);
        }
        taste_status status = samples_read(data, t, first, rows, error);
        if (status != TASTE_STATUS_OK) return status;
        status = taste_session_predict(t->session, t->parameters, t->program, rows, t->x, t->logits);
        if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
        if (data->labels) status = tally_batch(t, rows, classes, first, sum, error);
        if (status == TASTE_STATUS_OK && writer->file >= 0) {
            status = io_append(writer, t->logits, (size_t)rows * classes * sizeof(float), error);
        }
        if (status != TASTE_STATUS_OK) return status;
    }
    return TASTE_STATUS_OK;
}

static void report(const trainer *t, const samples *data, const tally *sum, double elapsed_s) {
    double count = (double)data->count;
    json_begin("result");
    json_text("verb", "eval");
    json_count("batch_size", t->batch_size);
    json_count("samples", data->count);
    json_real("accuracy", data->labels ? (double)sum->correct / count : NAN);
    json_real("loss", data->labels ? sum->loss / count : NAN);
    json_real("elapsed_s", elapsed_s);
    json_end();
}

static taste_status evaluate(const options *options, const trainer *t, const samples *data, taste_error *error) {
    uint32_t classes = (uint32_t)(footprint_sample_bytes(t->model, t->facts.output) / sizeof(float));
    io_writer writer = {.file = -1};
    tally sum = {0};
    taste_status status = TASTE_STATUS_OK;
    uint64_t start = taste_now_ns();
    if (options->logits != NULL) status = start_logits(&writer, options->logits, data->count, classes, error);
    taste_pool_enter(t->pool);
    if (status == TASTE_STATUS_OK) status = run(t, data, &writer, &sum, error);
    taste_pool_leave(t->pool);
    if (status != TASTE_STATUS_OK) {
        io_discard(&writer);
        return status;
    }
    double elapsed_s = (double)(taste_now_ns() - start) * 1e-9;
    if (options->logits != NULL) status = io_commit(&writer, error);
    if (status == TASTE_STATUS_OK) report(t, data, &sum, elapsed_s);
    return status;
}

taste_status verb_eval(const options *options, taste_error *error) {
    trainer t;
    samples data;
    taste_status status = trainer_open(options, "eval", 1, &t, error);
    if (status == TASTE_STATUS_OK) {
        status = samples_open(options->samples, &t, 0, &data, error);
        if (status == TASTE_STATUS_OK) status = evaluate(options, &t, &data, error);
        samples_close(&data);
    }
    trainer_close(&t);
    return status;
}
