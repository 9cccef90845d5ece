/* taste-train eval: logits of every sample once, and loss and accuracy where there are labels. */
#include <stdio.h>

#include "clock.h"
#include "evaluate.h"
#include "json.h"
#include "verbs.h"

/* The header of a safetensors file with one tensor, logits float32 [count, values of a sample]. */
static taste_status start_logits(io_writer *writer, const char *path, uint64_t count, uint64_t values,
                                 taste_error *error) {
    char header[256];
    int length = snprintf(header + 8, sizeof header - 8,
                          "{\"logits\":{\"dtype\":\"F32\",\"shape\":[%llu,%llu],\"data_offsets\":[0,%llu]}}",
                          (unsigned long long)count, (unsigned long long)values,
                          (unsigned long long)(count * values * sizeof(float)));
    while (length % 8 != 0) header[8 + length++] = ' ';
    for (int i = 0; i < 8; i++) header[i] = (char)((uint64_t)length >> (8 * i) & 0xff);
    taste_status status = io_create(writer, path, error);
    return status == TASTE_STATUS_OK ? io_append(writer, header, (size_t)length + 8, error) : status;
}

static void report(const trainer *t, const tally *sum, double elapsed_s) {
    json_begin("result");
    json_text("verb", "eval");
    json_count("batch_size", t->batch_size);
    json_count("samples", sum->samples);
    json_real("accuracy", tally_accuracy(sum));
    json_real("loss", tally_loss(sum));
    json_real("elapsed_s", elapsed_s);
    json_end();
}

static taste_status run(const options *options, const trainer *t, const samples *data, taste_error *error) {
    uint64_t count = options->limit > 0 && options->limit < data->count ? options->limit : data->count;
    io_writer writer = {.file = -1};
    tally sum = {0};
    taste_status status = TASTE_STATUS_OK;
    uint64_t start = taste_now_ns();
    if (options->logits != NULL)
        status = start_logits(&writer, options->logits, count, t->logits_sample_bytes / sizeof(float), error);
    taste_pool_enter(t->pool);
    if (status == TASTE_STATUS_OK)
        status = evaluate(t, data, &t->batches[0], &(evaluation){.count = count},
                          options->logits != NULL ? &writer : NULL, &sum, error);
    taste_pool_leave(t->pool);
    if (status != TASTE_STATUS_OK) {
        io_discard(&writer);
        return status;
    }
    double elapsed_s = (double)(taste_now_ns() - start) * 1e-9;
    if (options->logits != NULL) status = io_commit(&writer, error);
    if (status == TASTE_STATUS_OK) report(t, &sum, elapsed_s);
    return status;
}

taste_status verb_eval(const options *options, taste_error *error) {
    trainer t;
    samples data;
    taste_status status = trainer_open(options, "eval", 1, &t, error);
    if (status == TASTE_STATUS_OK) {
        status = samples_open(options->samples, &t, 0, &data, error);
        if (status == TASTE_STATUS_OK) status = run(options, &t, &data, error);
        samples_close(&data);
    }
    trainer_close(&t);
    return status;
}
