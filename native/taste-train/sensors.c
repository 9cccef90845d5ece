#include "sensors.h"

#include <ctype.h>
#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "clock.h"
#include "error.h"
#include "io.h"
#include "pmic.h"

enum { TEXT_BYTES = 128, CHIPS = 64, INPUTS = 16 };

/* The first line of a small file; 0: there is none. */
static int read_line(const char *root, const char *path, char out[TEXT_BYTES]) {
    if (io_read_text(root, path, out, TEXT_BYTES) == 0) return 0;
    out[strcspn(out, "\n")] = 0;
    return out[0] != 0;
}

static taste_status read_count(const char *root, const char *path, double *out, taste_error *error) {
    char text[TEXT_BYTES], *end;
    errno = ENODATA;
    if (!read_line(root, path, text)) {
        return taste_fail(error, TASTE_STATUS_IO,
                          "power sensor %.160s cannot be read (%s). Look at the board's sensor and its driver.", path,
                          strerror(errno));
    }
    errno = 0;
    *out = (double)strtoll(text, &end, 10);
    if (end != text && *end == 0 && errno == 0) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_IO,
                      "power sensor %.160s holds '%.40s', no number. Look at the board's sensor and its driver.", path,
                      text);
}

static int exists(const char *root, const char *path) {
    char text[TEXT_BYTES];
    return read_line(root, path, text);
}

/* Formats into a path of a sensor; 0: too long. */
static int make_path(char out[SENSOR_PATH_BYTES], const char *folder, const char *before, uint32_t number,
                     const char *after) {
    return snprintf(out, SENSOR_PATH_BYTES, "%s/%s%u%s", folder, before, number, after) < SENSOR_PATH_BYTES;
}

static sensor *next_rail(sensors *s, sensor_kind kind, double scale) {
    if (s->count == SENSORS_MOST) return NULL;
    sensor *rail = &s->rails[s->count];
    memset(rail, 0, sizeof *rail);
    rail->kind = kind;
    rail->scale = scale;
    return rail;
}

static void keep_rail(sensors *s, sensor *rail, const char *source, const char *label_path, const char *otherwise) {
    char text[TEXT_BYTES];
    if (!read_line(s->root, label_path, text)) snprintf(text, sizeof text, "%s", otherwise);
    snprintf(rail->name, sizeof rail->name, "%.40s", text);
    snprintf(s->source, sizeof s->source, "%s", source);
    s->count++;
}

/* Millivolts times milliamperes are microwatts, not milliwatts. */
static void find_product(sensors *s, const char *source, const char *folder, uint32_t number, const char *const names[4],
                         const char *label) {
    char label_path[SENSOR_PATH_BYTES];
    sensor *rail = next_rail(s, SENSOR_PRODUCT, 1e-6);
    if (rail == NULL || !make_path(rail->path, folder, names[0], number, names[1]) ||
        !make_path(rail->other, folder, names[2], number, names[3]) ||
        !make_path(label_path, folder, label, number, strncmp(label, "rail", 4) == 0 ? "" : "_label"))
        return;
    if (!exists(s->root, rail->path) || !exists(s->root, rail->other)) return;
    keep_rail(s, rail, source, label_path, "rail");
}

/* NVIDIA's kernel for the Jetson Nano and TX2: iio devices below the driver. */
static void find_iio(sensors *s) {
    static const char *const names[4] = {"in_voltage", "_input", "in_current", "_input"};
    char pattern[SENSOR_PATH_BYTES];
    glob_t found;
    if (snprintf(pattern, sizeof pattern, "%s/sys/bus/i2c/drivers/ina3221x/*/iio:device*", s->root) >=
            (int)sizeof pattern ||
        glob(pattern, 0, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char *folder = found.gl_pathv[i] + strlen(s->root);
        for (uint32_t n = 0; n < 3; n++) find_product(s, "ina3221", folder, n, names, "rail_name_");
    }
    globfree(&found);
}

/* One input of one hwmon chip, if it is of the wanted kind. */
static void find_input(sensors *s, const char *source, const char *folder, const char *file, uint32_t number) {
    char label[SENSOR_PATH_BYTES];
    int energy = strcmp(file, "energy") == 0;
    sensor *rail = next_rail(s, energy ? SENSOR_ENERGY : SENSOR_POWER, 1e-6);
    if (rail == NULL || !make_path(rail->path, folder, file, number, "_input") ||
        !make_path(label, folder, file, number, "_label") || !exists(s->root, rail->path))
        return;
    keep_rail(s, rail, source, label, file);
}

static void find_hwmon(sensors *s, const char *source) {
    static const char *const names[4] = {"in", "_input", "curr", "_input"};
    for (uint32_t chip = 0; chip < CHIPS; chip++) {
        char folder[64], path[SENSOR_PATH_BYTES], name[TEXT_BYTES];
        snprintf(folder, sizeof folder, "/sys/class/hwmon/hwmon%u", chip);
        snprintf(path, sizeof path, "%s/name", folder);
        if (!read_line(s->root, path, name)) continue;
        for (uint32_t n = 1; n < INPUTS; n++) {
            if (strcmp(source, "ina") != 0)
                find_input(s, source, folder, strcmp(source, "energy") == 0 ? "energy" : "power", n);
            else if (strncmp(name, "ina", 3) == 0)
                find_product(s, source, folder, n, names, "in");
        }
    }
}

/* Packages only: their cores and memory are parts of them. */
static void find_rapl(sensors *s) {
    for (uint32_t n = 0; n < SENSORS_MOST; n++) {
        char label[SENSOR_PATH_BYTES];
        sensor *rail = next_rail(s, SENSOR_ENERGY, 1e-6);
        if (rail == NULL) return;
        make_path(rail->path, "/sys/class/powercap", "intel-rapl:", n, "/energy_uj");
        make_path(rail->other, "/sys/class/powercap", "intel-rapl:", n, "/max_energy_range_uj");
        make_path(label, "/sys/class/powercap", "intel-rapl:", n, "/name");
        if (exists(s->root, rail->path)) keep_rail(s, rail, "rapl", label, "package");
    }
}

static int is_input_rail(const char *name) {
    size_t length = strlen(name);
    return length > 3 && strcasecmp(name + length - 3, "_IN") == 0;
}

/* Jetsons measure the input of the board and some of what hangs on it: the sum would count that twice. */
static void prefer_input_rail(sensors *s) {
    for (uint32_t i = 0; i < s->count; i++) {
        if (!is_input_rail(s->rails[i].name)) continue;
        s->rails[0] = s->rails[i];
        s->count = 1;
    }
}

void sensors_find(const char *root, sensors *out) {
    memset(out, 0, sizeof *out);
    out->root = root;
    find_iio(out);
    if (out->count == 0) find_hwmon(out, "ina");
    if (out->count == 0) find_hwmon(out, "hwmon");
    if (out->count == 0) find_hwmon(out, "energy");
    prefer_input_rail(out);
    if (out->count == 0 && pmic_exists(root)) snprintf(out->source, sizeof out->source, "pmic");
    if (out->source[0] == 0) find_rapl(out);
}

static taste_status read_rail(sensors *s, sensor *rail, double seconds, double *sum, taste_error *error) {
    double value, other = 0, range;
    taste_status status = read_count(s->root, rail->path, &value, error);
    if (status == TASTE_STATUS_OK && rail->kind == SENSOR_PRODUCT)
        status = read_count(s->root, rail->other, &other, error);
    if (status != TASTE_STATUS_OK) return status;
    if (rail->kind == SENSOR_PRODUCT) value *= other;
    value *= rail->scale;
    if (rail->kind != SENSOR_ENERGY) {
        *sum += value;
        return TASTE_STATUS_OK;
    }
    double joules = value - rail->last;
    /* The counter started again from 0. */
    if (joules < 0 && rail->other[0] != 0 && read_count(s->root, rail->other, &range, error) == TASTE_STATUS_OK)
        joules += range * rail->scale;
    rail->last = value;
    *sum += seconds > 0 && joules >= 0 ? joules / seconds : NAN;
    return TASTE_STATUS_OK;
}

taste_status sensors_watts(sensors *s, double *out_watts, taste_error *error) {
    uint64_t now = taste_now_ns();
    double seconds = s->last_ns > 0 ? (double)(now - s->last_ns) * 1e-9 : 0, sum = 0;
    *out_watts = NAN;
    if (s->source[0] == 0) return TASTE_STATUS_OK;
    if (s->count == 0) return pmic_watts(s->root, out_watts, error);
    for (uint32_t i = 0; i < s->count; i++) {
        taste_status status = read_rail(s, &s->rails[i], seconds, &sum, error);
        if (status != TASTE_STATUS_OK) return status;
    }
    s->last_ns = now;
    *out_watts = sum;
    return TASTE_STATUS_OK;
}

/* A zone of the CPU if there is one, else the first. (A Jetson's PMIC zone always says 100.) */
double sensors_temperature(const char *root) {
    double first = NAN;
    for (uint32_t zone = 0; zone < CHIPS; zone++) {
        char path[64], type[TEXT_BYTES], text[TEXT_BYTES], *end;
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%u/temp", zone);
        /* A zone that is switched off has a file that cannot be read. */
        if (!read_line(root, path, text)) continue;
        double degrees = (double)strtol(text, &end, 10) * 1e-3;
        if (end == text) continue;
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%u/type", zone);
        if (read_line(root, path, type)) {
            for (char *c = type; *c != 0; c++) *c = (char)tolower((unsigned char)*c);
            if (strstr(type, "cpu") != NULL) return degrees;
            if (strstr(type, "pmic") != NULL) continue;
        }
        if (isnan(first)) first = degrees;
    }
    return first;
}

uint64_t sensors_frequency(const char *root) {
    uint64_t highest = 0;
    for (uint32_t policy = 0; policy < CHIPS; policy++) {
        char path[96], text[TEXT_BYTES];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpufreq/policy%u/scaling_cur_freq", policy);
        uint64_t khz = read_line(root, path, text) ? strtoull(text, NULL, 10) : 0;
        if (khz > highest) highest = khz;
    }
    return highest;
}

int64_t sensors_throttle_bits(const char *root) {
    char text[TEXT_BYTES];
    if (!read_line(root, "/sys/devices/platform/soc/soc:firmware/get_throttled", text)) return -1;
    return (int64_t)strtoull(text, NULL, 16);
}
