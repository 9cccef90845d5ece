#include "error.h"

#include <stdarg.h>
#include <stdio.h>

taste_status taste_fail(taste_error *error, taste_status status, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return status;
}
