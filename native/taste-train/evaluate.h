/* Loss and accuracy over a whole samples file, by the program `eval`. */
#ifndef TASTE_TRAIN_EVALUATE_H
#define TASTE_TRAIN_EVALUATE_H

#include "io.h"
#include "samples.h"

typedef struct tally {
    uint64_t samples, labels, correct;
    double loss; /* sum over the labels */
} tally;

/* What is evaluated: the first `count` rows of the file, or those of a list of `count`. */
typedef struct evaluation {
    uint64_t count;
    const uint32_t *list;   /* NULL: none */
    const uint16_t *groups; /* as for taste_session_set_class_groups; NULL: one of all classes */
} evaluation;

/* Every sample once. Logits are appended to `writer` if it is not NULL. `batch` is overwritten. INTERRUPTED after Ctrl-C. */
taste_status evaluate(const trainer *t, const samples *data, const batch_buffer *batch, const evaluation *what,
                      io_writer *writer, tally *out, taste_error *error);

/* Mean loss and share of correct labels; NAN without labels. */
double tally_loss(const tally *sum);
double tally_accuracy(const tally *sum);

#endif
