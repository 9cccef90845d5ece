/* A Raspberry Pi 5's power management chip, which only the firmware's own tool reads: the sum of volts times amperes of its rails.
 * What hangs on the 5 V pins and USB is not among them. */
#ifndef TASTE_TRAIN_PMIC_H
#define TASTE_TRAIN_PMIC_H

#include "taste.h"

/* Whether `vcgencmd pmic_read_adc` answers with rails (a Pi 4's does not). */
int pmic_exists(const char *root);

/* Watts. IO: the tool failed, or said something else. */
taste_status pmic_watts(const char *root, double *out_watts, taste_error *error);

/* The sum over rails of an answer of the tool, NaN where it holds no rail with both values. */
double pmic_sum(const char *text);

#endif
