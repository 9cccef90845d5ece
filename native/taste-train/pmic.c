#include "pmic.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "error.h"
#include "io.h"

enum { ANSWER_BYTES = 4096, ANSWER_MS = 2000, RAILS = 32, RAIL_BYTES = 32 };

static const char tool[] = "/usr/bin/vcgencmd";
extern char **environ;

/* All that comes, with at most ANSWER_MS between two parts; 0: it did not end by itself, or said nothing. */
static size_t read_answer(int file, char *out, size_t capacity) {
    size_t used = 0;
    int ended = 0;
    struct pollfd wait = {.fd = file, .events = POLLIN};
    while (!ended && used + 1 < capacity && poll(&wait, 1, ANSWER_MS) > 0) {
        ssize_t got = read(file, out + used, capacity - 1 - used);
        if (got < 0 && errno == EINTR) continue;
        ended = got <= 0;
        used += got > 0 ? (size_t)got : 0;
    }
    out[used] = 0;
    return ended ? used : 0;
}

/* 1: the tool ran to its end and printed something. */
static int ask(const char *root, char out[ANSWER_BYTES]) {
    char path[IO_PATH_BYTES];
    char *const words[] = {path, (char *)(uintptr_t) "pmic_read_adc", NULL};
    int ends[2], status = 1;
    pid_t child;
    posix_spawn_file_actions_t actions;
    if (snprintf(path, sizeof path, "%s%s", root, tool) >= (int)sizeof path || access(path, X_OK) != 0) return 0;
    if (pipe2(ends, O_CLOEXEC) != 0) return 0;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    int failed = posix_spawn(&child, path, &actions, NULL, words, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    size_t used = failed == 0 ? read_answer(ends[0], out, ANSWER_BYTES) : 0;
    close(ends[0]);
    if (failed != 0) return 0;
    if (used == 0) kill(child, SIGKILL);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return used > 0 && status == 0;
}

/* Lines such as "  VDD_CORE_A current(7)=1.52340000A" and "  VDD_CORE_V volt(15)=0.72034030V". */
double pmic_sum(const char *text) {
    char names[RAILS][RAIL_BYTES];
    double amperes[RAILS], sum = 0;
    uint32_t count = 0, used = 0;
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += strspn(line, " \n");
        char name[RAIL_BYTES], what[8];
        double value;
        if (sscanf(line, "%31s %7[a-z](%*d)=%lf", name, what, &value) != 3 || strlen(name) < 3) continue;
        name[strlen(name) - 2] = 0;
        if (strcmp(what, "current") == 0 && count < RAILS) {
            memcpy(names[count], name, sizeof name);
            amperes[count++] = value;
        }
        for (uint32_t i = 0; strcmp(what, "volt") == 0 && i < count; i++) {
            if (strcmp(names[i], name) != 0) continue;
            sum += amperes[i] * value;
            used++;
        }
    }
    return used > 0 ? sum : NAN;
}

int pmic_exists(const char *root) {
    char text[ANSWER_BYTES];
    return ask(root, text) && !isnan(pmic_sum(text));
}

taste_status pmic_watts(const char *root, double *out_watts, taste_error *error) {
    char text[ANSWER_BYTES];
    *out_watts = NAN;
    if (ask(root, text)) *out_watts = pmic_sum(text);
    if (!isnan(*out_watts)) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_IO,
                      "%s pmic_read_adc gave no rail with volts and amperes. Run it by hand, and look at its rights.",
                      tool);
}
