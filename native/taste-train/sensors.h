/* What a board says of its power, temperature, frequency and throttling. `root` stands before every path: tests hand in a tree of
 * their own. */
#ifndef TASTE_TRAIN_SENSORS_H
#define TASTE_TRAIN_SENSORS_H

#include <stdint.h>

#include "taste.h"

enum { SENSORS_MOST = 16, SENSOR_PATH_BYTES = 256, SENSOR_NAME_BYTES = 48, SENSORS_SOURCE_BYTES = 16 };

typedef enum sensor_kind { SENSOR_POWER, SENSOR_PRODUCT, SENSOR_ENERGY } sensor_kind;

/* One rail: power itself, volts and amperes to be multiplied, or an energy counter. */
typedef struct sensor {
    sensor_kind kind;
    char name[SENSOR_NAME_BYTES];
    char path[SENSOR_PATH_BYTES]; /* of the power, the volts or the energy */
    char other[SENSOR_PATH_BYTES]; /* of the amperes; of the energy, the file with the value after which it starts again; "": none */
    double scale; /* of one count (of the product), in watts or joules */
    double last;  /* joules at the last reading */
} sensor;

/* What stands for the board's power: the sum of `rails`. `source` is "" where there is none. */
typedef struct sensors {
    const char *root;
    char source[SENSORS_SOURCE_BYTES];
    sensor rails[SENSORS_MOST];
    uint32_t count;
    uint64_t last_ns; /* of energy counters: when they were read; 0: never */
} sensors;

/* Looks for what measures power, in the order ina3221 (iio), ina (hwmon), hwmon, energy (hwmon), pmic (a Pi 5's), rapl; a rail that
 * all others hang on stands for the sum. No source: OK and source "". */
void sensors_find(const char *root, sensors *out);

/* Watts now; of energy counters the mean since the last reading, NaN at the first. IO: a file that is gone or holds no number. */
taste_status sensors_watts(sensors *s, double *out_watts, taste_error *error);

/* Degrees C of the CPU (NaN: unknown), current kHz of the fastest policy (0), bits of the Pi's firmware or -1. */
double sensors_temperature(const char *root);
uint64_t sensors_frequency(const char *root);
int64_t sensors_throttle_bits(const char *root);

#endif
