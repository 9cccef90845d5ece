#include "control.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "clock.h"
#include "error.h"
#include "frequency.h"
#include "io.h"
#include "json.h"

enum { TEXT_BYTES = 256 };

/* The file that was read last: a new one has another inode, size or time. */
static int has_changed(const char *path) {
    static struct stat last;
    struct stat now;
    if (stat(path, &now) != 0) return 0;
    int same = now.st_ino == last.st_ino && now.st_size == last.st_size && now.st_mtim.tv_sec == last.st_mtim.tv_sec &&
               now.st_mtim.tv_nsec == last.st_mtim.tv_nsec;
    last = now;
    return !same;
}

static void warn(const training *run, const char *reason) {
    json_begin("warning");
    char text[512];
    snprintf(text, sizeof text, "%.200s: %.200s. The run goes on at batch size %u.", run->options->control, reason,
             run->batches.batch_size);
    json_text("message", text);
    json_end();
}

/* NULL, or why the text is no operating point of this run. */
static const char *read_point(const training *run, char *text, uint32_t *rows, uint64_t *khz) {
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        char name[32], rest[2];
        uint64_t value;
        if (sscanf(line, "%31s %" SCNu64 " %1s", name, &value, rest) != 2) return "a line is not a name and a number";
        if (strcmp(name, "frequency_khz") == 0)
            *khz = value;
        else if (strcmp(name, "batch_size") != 0)
            return "it knows batch_size and frequency_khz";
        else if (value < run->batches.minimum || value < 1 || value > run->t->batch_size)
            return "this batch size is not one the run was opened for";
        else
            *rows = (uint32_t)value;
    }
    return NULL;
}

static void tell(const training *run, uint64_t khz) {
    json_begin("operating_point");
    json_count("step", run->at.step);
    json_count("t_ns", taste_now_ns());
    json_count("batch_size", run->batches.batch_size);
    if (khz > 0) json_count("frequency_khz", khz);
    json_end();
}

taste_status control_apply(training *run, taste_error *error) {
    char text[TEXT_BYTES];
    uint32_t rows = run->batches.batch_size;
    uint64_t khz = 0;
    if (run->options->control == NULL || !has_changed(run->options->control)) return TASTE_STATUS_OK;
    if (io_read_text("", run->options->control, text, sizeof text) == 0) return TASTE_STATUS_OK;
    const char *wrong = read_point(run, text, &rows, &khz);
    if (wrong != NULL) {
        warn(run, wrong);
        return TASTE_STATUS_OK;
    }
    taste_status status = khz > 0 ? frequency_set(run->options->system_root, khz, error) : TASTE_STATUS_OK;
    if (status == TASTE_STATUS_OK && rows != run->batches.batch_size)
        status = training_set_batch_size(run, rows, error);
    if (status == TASTE_STATUS_USAGE) {
        warn(run, error->text);
        return TASTE_STATUS_OK;
    }
    if (status == TASTE_STATUS_OK) tell(run, khz);
    return status;
}
