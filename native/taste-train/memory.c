#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io.h"

enum { TEXT_BYTES = 8192 };

int memory_find_number(const char *text, const char *key, uint64_t *out_number) {
    size_t length = strlen(key);
    for (const char *line = text; *line != 0; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, key, length) != 0 || line[length] == 0 || strchr(": \t", line[length]) == NULL) continue;
        line += length;
        while (*line == ':' || *line == ' ' || *line == '\t') line++;
        *out_number = strtoull(line, NULL, 10);
        return 0;
    }
    return -1;
}

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static int read_number(const char *root, const char *path, uint64_t *out_number) {
    char text[64];
    if (io_read_text(root, path, text, sizeof text) == 0 || text[0] < '0' || text[0] > '9') return -1;
    *out_number = strtoull(text, NULL, 10);
    return 0;
}

/* What one control group leaves: limit - usage + page cache that it can give back. */
static uint64_t group_leaves(const char *root, const char *folder, const char *limit_file, const char *usage_file) {
    char path[1024], text[TEXT_BYTES];
    uint64_t limit, usage, cache = 0;
    snprintf(path, sizeof path, "%s/%s", folder, limit_file);
    if (read_number(root, path, &limit) != 0) return UINT64_MAX; /* no such file, or "max" */
    snprintf(path, sizeof path, "%s/%s", folder, usage_file);
    if (read_number(root, path, &usage) != 0) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    if (io_read_text(root, path, text, sizeof text) > 0) (void)memory_find_number(text, "inactive_file", &cache);
    uint64_t held = usage > cache ? usage - cache : 0;
    return limit > held ? limit - held : 0;
}

/* The tightest group from ours up to the root of the hierarchy. */
static uint64_t hierarchy_leaves(const char *root, const char *mount, char *group, const char *limit_file,
                                 const char *usage_file) {
    char folder[900];
    uint64_t least = UINT64_MAX;
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", mount, strcmp(group, "/") == 0 ? "" : group);
        least = smaller(least, group_leaves(root, folder, limit_file, usage_file));
        char *slash = strrchr(group, '/');
        if (slash == NULL || group[1] == 0) return least;
        *(slash == group ? slash + 1 : slash) = 0;
    }
}

/* Copies the path after `prefix` of a line of /proc/self/cgroup ("0::/a/b", "4:memory:/a/b"). */
static int find_group(const char *text, const char *marker, char *out_group, size_t capacity) {
    const char *found = strstr(text, marker);
    if (found == NULL) return -1;
    found += strlen(marker);
    size_t length = strcspn(found, "\n");
    if (length == 0 || length >= capacity || *found != '/') return -1;
    memcpy(out_group, found, length);
    out_group[length] = 0;
    return 0;
}

static uint64_t groups_leave(const char *root) {
    char text[TEXT_BYTES], group[800];
    uint64_t least = UINT64_MAX;
    if (io_read_text(root, "/proc/self/cgroup", text, sizeof text) == 0) return least;
    if (find_group(text, "0::", group, sizeof group) == 0) {
        least = hierarchy_leaves(root, "/sys/fs/cgroup", group, "memory.max", "memory.current");
    }
    if (find_group(text, ":memory:", group, sizeof group) == 0) {
        least = smaller(least, hierarchy_leaves(root, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                                                "memory.usage_in_bytes"));
    }
    return least;
}

static uint64_t limits_leave(void) {
    static const int kinds[] = {RLIMIT_AS, RLIMIT_DATA};
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 2; i++) {
        struct rlimit limit;
        if (getrlimit(kinds[i], &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) least = smaller(least, limit.rlim_cur);
    }
    return least;
}

uint64_t memory_available_bytes(const char *root) {
    char text[TEXT_BYTES];
    uint64_t available, least = UINT64_MAX;
    if (io_read_text(root, "/proc/meminfo", text, sizeof text) > 0 &&
        memory_find_number(text, "MemAvailable", &available) == 0) {
        least = available * 1024;
    }
    return smaller(smaller(least, groups_leave(root)), limits_leave());
}

static uint64_t status_bytes(const char *key) {
    char text[TEXT_BYTES];
    uint64_t kib = 0;
    if (io_read_text("", "/proc/self/status", text, sizeof text) > 0) (void)memory_find_number(text, key, &kib);
    return kib * 1024;
}

uint64_t memory_peak_bytes(void) {
    return status_bytes("VmHWM");
}

uint64_t memory_resident_bytes(void) {
    return status_bytes("VmRSS");
}

void memory_volunteer(void) {
    int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (file < 0) return;
    ssize_t ignored = write(file, "1000", 4); /* not allowed everywhere, and nothing depends on it */
    (void)ignored;
    close(file);
}
