/* libFuzzer target of packed data: bytes as a file, opened and read as training does. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "samples.h"

static trainer t;

static void open_trainer(void) {
    static float staging[16384];
    t = (trainer){.model = taste_model_get(), .batch_size = 1, .staging = staging};
    t.footprint.staging_bytes = sizeof staging;
    (void)taste_model_program(t.model, 0, &t.facts);
    t.x_sample_bytes = footprint_sample_bytes(t.model, t.facts.input);
    t.y_sample_bytes = footprint_target_bytes(t.model, &t.facts);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static char path[64];
    static int file = -1;
    samples data;
    taste_error error;
    if (t.model == NULL) open_trainer();
    if (file < 0) file = memfd_create("samples", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (ftruncate(file, (off_t)count) != 0 || pwrite(file, bytes, count, 0) != (ssize_t)count) abort();
    taste_status status = samples_open(path, &t, 1, &data, &error);
    if (status == TASTE_STATUS_OK) {
        /* Memory of their own, so that the address sanitizer sees one byte too far. */
        batch_buffer batch = {malloc(t.x_sample_bytes), malloc(t.y_sample_bytes), malloc(t.x_sample_bytes / 4)};
        samples_request request = {.first = data.count - 1, .rows = 1, .keyed = 1, .augment = AUGMENT_CROP_FLIP_CUTOUT};
        if (samples_read(&data, &request, &batch, &error) != TASTE_STATUS_OK) abort();
        free(batch.x), free(batch.y), free(batch.raw);
    }
    samples_close(&data);
    if (status != TASTE_STATUS_OK && status != TASTE_STATUS_CORRUPT && status != TASTE_STATUS_INCOMPATIBLE) abort();
    return 0;
}
