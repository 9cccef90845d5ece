/* Checkpoints under faults. `checkpoint_loop FOLDER MODE [planted]`, exit 1 if a promise was broken:
 *   faults  the n-th operation on the disk fails, once or for ever, for every n: the status says so, the newest committed
 *           checkpoint is there, nothing half written is left. Planted: a writer that writes in place.
 *   power   the power is cut before every operation: what was committed is there, whole, or something newer is. Planted: a
 *           run that never syncs its files.
 *   rot     random bits flip, the file is cut at many lengths: every damage is seen. Planted: by a build that does not
 *           look at the hash (-DTASTE_PLANT_SKIP_HASH). */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "disk_model.h"
#include "generator.h"
#include "run_folder.h"

int check_failures;

enum { STAGING = 65536, SAVES = 5, ROT = 1000 };

static canonical all;
static checkpoint_facts facts;
static char digests[SAVES + 2][SHA256_HEX_BYTES]; /* of the state at every step */

static void *aligned(size_t bytes) {
    void *block = NULL;
    if (posix_memalign(&block, TASTE_ALIGNMENT, bytes) != 0) abort();
    memset(block, 0, bytes);
    return block;
}

/* A parameter set and a session with one slot of optimizer state. */
static void open_state(void) {
    const taste_model *model = taste_model_get();
    const taste_session_options options = {.slots = 1};
    const taste_use use = {0, 1};
    const uint32_t kinds = 1u << TASTE_KIND_PARAMETER | 1u << TASTE_KIND_STATE | 1u << TASTE_KIND_CONSTANT;
    size_t bytes = taste_parameters_bytes(model), session_bytes = 0, pool_bytes = taste_pool_bytes(1);
    taste_pool *pool;
    all = (canonical){.model = model, .kinds = kinds, .slots = 1, .staging = malloc(STAGING), .staging_bytes = STAGING};
    CHECK(taste_parameters_init(model, aligned(bytes), bytes, &all.parameters, NULL) == TASTE_STATUS_OK);
    CHECK(taste_pool_start(1, NULL, aligned(pool_bytes), pool_bytes, &pool, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_bytes(model, &use, 1, &options, &session_bytes, NULL) == TASTE_STATUS_OK);
    CHECK(taste_session_init(model, &use, 1, &options, pool, aligned(session_bytes), session_bytes, &all.session,
                             NULL) == TASTE_STATUS_OK);
    checkpoint_note(&facts, "build_id", "%s", "test");
}

static void hash_state(char out[SHA256_HEX_BYTES]) {
    sha256 hash;
    sha256_start(&hash);
    CHECK(canonical_hash(&all, &hash, NULL) == TASTE_STATUS_OK);
    sha256_finish(&hash, out);
}

/* Everything as step `step` has it. */
static void set_state(uint64_t step) {
    canonical_item item = {.next = 0};
    (void)taste_parameters_seed(all.parameters, step, NULL);
    while (canonical_next(&all, &item)) {
        float value = (float)step;
        if (item.slot >= 0) canonical_put(&all, &item, 0, 1, &value);
    }
    hash_state(digests[step]);
}

static int count_files(const char *folder) {
    int count = 0;
    DIR *entries = opendir(folder);
    for (struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries))
        count += entry->d_name[0] != '.' && strcmp(entry->d_name, "lock") != 0;
    closedir(entries);
    return count;
}

static taste_status save_step(run_folder *folder, uint64_t step, taste_error *error) {
    place at = {.step = step, .epoch = step / 3, .position = step % 3};
    set_state(step);
    return run_folder_save(folder, &all, &facts, &at, error);
}

/* Opens a folder anew and loads what is in it; the step, 0: there is none. Its state must be the step's own. */
static uint64_t load_newest(const char *path) {
    run_folder folder;
    taste_error error = {{0}}, warning;
    place at = {0};
    int found = 0;
    char digest[SHA256_HEX_BYTES];
    (void)taste_parameters_seed(all.parameters, 999, NULL);
    CHECK(run_folder_open(path, &folder, &error) == TASTE_STATUS_OK);
    taste_status status = run_folder_find(&folder, &all, &at, &found, &warning, &error);
    if (status == TASTE_STATUS_OK && found) {
        CHECK(checkpoint_load(folder.file, &all, &facts, &error) == TASTE_STATUS_OK);
        hash_state(digest);
        CHECK(at.step <= SAVES + 1 && strcmp(digest, digests[at.step]) == 0 && at.epoch == at.step / 3);
    }
    run_folder_close(&folder);
    return found ? at.step : 0;
}

/* The seam of `faults`. */
static int countdown, fault, for_ever, in_place;
static char newest[IO_PATH_BYTES];

static int faulty(void) {
    countdown--;
    if (for_ever ? countdown > 0 : countdown != 0) return 0;
    errno = fault;
    return 1;
}

static int faulty_open(const char *path, int flags, mode_t mode) {
    if (faulty()) return -1;
    if (in_place && (flags & O_CREAT)) return open(newest, O_WRONLY | O_TRUNC, mode);
    return open(path, flags, mode);
}

static ssize_t faulty_write(int file, const void *bytes, size_t count) {
    return faulty() ? -1 : write(file, bytes, count < 50000 ? count : 50000);
}

static int faulty_fsync(int file) {
    (void)file;
    return faulty() ? -1 : 0;
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

static const io_operations faulty_operations = {faulty_open,  faulty_write,  faulty_fsync,
                                                faulty_close, faulty_rename, unlink};

/* Steps 1 and 2 are committed, the n-th operation of saving step 3 fails; 1: it went through. */
static int save_with_fault(const char *path, int n) {
    run_folder folder;
    taste_error error = {{0}}, warning;
    place at;
    int found;
    const io_operations *before = io;
    io = &faulty_operations;
    fault = fault == 0 ? EIO : fault;
    int wanted_place = in_place;
    in_place = 0;
    countdown = 1000000;
    CHECK(run_folder_open(path, &folder, &error) == TASTE_STATUS_OK);
    CHECK(run_folder_find(&folder, &all, &at, &found, &warning, &error) == TASTE_STATUS_OK);
    CHECK(save_step(&folder, 1, &error) == TASTE_STATUS_OK && save_step(&folder, 2, &error) == TASTE_STATUS_OK);
    memcpy(newest, folder.file, sizeof newest);
    in_place = wanted_place;
    countdown = n;
    taste_status status = save_step(&folder, 3, &error);
    run_folder_close(&folder);
    io = before;
    uint64_t step = load_newest(path);
    CHECK(count_files(path) == 2);
    if (status == TASTE_STATUS_OK) {
        CHECK(step == 3);
        return 1;
    }
    CHECK(status == (fault == ENOSPC ? TASTE_STATUS_NO_SPACE : TASTE_STATUS_IO) && error.text[0] != 0);
    /* Step 3 only where nothing but the folder's sync is missing. */
    CHECK(step == 2 || (step == 3 && strstr(error.text, "folder") != NULL));
    return 0;
}

static void clear(const char *path) {
    char file[IO_PATH_BYTES];
    for (int g = 0; g < RUN_FOLDER_GENERATIONS; g++) {
        snprintf(file, sizeof file, "%s/checkpoint-%d.safetensors", path, g);
        unlink(file);
    }
}

static void run_faults(const char *path, int planted) {
    const int faults[] = {ENOSPC, EIO};
    int points = 0;
    in_place = planted;
    for (int i = 0; i < 4; i++) {
        fault = faults[i / 2];
        for_ever = i % 2;
        for (int n = 1; n < 1000; n++, points++) {
            clear(path);
            if (save_with_fault(path, n)) break;
        }
    }
    CHECK(points > 60 && points < 2000);
    printf("%d faults, %d failures\n", points, check_failures);
}

static void run_power(const char *path, int planted) {
    char real[IO_PATH_BYTES], after[IO_PATH_BYTES];
    run_folder folder;
    taste_error error;
    int committed[SAVES + 1] = {0}, cuts = 0;
    snprintf(real, sizeof real, "%s/real", path);
    snprintf(after, sizeof after, "%s/after", path);
    CHECK(run_folder_open(real, &folder, &error) == TASTE_STATUS_OK);
    const io_operations *before = io;
    disk_record(planted);
    io = &disk_operations;
    for (uint64_t step = 1; step <= SAVES; step++) {
        CHECK(save_step(&folder, step, &error) == TASTE_STATUS_OK);
        committed[step] = disk_count();
    }
    io = before;
    run_folder_close(&folder);
    for (int cut = 0; cut <= disk_count(); cut++) {
        uint64_t promised = 0;
        while (promised < SAVES && committed[promised + 1] <= cut) promised++;
        for (uint64_t seed = 0; seed < 10; seed++, cuts++) {
            disk_replay(after, cut, seed * 100003 + (uint64_t)cut);
            uint64_t step = load_newest(after);
            CHECK(step >= promised && step <= promised + 1);
        }
    }
    CHECK(cuts > 500);
    printf("%d cuts, %d failures\n", cuts, check_failures);
}

static void flip(const char *path, long at, int bit) {
    unsigned char byte;
    int file = open(path, O_RDWR);
    if (file < 0 || pread(file, &byte, 1, at) != 1) abort();
    byte ^= (unsigned char)(1 << bit);
    if (pwrite(file, &byte, 1, at) != 1) abort();
    close(file);
}

static void run_rot(const char *path) {
    char copy[IO_PATH_BYTES], command[2 * IO_PATH_BYTES + 16];
    run_folder folder;
    taste_error error;
    place at;
    struct stat state;
    CHECK(run_folder_open(path, &folder, &error) == TASTE_STATUS_OK);
    CHECK(save_step(&folder, 1, &error) == TASTE_STATUS_OK);
    CHECK(checkpoint_check(folder.file, &all, &at, &error) == TASTE_STATUS_OK);
    if (stat(folder.file, &state) != 0) abort();
    for (uint64_t i = 0; i < ROT; i++) {
        uint64_t draw = taste_splitmix64(i);
        long limit = i % 2 ? 1000 : (long)state.st_size; /* half of them in the header */
        long byte = (long)(draw % (uint64_t)limit);
        flip(folder.file, byte, (int)(draw >> 32 & 7));
        CHECK(checkpoint_check(folder.file, &all, &at, &error) == TASTE_STATUS_CORRUPT);
        flip(folder.file, byte, (int)(draw >> 32 & 7));
    }
    snprintf(copy, sizeof copy, "%s/cut", path);
    snprintf(command, sizeof command, "cp '%s' '%s'", folder.file, copy);
    if (system(command) != 0) abort();
    for (long length = (long)state.st_size - 1; length >= 0; length -= length > 2000 ? 4999 : 41) {
        if (truncate(copy, length) != 0) abort();
        CHECK(checkpoint_check(copy, &all, &at, &error) == TASTE_STATUS_CORRUPT);
    }
    CHECK(checkpoint_check(folder.file, &all, &at, &error) == TASTE_STATUS_OK);
    run_folder_close(&folder);
    printf("%d flips, %d failures\n", ROT, check_failures);
}

int main(int argc, char **argv) {
    int planted = argc > 3 && strcmp(argv[3], "planted") == 0;
    if (argc < 3) return 2;
    open_state();
    if (strcmp(argv[2], "faults") == 0)
        run_faults(argv[1], planted);
    else if (strcmp(argv[2], "power") == 0)
        run_power(argv[1], planted);
    else
        run_rot(argv[1]);
    return check_failures > 0;
}
