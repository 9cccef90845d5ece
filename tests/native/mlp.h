/* Sizes of the test model: x [2, 4, 5] -> dense, bias, ReLU -> times a constant -> dense, bias -> 5 logits. The hidden units are
 * stored in blocks of 4, the last one filled up, so that stored and canonical layouts differ. */
#ifndef MLP_H
#define MLP_H

enum {
    INPUTS = 40,
    HIDDEN = 1002,
    CLASSES = 5,
    LANES = 4,
    BLOCKS = (HIDDEN + LANES - 1) / LANES,
    STORED = BLOCKS * LANES,
    MLP_LIMIT_STEPS = 2000
};

#define MLP_MEAN_MOMENTUM 0.1f

#endif
