/* `learn` and power cuts: learn_power AFTER right|planted learn FLAGS...
 * The run's operations on the disk go through the model of disk_model.h, an event `disk` each with the number so far. Then for
 * every number of operations, twice with other luck: an event `cut`, AFTER becomes a disk on which the power went there, and a
 * process of its own goes on in it (--checkpoint AFTER, --resume). Planted: a run that never syncs its files. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "disk_model.h"
#include "json.h"
#include "verbs.h"

enum { LUCKS = 2 };

static void note(const char *event, int count) {
    json_begin(event);
    json_count("count", (uint64_t)count);
    json_end();
}

static int noted_open(const char *path, int flags, mode_t mode) {
    int file = disk_operations.open(path, flags, mode);
    note("disk", disk_count());
    return file;
}

static ssize_t noted_write(int file, const void *bytes, size_t count) {
    ssize_t done = disk_operations.write(file, bytes, count);
    note("disk", disk_count());
    return done;
}

static int noted_fsync(int file) {
    int result = disk_operations.fsync(file);
    note("disk", disk_count());
    return result;
}

static int noted_rename(const char *from, const char *to) {
    int result = disk_operations.rename(from, to);
    note("disk", disk_count());
    return result;
}

static int learn(const options *options) {
    taste_error error = {{0}};
    taste_status status = verb_learn(options, &error);
    if (status != TASTE_STATUS_OK) {
        json_begin("error");
        json_count("exit_code", status);
        json_text("message", error.text);
        json_end();
    }
    fflush(stdout);
    return (int)status;
}

static void go_on_after(const char *folder, options o, int cut, int luck) {
    note("cut", cut);
    disk_replay(folder, cut, (uint64_t)(luck * 100003 + cut));
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) abort();
    o.checkpoint = folder;
    o.resume = 1;
    o.checkpoint_steps = 1000000;
    if (child == 0) _exit(learn(&o));
    int status;
    if (waitpid(child, &status, 0) != child) abort();
}

int main(int argc, char **argv) {
    io_operations noted = {noted_open, noted_write, noted_fsync, close, noted_rename, disk_operations.unlink};
    const io_operations *real = io;
    options o;
    taste_error error;
    if (argc < 4 || options_parse(argc - 2, argv + 2, &o, &error) != TASTE_STATUS_OK) return 2;
    disk_record(strcmp(argv[2], "planted") == 0);
    io = &noted;
    if (learn(&o) != 0) return 1;
    io = real;
    for (int luck = 0; luck < LUCKS; luck++) {
        for (int cut = 0; cut <= disk_count(); cut++) go_on_after(argv[1], o, cut, luck);
    }
    return 0;
}
