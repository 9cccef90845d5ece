#include "detached.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "error.h"
#include "io.h"
#include "json.h"
#include "trainer.h"

enum { NAME_BYTES = 256, HOLDER_BYTES = NAME_BYTES + 24 };

typedef struct run_place {
    const char *folder;
    const char *name; /* the last part of the folder's path */
    int lock, events, messages, empty;
    off_t said; /* bytes of events that an earlier attempt left */
} run_place;

static taste_status refuse_busy(const run_place *place, taste_error *error) {
    const struct timespec moment = {.tv_nsec = 50000000}; /* the winner has its lock before its name stands in it */
    char holder[HOLDER_BYTES];
    nanosleep(&moment, NULL);
    io_read_holder(place->lock, holder, sizeof holder);
    return taste_fail(error, TASTE_STATUS_BUSY,
                      "the board is in use by run %.200s. Wait for it, `attach` to it, or `stop` it.", holder);
}

static taste_status take_lock(run_place *place, taste_error *error) {
    char path[IO_PATH_BYTES];
    snprintf(path, sizeof path, "%.*slock", (int)(place->name - place->folder), place->folder);
    taste_status status = io_open_lock(path, &place->lock, error);
    if (status == TASTE_STATUS_BUSY) return refuse_busy(place, error);
#ifdef TASTE_PLANT_UNLOCKED /* a race that does not notice this is worth nothing */
    (void)flock(place->lock, LOCK_UN);
#endif
    return status;
}

static void name_file(const run_place *place, const char *name, char out[IO_PATH_BYTES]) {
    snprintf(out, IO_PATH_BYTES, "%s/%s", place->folder, name);
}

static taste_status open_log(const run_place *place, const char *name, int *out_file, taste_error *error) {
    char path[IO_PATH_BYTES];
    name_file(place, name, path);
    *out_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    return *out_file < 0 ? io_failed("open", path, error) : TASTE_STATUS_OK;
}

static taste_status open_place(const char *folder, run_place *out, taste_error *error) {
    const char *slash = strrchr(folder, '/');
    *out = (run_place){folder, slash == NULL ? folder : slash + 1, -1, -1, -1, -1, 0};
    if (out->name[0] == 0 || strlen(out->name) >= NAME_BYTES || strlen(folder) + 64 > IO_PATH_BYTES) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "--run '%.100s' does not end with a short name. Name a folder, without a slash behind it.",
                          folder);
    }
    taste_status status = take_lock(out, error);
    if (status == TASTE_STATUS_OK) status = open_log(out, "events.jsonl", &out->events, error);
    if (status == TASTE_STATUS_OK) status = open_log(out, "messages", &out->messages, error);
    if (status != TASTE_STATUS_OK) return status;
    out->said = lseek(out->events, 0, SEEK_END);
    out->empty = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return out->empty < 0 ? io_failed("open", "/dev/null", error) : TASTE_STATUS_OK;
}

static taste_status keep(const run_place *place, const char *name, const char *text, taste_error *error) {
    char path[IO_PATH_BYTES];
    name_file(place, name, path);
    return io_write_text(path, text, error);
}

/* In the run: who it is, for whoever looks for it. */
static taste_status sign(const run_place *place, taste_error *error) {
    char holder[HOLDER_BYTES], processes[48];
    snprintf(processes, sizeof processes, "%ld %ld\n", (long)getpid(), (long)getppid());
    snprintf(holder, sizeof holder, "%.200s (process %ld)\n", place->name, (long)getpid());
    taste_status status = io_write_holder(place->lock, "the lock", holder, error);
    return status == TASTE_STATUS_OK ? keep(place, "process", processes, error) : status;
}

static void redirect(const run_place *place) {
    (void)dup2(place->empty, STDIN_FILENO);
    (void)dup2(place->events, STDOUT_FILENO);
    (void)dup2(place->messages, STDERR_FILENO);
}

/* Waits for the run, passing on a request to end, and notes how it ended. */
static int watch(const run_place *place, pid_t run) {
    int state = 0, asked = 0;
    taste_error ignored;
    while (waitpid(run, &state, 0) < 0 && errno == EINTR) {
        if (trainer_interrupted && !asked) (void)kill(run, SIGTERM);
        asked = asked || trainer_interrupted;
    }
    char text[24];
    int code = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
    /* The board is free before anybody can read that the run has ended: what comes next is not refused. */
    (void)ftruncate(place->lock, 0);
    (void)flock(place->lock, LOCK_UN);
    snprintf(text, sizeof text, "%d\n", code);
    (void)keep(place, "exit", text, &ignored); /* a disk that is full here was so for the run's own events */
    return code;
}

/* In the watcher: begins the run, of which `ready` is told when it has signed. */
static taste_status begin(const run_place *place, int ready, int *out_is_run, int *out_exit_code,
                          taste_error *error) {
    char path[IO_PATH_BYTES];
    name_file(place, "exit", path);
    if (unlink(path) != 0 && errno != ENOENT) return io_failed("remove", path, error);
    pid_t run = fork();
    if (run < 0) return io_failed("begin a process in", place->folder, error);
    *out_is_run = run == 0;
    if (run > 0) {
        if (ready >= 0) close(ready);
        *out_exit_code = watch(place, run);
        return TASTE_STATUS_OK;
    }
    taste_status status = sign(place, error);
    redirect(place);
    if (ready < 0) return status;
    if (status == TASTE_STATUS_OK && write(ready, "+", 1) != 1) status = io_failed("tell who began", place->folder, error);
    close(ready);
    return status;
}

/* In the process that was called: waits until the run has signed. */
static taste_status await(const run_place *place, int ready, taste_error *error) {
    char byte;
    ssize_t got;
    while ((got = read(ready, &byte, 1)) < 0 && errno == EINTR) continue;
    close(ready);
    if (got == 1) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_IO, "the run in %.160s did not begin. Look at its file messages.",
                      place->folder);
}

/* In the process that was called: gives on what the run says, up to the end of its watcher and so of itself. */
static taste_status relay(const run_place *place, pid_t watcher, int *out_exit_code, taste_error *error) {
    const struct timespec moment = {.tv_nsec = 20000000};
    char path[IO_PATH_BYTES], block[4096];
    name_file(place, "events.jsonl", path);
    int events = open(path, O_RDONLY | O_CLOEXEC), state = 0;
    if (events < 0 || lseek(events, place->said, SEEK_SET) < 0) return io_failed("read", path, error);
    pid_t ended = 0;
    while (!trainer_interrupted) {
        ssize_t got = read(events, block, sizeof block);
        if (got > 0 && fwrite(block, 1, (size_t)got, stdout) == (size_t)got && fflush(stdout) == 0) continue;
        if (got > 0 || ended != 0) break; /* nobody listens any more, or everything was said */
        ended = waitpid(watcher, &state, WNOHANG);
        if (ended == 0) (void)nanosleep(&moment, NULL);
    }
    close(events);
    *out_exit_code = ended > 0 && WIFEXITED(state) ? WEXITSTATUS(state) : TASTE_STATUS_INTERRUPTED;
    return TASTE_STATUS_OK;
}

static taste_status start_in_background(const run_place *place, detached_caller caller, int *out_is_run,
                                        int *out_exit_code, taste_error *error) {
    int ends[2];
    if (pipe(ends) != 0) return io_failed("begin a process in", place->folder, error);
    pid_t watcher = fork();
    if (watcher < 0) return io_failed("begin a process in", place->folder, error);
    if (watcher > 0) {
        close(ends[1]);
        taste_status status = await(place, ends[0], error);
        if (status != TASTE_STATUS_OK) return status;
        json_begin("started");
        json_text("run", place->name);
        json_end();
        return caller == CALLER_FOLLOWS ? relay(place, watcher, out_exit_code, error) : status;
    }
    close(ends[0]);
    (void)setsid();
    (void)signal(SIGHUP, SIG_IGN);
    redirect(place);
    taste_status status = begin(place, ends[1], out_is_run, out_exit_code, error);
    if (*out_is_run || status != TASTE_STATUS_OK) return status;
    _exit(*out_exit_code); /* nothing is to be said on the run's own outputs */
}

taste_status detached_start(const char *folder, detached_caller caller, int *out_is_run, int *out_exit_code,
                            taste_error *error) {
    run_place place;
    *out_is_run = *out_exit_code = 0;
    taste_status status = open_place(folder, &place, error);
    if (status != TASTE_STATUS_OK) return status;
    if (caller == CALLER_WATCHES) return begin(&place, -1, out_is_run, out_exit_code, error);
    return start_in_background(&place, caller, out_is_run, out_exit_code, error);
}
