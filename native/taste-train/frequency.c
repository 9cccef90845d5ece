#include "frequency.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "error.h"
#include "io.h"

enum { TEXT_BYTES = 2048, STEP_KHZ = 100000, SETTLE_TRIES = 50 };

static const char folder[] = "/sys/devices/system/cpu/cpufreq";

/* What this process set, if it did. */
static struct {
    const char *root;
    int lock; /* -1: nothing was set */
    uint32_t count;
    frequency_policy before[FREQUENCY_POLICIES];
} held = {.lock = -1};

static size_t read_file(const char *root, uint32_t policy, const char *file, char out[TEXT_BYTES]) {
    char path[128];
    snprintf(path, sizeof path, "%s/policy%u/%s", folder, policy, file);
    size_t used = io_read_text(root, path, out, TEXT_BYTES);
    while (used > 0 && (out[used - 1] == '\n' || out[used - 1] == ' ')) out[--used] = 0;
    return used;
}

static uint64_t read_khz(const char *root, uint32_t policy, const char *file) {
    char text[TEXT_BYTES];
    return read_file(root, policy, file, text) > 0 ? strtoull(text, NULL, 10) : 0;
}

static int has_word(const char *text, const char *word) {
    size_t length = strlen(word);
    for (const char *at = strstr(text, word); at != NULL; at = strstr(at + 1, word)) {
        if ((at == text || at[-1] == ' ') && (at[length] == 0 || at[length] == ' ')) return 1;
    }
    return 0;
}

static int by_khz(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void list_steps(const char *root, frequency_policy *p) {
    char text[TEXT_BYTES];
    uint64_t lowest = read_khz(root, p->number, "cpuinfo_min_freq");
    uint64_t highest = read_khz(root, p->number, "cpuinfo_max_freq");
    p->exact = read_file(root, p->number, "scaling_available_frequencies", text) > 0;
    for (char *word = p->exact ? strtok(text, " ") : NULL; word != NULL && p->count < FREQUENCY_STEPS;
         word = strtok(NULL, " ")) {
        p->steps[p->count++] = strtoull(word, NULL, 10);
    }
    for (uint64_t khz = lowest; !p->exact && khz > 0 && khz < highest && p->count + 1 < FREQUENCY_STEPS;
         khz = (khz / STEP_KHZ + 1) * STEP_KHZ) {
        p->steps[p->count++] = khz;
    }
    if (!p->exact && highest > 0) p->steps[p->count++] = highest;
    qsort(p->steps, p->count, sizeof *p->steps, by_khz);
}

static int read_policy(const char *root, uint32_t number, frequency_policy *out) {
    char text[TEXT_BYTES];
    *out = (frequency_policy){.number = number};
    if (read_file(root, number, "scaling_governor", text) == 0) return 0;
    snprintf(out->governor, sizeof out->governor, "%.60s", text);
    out->lowest = read_khz(root, number, "scaling_min_freq");
    out->highest = read_khz(root, number, "scaling_max_freq");
    out->current = read_khz(root, number, "scaling_cur_freq");
    if (read_file(root, number, "scaling_available_governors", text) > 0)
        out->has_userspace = has_word(text, "userspace");
    if (strcmp(out->governor, "userspace") == 0) out->setspeed = read_khz(root, number, "scaling_setspeed");
    if (read_file(root, number, "affected_cpus", text) > 0) snprintf(out->cores, sizeof out->cores, "%.60s", text);
    list_steps(root, out);
    return 1;
}

uint32_t frequency_policies(const char *root, frequency_policy *out) {
    uint32_t count = 0;
    for (uint32_t number = 0; number < 1024 && count < FREQUENCY_POLICIES; number++)
        count += (uint32_t)read_policy(root, number, &out[count]);
    return count;
}

/* Writing */

static taste_status write_word(const char *root, uint32_t policy, const char *file, const char *word,
                               taste_error *error) {
    char path[IO_PATH_BYTES];
    snprintf(path, sizeof path, "%.3800s%s/policy%u/%s", root, folder, policy, file);
    int out = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
    ssize_t done = out >= 0 ? write(out, word, strlen(word)) : -1;
    int reason = errno;
    if (out >= 0) close(out);
    if (done >= 0) return TASTE_STATUS_OK;
    if (reason == EACCES || reason == EPERM || reason == EROFS) {
        return taste_fail(error, TASTE_STATUS_IO,
                          "%s cannot be written (%s). Give your user the right to it: docs/power.md, \"Rights\".", path,
                          strerror(reason));
    }
    return taste_fail(error, TASTE_STATUS_IO, "%s does not take '%s' (%s). Use a frequency that `info` lists.", path,
                      word, strerror(reason));
}

static taste_status write_khz(const char *root, uint32_t policy, const char *file, uint64_t khz, taste_error *error) {
    char word[32];
    snprintf(word, sizeof word, "%" PRIu64, khz);
    return write_word(root, policy, file, word, error);
}

/* The lower limit may at no time be above the upper one. */
static taste_status write_limits(const char *root, uint32_t policy, uint64_t lowest, uint64_t highest,
                                 taste_error *error) {
    int up = highest >= read_khz(root, policy, "scaling_max_freq");
    taste_status status = up ? write_khz(root, policy, "scaling_max_freq", highest, error) : TASTE_STATUS_OK;
    if (status == TASTE_STATUS_OK) status = write_khz(root, policy, "scaling_min_freq", lowest, error);
    if (status == TASTE_STATUS_OK && !up) status = write_khz(root, policy, "scaling_max_freq", highest, error);
    return status;
}

static taste_status put_back(const char *root, const frequency_policy *p, taste_error *error) {
    taste_status status = write_limits(root, p->number, p->lowest, p->highest, error);
    taste_status other = write_word(root, p->number, "scaling_governor", p->governor, error);
    if (other == TASTE_STATUS_OK && p->setspeed > 0)
        other = write_khz(root, p->number, "scaling_setspeed", p->setspeed, error);
    return status != TASTE_STATUS_OK ? status : other;
}

static uint64_t step_for(const frequency_policy *p, uint64_t khz) {
    uint64_t chosen = p->count > 0 ? p->steps[0] : khz;
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->steps[i] <= khz) chosen = p->steps[i];
    }
    return chosen;
}

/* Within 1 %: kernels round what they read back. */
static taste_status await(const char *root, uint32_t policy, uint64_t khz, taste_error *error) {
    uint64_t now = 0;
    for (int tries = 0; tries < SETTLE_TRIES; tries++) {
        now = read_khz(root, policy, "scaling_cur_freq");
        uint64_t apart = now > khz ? now - khz : khz - now;
        if (apart <= khz / 100) return TASTE_STATUS_OK;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return taste_fail(error, TASTE_STATUS_UNSTABLE,
                      "policy%u runs at %" PRIu64 " kHz, not at the %" PRIu64
                      " asked for: heat or supply caps it. Cool the board, or use a lower frequency.",
                      policy, now, khz);
}

static taste_status set_policy(const char *root, const frequency_policy *before, uint64_t khz, taste_error *error) {
    uint32_t n = before->number;
    khz = step_for(before, khz);
    taste_status status;
    if (before->has_userspace) {
        uint64_t lowest = khz < before->lowest ? khz : before->lowest;
        status = write_limits(root, n, lowest, khz > before->highest ? khz : before->highest, error);
        if (status == TASTE_STATUS_OK) status = write_word(root, n, "scaling_governor", "userspace", error);
        if (status == TASTE_STATUS_OK) status = write_khz(root, n, "scaling_setspeed", khz, error);
    } else {
        status = write_limits(root, n, khz, khz, error);
    }
    return status == TASTE_STATUS_OK ? await(root, n, khz, error) : status;
}

/* The file that outlives a killed process */

static int state_path(const char *root, const char *name, char out[IO_PATH_BYTES]) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    const char *base = state != NULL && state[0] == '/' ? state : home, *below = base == state ? "" : "/.local/state";
    if (base == NULL || base[0] != '/') return 0;
    return snprintf(out, IO_PATH_BYTES, "%s%s%s/taste-edge/%s", root, base, below, name) < IO_PATH_BYTES;
}

static void make_folders(const char *path) {
    char part[IO_PATH_BYTES];
    snprintf(part, sizeof part, "%s", path);
    for (char *at = strchr(part + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        *at = 0;
        (void)mkdir(part, 0777);
        *at = '/';
    }
}

/* -1: another process holds it, or it cannot be made; errno says which. */
static int take_lock(const char *root) {
    char path[IO_PATH_BYTES];
    taste_error ignored;
    int file = -1;
    errno = ENOENT;
    if (!state_path(root, "frequency.lock", path)) return -1;
    make_folders(path);
    if (io_open_lock(path, &file, &ignored) == TASTE_STATUS_OK) return file;
    int reason = errno;
    if (file >= 0) close(file);
    errno = reason;
    return -1;
}

static void read_boot(const char *root, char out[FREQUENCY_WORD_BYTES]) {
    if (io_read_text(root, "/proc/sys/kernel/random/boot_id", out, FREQUENCY_WORD_BYTES) == 0) strcpy(out, "unknown");
    out[strcspn(out, "\n")] = 0;
}

static taste_status write_state(const char *root, taste_error *error) {
#ifdef TASTE_PLANT_NO_FREQUENCY_STATE
    (void)root, (void)error;
    return TASTE_STATUS_OK;
#else
    char path[IO_PATH_BYTES], boot[FREQUENCY_WORD_BYTES], text[4096];
    read_boot(root, boot);
    int used = snprintf(text, sizeof text, "taste-frequency 1 %s\n", boot);
    for (uint32_t i = 0; i < held.count; i++) {
        const frequency_policy *p = &held.before[i];
        used += snprintf(text + used, sizeof text - (size_t)used, "%u %s %" PRIu64 " %" PRIu64 " %" PRIu64 "\n",
                         p->number, p->governor, p->lowest, p->highest, p->setspeed);
    }
    (void)state_path(root, "frequency", path);
    return io_write_text(path, text, error);
#endif
}

static void remove_state(const char *root) {
    char path[IO_PATH_BYTES];
    if (state_path(root, "frequency", path)) (void)io->unlink(path);
}

int frequency_repair(const char *root, taste_error *error) {
    char path[IO_PATH_BYTES], text[4096], boot[FREQUENCY_WORD_BYTES], then[FREQUENCY_WORD_BYTES];
    int found = 0;
    if (held.lock >= 0 || !state_path(root, "frequency", path) || io_read_text("", path, text, sizeof text) == 0)
        return 0;
    int lock = take_lock(root);
    if (lock < 0) return 0; /* its holder lives */
    read_boot(root, boot);
    int same = sscanf(text, "taste-frequency 1 %63s", then) == 1 && strcmp(boot, then) == 0;
    taste_status status = TASTE_STATUS_OK;
    for (const char *line = strchr(text, '\n'); same && line != NULL && line[1] != 0; line = strchr(line + 1, '\n')) {
        frequency_policy p = {0};
        if (sscanf(line + 1, "%u %63s %" SCNu64 " %" SCNu64 " %" SCNu64, &p.number, p.governor, &p.lowest, &p.highest,
                   &p.setspeed) != 5)
            continue;
        taste_status one = put_back(root, &p, error);
        if (one != TASTE_STATUS_OK) status = one;
        found = 1;
    }
    if (status == TASTE_STATUS_OK) (void)io->unlink(path);
    close(lock);
    return found;
}

/* What killed processes had begun to write; to be called with the lock. */
static void remove_parts(const char *root) {
    char pattern[IO_PATH_BYTES];
    glob_t found;
    if (!state_path(root, "frequency.*.part", pattern) || glob(pattern, 0, NULL, &found) != 0) return;
    for (size_t i = 0; i < found.gl_pathc; i++) (void)io->unlink(found.gl_pathv[i]);
    globfree(&found);
}

static taste_status begin(const char *root, taste_error *error) {
    held.count = frequency_policies(root, held.before);
    if (held.count == 0) {
        return taste_fail(error, TASTE_STATUS_INCOMPATIBLE,
                          "this kernel has no cpufreq (%s%s), so no frequency can be set. Leave --frequency out.", root,
                          folder);
    }
    held.root = root;
    held.lock = take_lock(root);
    if (held.lock >= 0) {
        remove_parts(root);
        return write_state(root, error);
    }
    if (errno == EWOULDBLOCK) {
        return taste_fail(error, TASTE_STATUS_BUSY,
                          "another taste-train on this board sets the frequency. Wait for it, or stop it.");
    }
    return taste_fail(error, TASTE_STATUS_IO,
                      "no place for what the frequency was before ($HOME/.local/state/taste-edge: %s). Set HOME to a "
                      "folder that can be written.",
                      strerror(errno));
}

taste_status frequency_set(const char *root, uint64_t khz, taste_error *error) {
    taste_status status = held.lock < 0 ? begin(root, error) : TASTE_STATUS_OK;
    for (uint32_t i = 0; status == TASTE_STATUS_OK && i < held.count; i++)
        status = set_policy(root, &held.before[i], khz, error);
    return status;
}

taste_status frequency_restore(taste_error *error) {
    taste_status status = TASTE_STATUS_OK;
    if (held.lock < 0) return status;
    for (uint32_t i = 0; i < held.count; i++) {
        taste_status one = put_back(held.root, &held.before[i], error);
        if (one != TASTE_STATUS_OK) status = one;
    }
    if (status == TASTE_STATUS_OK) remove_state(held.root);
    close(held.lock);
    held.lock = -1;
    return status;
}
