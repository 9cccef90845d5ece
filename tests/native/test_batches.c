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
        CHECK(rows >= b.minimum && rows <= b.batch_size && effective <= b.effective);
        CHECK(at.position == taken);
        in_step += rows;
        batches_advance(&b, &at);
        CHECK(at.step == before.step + (in_step == effective));
        if (in_step == effective) in_step = 0;
        taken = at.epoch > before.epoch ? 0 : taken + rows;
        CHECK(at.epoch == before.epoch || (at.position == 0 && in_step == 0 && before.position + rows == b.samples));
    }
    CHECK(at.epoch == 3 && at.step == 3 * batches_steps_an_epoch(&b));
}

void test_batches(void) {
    int good = 0, refused = 0;
    for (uint32_t samples = 1; samples <= 30; samples++) {
        for (uint32_t effective = 1; effective <= 12; effective++) {
            for (uint32_t size = 1; size <= effective; size++) {
                for (uint32_t minimum = 1; minimum <= 2; minimum++) {
                    batches b = {samples, size, effective, minimum}, o = {samples, effective, effective, minimum};
                    taste_error error;
                    if (batches_check(&b, &error) != TASTE_STATUS_OK || batches_check(&o, &error) != TASTE_STATUS_OK) {
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
    batches one = {5, 4, 4, 2}, three = {3, 2, 3, 2}, whole = {3, 3, 3, 2};
    CHECK(batches_check(&one, NULL) == TASTE_STATUS_USAGE && batches_check(&three, NULL) == TASTE_STATUS_USAGE);
    CHECK(batches_check(&whole, NULL) == TASTE_STATUS_OK);
}
