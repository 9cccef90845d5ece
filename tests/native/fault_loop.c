/* Saving under faults: for n = 1, 2, ... the n-th operation on the disk fails, until a save goes through. After
 * every failure the old file is there byte for byte, no temporary file is left, and the status says what failed. With the
 * argument `planted` the writer is one that writes in place: the loop must find that out, and exits 1. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "io.h"
#include "trainer.h"
#include "weights.h"

int check_failures;

static int countdown; /* operations until the fault */
static int fault;     /* its errno */
static int in_place;  /* the planted bug */

static int faulty(void) {
    if (--countdown != 0) return 0;
    errno = fault;
    return 1;
}

static int faulty_open(const char *path, int flags, mode_t mode) {
    char name[IO_PATH_BYTES];
    snprintf(name, sizeof name, "%s", path);
    if (in_place && strstr(name, ".part") != NULL) {
        /* saved.123.part -> saved */
        *strrchr(name, '.') = 0;
        *strrchr(name, '.') = 0;
        flags = (flags & ~O_EXCL) | O_TRUNC;
    }
    return faulty() ? -1 : open(name, flags, mode);
}

static ssize_t faulty_write(int file, const void *bytes, size_t count) {
    return faulty() ? -1 : write(file, bytes, count < 50000 ? count : 50000);
}

static int faulty_fsync(int file) {
    return faulty() ? -1 : fsync(file);
}

static int faulty_close(int file) {
    int failed = faulty();
    int result = close(file);
    return failed ? -1 : result;
}

static int faulty_rename(const char *from, const char *to) {
    if (faulty()) return -1;
    return in_place ? 0 : rename(from, to);
}

static const io_operations operations = {faulty_open, faulty_write, faulty_fsync, faulty_close, faulty_rename, unlink};

static int count_files(const char *folder) {
    int count = 0;
    DIR *entries = opendir(folder);
    for (struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries))
        count += entry->d_name[0] != '.';
    closedir(entries);
    return count;
}

/* FNV-1a of the file's bytes, 0 if it is not there. */
static uint64_t hash_file(const char *path) {
    uint64_t hash = 0xcbf29ce484222325u;
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    for (int c = fgetc(file); c != EOF; c = fgetc(file)) hash = (hash ^ (uint64_t)c) * 0x100000001b3u;
    fclose(file);
    return hash;
}

/* Saves weights of seed n over those of seed 0, the n-th operation failing; 1: the save went through. */
static int save_once(int n, const char *folder, taste_parameters *parameters, void *staging) {
    const uint32_t kinds = 1u << TASTE_KIND_PARAMETER | 1u << TASTE_KIND_STATE;
    const canonical all = {
        .model = taste_model_get(), .parameters = parameters, .kinds = kinds, .staging = staging, .staging_bytes = 65536};
    char path[256];
    taste_error error = {{0}};
    snprintf(path, sizeof path, "%s/saved", folder);
    countdown = -1;
    io = &operations;
    int planted = in_place;
    in_place = 0;
    (void)taste_parameters_seed(parameters, 0, NULL);
    CHECK(weights_save(path, &all, 0, &error) == TASTE_STATUS_OK);
    in_place = planted;
    uint64_t before = hash_file(path);
    (void)taste_parameters_seed(parameters, (uint64_t)n, NULL);
    countdown = n;
    taste_status status = weights_save(path, &all, 1, &error);
    int met = countdown <= 0;
    if (status == TASTE_STATUS_OK) {
        /* The last operation closes the folder, which nothing depends on any more. */
        CHECK(hash_file(path) != before);
        return 1;
    }
    CHECK(met && status == (fault == ENOSPC ? TASTE_STATUS_NO_SPACE : TASTE_STATUS_IO) && error.text[0] != 0);
    /* Only after the rename, where nothing but the folder's fsync is missing, may the new file be there. */
    int renamed = strstr(error.text, "folder") != NULL;
    CHECK(renamed ? hash_file(path) != 0 : hash_file(path) == before);
    CHECK(count_files(folder) == 1);
    return 0;
}

int main(int argc, char **argv) {
    const int faults[] = {ENOSPC, EIO};
    const taste_model *model = taste_model_get();
    size_t bytes = taste_parameters_bytes(model);
    void *block = NULL, *staging = malloc(65536);
    taste_parameters *parameters;
    in_place = argc > 2 && strcmp(argv[2], "planted") == 0;
    if (argc < 2 || posix_memalign(&block, TASTE_ALIGNMENT, bytes) != 0) return 2;
    CHECK(taste_parameters_init(model, block, bytes, &parameters, NULL) == TASTE_STATUS_OK);
    int points = 0;
    for (int i = 0; i < 2; i++) {
        fault = faults[i];
        for (int n = 1; !save_once(n, argv[1], parameters, staging) && n < 1000; n++) points++;
    }
    CHECK(points > 20 && points < 1000);
    printf("%d points, %d failures\n", points, check_failures);
    free(block), free(staging);
    return check_failures > 0;
}
