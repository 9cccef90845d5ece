#include "taint.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "memory.h"
#include "sensors.h"
#include "taste.h"

enum { TEXT_BYTES = 16384 };

static uint64_t read_number(const char *root, const char *path) {
    char text[64];
    return io_read_text(root, path, text, sizeof text) > 0 ? strtoull(text, NULL, 10) : 0;
}

/* Second number of every task's schedstat: time spent runnable but not running. */
static uint64_t waiting_ns(const char *root) {
    char path[512], text[128];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "%.200s/proc/self/task", root);
    DIR *tasks = opendir(path);
    if (tasks == NULL) return 0;
    for (struct dirent *task = readdir(tasks); task != NULL; task = readdir(tasks)) {
        if (task->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/self/task/%.32s/schedstat", task->d_name);
        if (io_read_text(root, path, text, sizeof text) == 0) continue;
        const char *second = strchr(text, ' ');
        if (second != NULL) sum += strtoull(second, NULL, 10);
    }
    closedir(tasks);
    return sum;
}

static uint64_t throttle_count(const char *root) {
    char path[128];
    uint64_t sum = 0;
    for (uint32_t core = 0; core < TASTE_MAX_THREADS; core++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/thermal_throttle/core_throttle_count", core);
        char text[64];
        if (io_read_text(root, path, text, sizeof text) == 0) break;
        sum += strtoull(text, NULL, 10);
    }
    return sum;
}

void taint_read(const char *root, taint_counters *out) {
    static char text[TEXT_BYTES];
    *out = (taint_counters){0};
    if (io_read_text(root, "/proc/vmstat", text, sizeof text) > 0) {
        (void)memory_find_number(text, "pswpin", &out->pages_swapped_in);
    }
    out->waiting_ns = waiting_ns(root);
    int64_t bits = sensors_throttle_bits(root);
    out->throttle_bits = bits > 0 ? (uint64_t)bits : 0;
    out->throttle_count = throttle_count(root);
    out->frequency_khz = read_number(root, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq");
}

int taint_judge(const taint_counters *before, const taint_counters *after, double elapsed_s, uint32_t threads,
                char out_text[TAINT_TEXT_BYTES]) {
    double waited = (double)(after->waiting_ns - before->waiting_ns) * 1e-9;
    double share = elapsed_s > 0 && after->waiting_ns > before->waiting_ns ? waited / (elapsed_s * threads) : 0;
    uint64_t now = after->throttle_bits & 0xf, since = (after->throttle_bits & ~before->throttle_bits) >> 16 & 0xf;
    if (now != 0 || since != 0) {
        snprintf(out_text, TAINT_TEXT_BYTES, "throttled: firmware bits 0x%llx",
                 (unsigned long long)after->throttle_bits);
    } else if (after->throttle_count > before->throttle_count) {
        snprintf(out_text, TAINT_TEXT_BYTES, "throttled by heat %llu times",
                 (unsigned long long)(after->throttle_count - before->throttle_count));
    } else if ((double)after->frequency_khz < 0.9 * (double)before->frequency_khz) {
        snprintf(out_text, TAINT_TEXT_BYTES, "CPU frequency fell from %llu to %llu kHz",
                 (unsigned long long)before->frequency_khz, (unsigned long long)after->frequency_khz);
    } else if (after->pages_swapped_in > before->pages_swapped_in) {
        snprintf(out_text, TAINT_TEXT_BYTES, "%llu pages swapped in",
                 (unsigned long long)(after->pages_swapped_in - before->pages_swapped_in));
    } else if (share > 0.1) {
        snprintf(out_text, TAINT_TEXT_BYTES, "another load: %.0f %% of the time was spent waiting for a core",
                 share * 100);
    } else {
        out_text[0] = 0;
        return 0;
    }
    return 1;
}

int taint_is_emulated(const char *root) {
    static char text[TEXT_BYTES];
#if defined(__x86_64__)
    const char *ours = "x86_64", *foreign = "CPU implementer";
#elif defined(__aarch64__)
    const char *ours = "aarch64", *foreign = "vendor_id";
#else
    const char *ours = "riscv64", *foreign = "vendor_id";
#endif
    /* The emulator answers uname itself, but passes these files of the host through. */
    if (io_read_text(root, "/proc/sys/kernel/arch", text, sizeof text) > 0)
        return strncmp(text, ours, strlen(ours)) != 0;
    return io_read_text(root, "/proc/cpuinfo", text, sizeof text) > 0 && strstr(text, foreign) != NULL;
}
