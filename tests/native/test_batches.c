/* Epochs cut into steps and micro-batches: every sample once, no micro-batch too small, whatever the sizes. */
#include "batches.h"
#include "check.h"

/* Walks over three epochs with `b`; `other` is the micro-batch size from the second epoch on. */
static void walk(batches b, uint32_t other) {
    place at = {0};
    uint64_t taken = 0, in_step = 0;
    for (uint64_t guard = 0; at.epoch < 3 && guard < 100000; guard++) {
        place before = at;
        if (at.epoch == 1 && at.position == 0) b.batch_size = other;
        uint32_t rows = batches_rows(&b, &at), effective = batches_effective(&b, &at);
        CHECK(rows >= b.minimum && rows <= b.batch_size && effective <= batches_whole(&b, at.epoch));
        CHECK(at.position == taken);
        in_step += rows;
        batches_advance(&b, &at);
        CHECK(at.step == before.step + (in_step == effective));
        if (in_step == effective) in_step = 0;
        taken = at.epoch > before.epoch ? 0 : taken + rows;
        CHECK(at.epoch == before.epoch || (at.position == 0 && in_step == 0 && before.position + rows == b.samples));
    }
    CHECK(at.epoch == 3 && (double)at.step == batches_steps(&b, 3));
}

/* Epochs in effective batches of 3, 7, 10, 10: 7, 3, 2 and 2 steps of 19 samples. */
static void grow(void) {
    batches b = {19, 4, 3, 1, 1, 2.5, 10};
    CHECK(batches_whole(&b, 0) == 3 && batches_whole(&b, 1) == 7 && batches_whole(&b, 2) == 10);
    CHECK(batches_whole(&b, 1000000000000) == 10);
    CHECK(batches_steps(&b, 3) == 12 && batches_steps(&b, 5) == 16 && batches_steps(&b, 1.5) == 8.5);
    walk(b, 2);
    /* 20 in 19 and 1, for a model that needs two: refused where the run gets there, after five steps of 4. */
    b = (batches){20, 4, 4, 2, 1, 4.75, 19};
    CHECK(batches_check(&b, 5, NULL) == TASTE_STATUS_OK && batches_check(&b, 6, NULL) == TASTE_STATUS_USAGE);
}

void test_batches(void) {
    int good = 0, refused = 0;
    for (uint32_t samples = 1; samples <= 30; samples++) {
        for (uint32_t effective = 1; effective <= 12; effective++) {
            for (uint32_t size = 1; size <= effective; size++) {
                for (uint32_t minimum = 1; minimum <= 2; minimum++) {
                    batches b = {samples, size, effective, minimum, 0, 0, 0}, o = b;
                    taste_error error;
                    o.batch_size = effective;
                    if (batches_check(&b, 999, &error) != TASTE_STATUS_OK ||
                        batches_check(&o, 999, &error) != TASTE_STATUS_OK) {
                        CHECK(minimum == 2);
                        refused++;
                        continue;
                    }
                    walk(b, effective);
                    good++;
                }
            }
        }
    }
    /* One sample is too few for a model that needs two; three in twos can be cut only where three fit. */
    CHECK(good > 3000 && refused > 300);
    batches one = {5, 4, 4, 2, 0, 0, 0}, three = {3, 2, 3, 2, 0, 0, 0}, whole = {3, 3, 3, 2, 0, 0, 0};
    CHECK(batches_check(&one, 9, NULL) == TASTE_STATUS_USAGE && batches_check(&three, 9, NULL) == TASTE_STATUS_USAGE);
    CHECK(batches_check(&whole, 9, NULL) == TASTE_STATUS_OK);
    grow();
}
