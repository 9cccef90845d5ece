/* Loss and accuracy over a whole samples file, by the program `eval`. */
#ifndef TASTE_TRAIN_EVALUATE_H
#define TASTE_TRAIN_EVALUATE_H

#include "io.h"
#include "samples.h"

typedef struct tally {
    uint64_t samples, labels, correct;
    double loss; /* sum over the labels */
} tally;

/* Every sample of the first `limit` (0: all) once, in the file's order. Logits are appended to `writer` if it is not NULL.
 * `batch` is overwritten. INTERRUPTED after Ctrl-C. */
taste_status evaluate(const trainer *t, const samples *data, const batch_buffer *batch, uint64_t limit, io_writer *writer,
                      tally *out, taste_error *error);

/* Mean loss and share of correct labels; NAN without labels. */
double tally_loss(const tally *sum);
double tally_accuracy(const tally *sum);

#endif
