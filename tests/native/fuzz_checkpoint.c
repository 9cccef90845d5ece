/* libFuzzer target of checkpoints: bytes as a file, read as --resume does. Built without the look at the hash, which would
 * stop every change at once; nothing but OK, CORRUPT and INCOMPATIBLE may come of them. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "run_folder.h"

static canonical all;
static checkpoint_facts facts;

static void open_state(void) {
    static _Alignas(TASTE_ALIGNMENT) unsigned char parameters[4096], pool[1 << 20], session[1 << 20];
    static float staging[16384];
    const taste_session_options options = {.slots = 1};
    const taste_use use = {0, 1};
    taste_pool *threads;
    all = (canonical){.model = taste_model_get(), .kinds = 7, .slots = 1, .staging = staging,
                      .staging_bytes = sizeof staging};
    if (taste_parameters_init(all.model, parameters, sizeof parameters, &all.parameters, NULL) != TASTE_STATUS_OK ||
        taste_pool_start(1, NULL, pool, sizeof pool, &threads, NULL) != TASTE_STATUS_OK ||
        taste_session_init(all.model, &use, 1, &options, threads, session, sizeof session, &all.session, NULL) !=
            TASTE_STATUS_OK)
        abort();
    checkpoint_note(&facts, "build_id", "%s", "text");
}

/* A file in memory with these bytes; its path. */
static const char *hold(const uint8_t *bytes, size_t count) {
    static char path[64];
    static int file = -1;
    if (file < 0) file = memfd_create("checkpoint", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (ftruncate(file, (off_t)count) != 0 || pwrite(file, bytes, count, 0) != (ssize_t)count) abort();
    return path;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    taste_error error;
    place at;
    if (all.model == NULL) open_state();
    const char *path = hold(bytes, count);
    taste_status status = checkpoint_check(path, &all, &at, &error);
    if (status == TASTE_STATUS_OK) status = checkpoint_load(path, &all, &facts, &error);
    if (status != TASTE_STATUS_OK && status != TASTE_STATUS_CORRUPT && status != TASTE_STATUS_INCOMPATIBLE) abort();
    return 0;
}
