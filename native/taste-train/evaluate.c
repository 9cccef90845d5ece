#include "evaluate.h"

#include <math.h>

#include "error.h"

/* Cross-entropy of a row in double, and whether the first largest logit is the label's, both within the label's group. */
static void tally_row(const float *logits, uint32_t classes, int32_t label, const uint16_t *groups, tally *sum) {
    uint32_t best = classes;
    double total = 0;
    for (uint32_t c = 0; c < classes; c++) {
        if (groups != NULL && groups[c] != groups[label]) continue;
        if (best == classes || logits[c] > logits[best]) best = c;
    }
    for (uint32_t c = 0; c < classes; c++) {
        if (groups == NULL || groups[c] == groups[label]) total += exp((double)logits[c] - logits[best]);
    }
    sum->loss += log(total) - ((double)logits[label] - logits[best]);
    sum->correct += best == (uint32_t)label;
    sum->labels++;
}

static taste_status tally_batch(const trainer *t, const samples *data, const batch_buffer *batch, uint64_t first,
                                uint32_t rows, const uint16_t *groups, tally *sum, taste_error *error) {
    const int32_t *labels = batch->y;
    uint64_t count = rows * data->y_elements;
    uint32_t classes = (uint32_t)(t->logits_sample_bytes / sizeof(float) / data->y_elements);
    for (uint64_t i = 0; i < count; i++) {
        if (labels[i] < 0 || (uint32_t)labels[i] >= classes) {
            return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                              "sample %llu has label %d, the model %u classes. Pack the data for it.",
                              (unsigned long long)(first + i / data->y_elements), labels[i], classes);
        }
        tally_row(t->logits + i * classes, classes, labels[i], groups, sum);
    }
    return TASTE_STATUS_OK;
}

taste_status evaluate(const trainer *t, const samples *data, const batch_buffer *batch, const evaluation *what,
                      io_writer *writer, tally *out, taste_error *error) {
    uint64_t count = what->count;
    *out = (tally){0};
    for (uint64_t first = 0; first < count; first += t->batch_size) {
        uint32_t rows = count - first < t->batch_size ? (uint32_t)(count - first) : t->batch_size;
        samples_request request = {.first = first, .rows = rows};
        if (what->list != NULL) request.list = what->list + first;
        if (trainer_interrupted) {
            return taste_fail(error, TASTE_STATUS_INTERRUPTED, "interrupted after %llu of %llu samples. Run it again.",
                              (unsigned long long)first, (unsigned long long)count);
        }
        taste_status status = samples_read(data, &request, batch, error);
        if (status != TASTE_STATUS_OK) return status;
        status = taste_session_predict(t->session, t->parameters, t->eval_program, rows, batch->x, t->logits);
        if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
        if (data->labels) status = tally_batch(t, data, batch, first, rows, what->groups, out, error);
        if (status == TASTE_STATUS_OK && writer != NULL)
            status = io_append(writer, t->logits, rows * t->logits_sample_bytes, error);
        if (status != TASTE_STATUS_OK) return status;
        out->samples += rows;
    }
    return TASTE_STATUS_OK;
}

double tally_loss(const tally *sum) {
    return sum->labels > 0 ? sum->loss / (double)sum->labels : NAN;
}

double tally_accuracy(const tally *sum) {
    return sum->labels > 0 ? (double)sum->correct / (double)sum->labels : NAN;
}
