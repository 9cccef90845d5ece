#include "run_folder.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "error.h"
#include "json.h"
#include "progress.h"

static const char name_format[] = "%s/checkpoint-%u.safetensors";

static void name_generation(const run_folder *folder, uint32_t generation, char out[IO_PATH_BYTES]) {
    snprintf(out, IO_PATH_BYTES, name_format, folder->path, generation);
}

static taste_status take_lock(run_folder *folder, taste_error *error) {
    char path[IO_PATH_BYTES], holder[24];
    snprintf(path, sizeof path, "%s/lock", folder->path);
    taste_status status = io_open_lock(path, &folder->lock, error);
    if (status == TASTE_STATUS_BUSY) {
        io_read_holder(folder->lock, holder, sizeof holder);
        return taste_fail(error, status, "%.160s is in use by process %s. Wait for it, or use another folder.",
                          folder->path, holder);
    }
    if (status != TASTE_STATUS_OK) return status;
    snprintf(holder, sizeof holder, "%ld\n", (long)getpid());
    return io_write_holder(folder->lock, path, holder, error);
}

/* checkpoint-0.safetensors.123.part: of a run that was killed while it wrote. The lock says that nobody writes now. */
static void remove_unfinished(const run_folder *folder) {
    DIR *entries = opendir(folder->path);
    if (entries == NULL) return;
    for (struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        size_t length = strlen(entry->d_name);
        if (strncmp(entry->d_name, "checkpoint-", 11) != 0 || length < 5) continue;
        if (strcmp(entry->d_name + length - 5, ".part") != 0) continue;
        char path[IO_PATH_BYTES];
        if (snprintf(path, sizeof path, "%s/%s", folder->path, entry->d_name) < (int)sizeof path)
            (void)io->unlink(path);
    }
    closedir(entries);
}

taste_status run_folder_open(const char *path, run_folder *out, taste_error *error) {
    *out = (run_folder){.path = path, .lock = -1};
    if (strlen(path) + 64 > IO_PATH_BYTES) {
        return taste_fail(error, TASTE_STATUS_USAGE, "a path of %zu characters is too long. Use a shorter one.",
                          strlen(path));
    }
    if (mkdir(path, 0777) != 0 && errno != EEXIST) return io_failed("make the folder", path, error);
    taste_status status = take_lock(out, error);
    if (status == TASTE_STATUS_OK) remove_unfinished(out);
    return status;
}

void run_folder_close(run_folder *folder) {
    if (folder->lock >= 0) close(folder->lock);
    folder->lock = -1;
}

taste_status run_folder_find(run_folder *folder, const canonical *c, place *out_at, int *out_found,
                             taste_error *out_warning, taste_error *error) {
    taste_status worst = TASTE_STATUS_OK;
    taste_error trouble = {{0}};
    *out_found = 0;
    out_warning->text[0] = 0;
    for (uint32_t g = 0; g < RUN_FOLDER_GENERATIONS; g++) {
        char path[IO_PATH_BYTES];
        place at;
        name_generation(folder, g, path);
        if (access(path, F_OK) != 0 && errno == ENOENT) continue;
        taste_status status = checkpoint_check(path, c, &at, &trouble);
        if (status != TASTE_STATUS_OK) {
            worst = status;
            *out_warning = trouble;
            continue;
        }
        if (*out_found && at.step <= out_at->step) continue;
        *out_found = 1;
        *out_at = at;
        folder->next = (g + 1) % RUN_FOLDER_GENERATIONS;
        memcpy(folder->file, path, sizeof path);
    }
    if (*out_found || worst == TASTE_STATUS_OK) return TASTE_STATUS_OK;
    return taste_fail(error, worst, "no whole checkpoint in the folder: %.200s Start anew in another folder.",
                      out_warning->text);
}

static void warn(const char *text) {
    fprintf(stderr, "warning: %s The one before it is used.\n", text);
    json_begin("warning");
    json_text("message", text);
    json_end();
}

taste_status run_folder_continue(run_folder *folder, const char *path, int resume, const canonical *c,
                                 const checkpoint_facts *facts, place *out_at, int *out_found, taste_error *error) {
    taste_error warning;
    place at;
    *out_found = 0;
    taste_status status = run_folder_open(path, folder, error);
    folder->saved_step = 0;
    folder->saved_ns = taste_now_ns();
    if (status == TASTE_STATUS_OK) status = run_folder_find(folder, c, &at, out_found, &warning, error);
    if (status != TASTE_STATUS_OK || !*out_found) return status;
    if (!resume) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "%.160s holds a checkpoint of step %llu. Give --resume to go on from it, or another folder.",
                          path, (unsigned long long)at.step);
    }
    status = checkpoint_load(folder->file, c, facts, error);
    if (status != TASTE_STATUS_OK) return status;
    if (warning.text[0] != 0) warn(warning.text);
    *out_at = at;
    folder->saved_step = at.step;
    return TASTE_STATUS_OK;
}

taste_status run_folder_save(run_folder *folder, const canonical *c, const checkpoint_facts *facts, const place *at,
                             taste_error *error) {
    char path[IO_PATH_BYTES];
    name_generation(folder, folder->next, path);
    taste_status status = checkpoint_write(path, c, facts, at, error);
    if (status != TASTE_STATUS_OK) return status;
    memcpy(folder->file, path, sizeof path);
    folder->next = (folder->next + 1) % RUN_FOLDER_GENERATIONS;
    return TASTE_STATUS_OK;
}

taste_status run_folder_checkpoint(run_folder *folder, const canonical *c, const checkpoint_facts *facts,
                                   const place *at, taste_error *error) {
    if (folder->lock < 0) return TASTE_STATUS_OK;
#ifdef TASTE_PLANT_EARLY_EVENT /* a harness that does not notice this is worth nothing */
    progress_report_checkpoint(folder->file, at->step);
#endif
    taste_status status = run_folder_save(folder, c, facts, at, error);
    if (status != TASTE_STATUS_OK) return status;
    folder->saved_step = at->step;
    folder->saved_ns = taste_now_ns();
    progress_report_checkpoint(folder->file, at->step);
    return TASTE_STATUS_OK;
}

taste_status run_folder_checkpoint_if_due(run_folder *folder, const options *options, const canonical *c,
                                          const checkpoint_facts *facts, const place *at, taste_error *error) {
    double waited = (double)(taste_now_ns() - folder->saved_ns) * 1e-9;
    int due = options->checkpoint_steps > 0 ? at->step - folder->saved_step >= options->checkpoint_steps
                                            : waited >= options->checkpoint_seconds;
    return due ? run_folder_checkpoint(folder, c, facts, at, error) : TASTE_STATUS_OK;
}
