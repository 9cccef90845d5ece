/* One line of error text beside every status. */
#ifndef TASTE_ERROR_H
#define TASTE_ERROR_H

#include "taste.h"

/* Formats the line into `error` (which may be NULL) and returns `status`, so that a failure is one statement. */
taste_status taste_fail(taste_error *error, taste_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
