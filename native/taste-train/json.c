#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

static int first; /* nothing stands yet in the innermost object or list */
static int write_error;
static int over; /* a result was written: it is the last line but for an error */

static void separate(void) {
    if (!first) putchar(',');
    first = 0;
}

static void put_text(const char *text) {
    putchar('"');
    for (; *text != 0; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 0x20)
            printf("\\u%04x", c);
        else if (c == '"' || c == '\\')
            printf("\\%c", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void put_key(const char *key) {
    separate();
    if (key == NULL) return;
    put_text(key);
    putchar(':');
}

void json_begin(const char *event) {
    flockfile(stdout); /* until json_end: the sensors' thread speaks too */
    errno = 0; /* a long line is written in parts: what json_end finds is the first failure's */
    if (strcmp(event, "result") == 0) over = 1;
    putchar('{');
    first = 1;
    json_text("event", event);
}

void json_text(const char *key, const char *value) {
    put_key(key);
    if (value == NULL)
        fputs("null", stdout);
    else
        put_text(value);
}

void json_count(const char *key, uint64_t value) {
    put_key(key);
    printf("%llu", (unsigned long long)value);
}

static void put_real(double value) {
    if (isfinite(value))
        printf("%.9g", value);
    else
        fputs("null", stdout);
}

void json_real(const char *key, double value) {
    put_key(key);
    put_real(value);
}

void json_element_real(double value) {
    separate();
    put_real(value);
}

void json_flag(const char *key, int value) {
    put_key(key);
    fputs(value ? "true" : "false", stdout);
}

void json_open(const char *key, char bracket) {
    put_key(key);
    putchar(bracket);
    first = 1;
}

void json_close(char bracket) {
    putchar(bracket);
    first = 0;
}

void json_element_text(const char *value) {
    separate();
    put_text(value);
}

void json_element_count(int64_t value) {
    separate();
    printf("%lld", (long long)value);
}

void json_end(void) {
    putchar('}');
    putchar('\n');
    if ((fflush(stdout) != 0 || ferror(stdout)) && write_error == 0) write_error = errno;
    funlockfile(stdout);
}

void json_beside(void (*say)(void *), void *context) {
    flockfile(stdout);
    if (!over) say(context);
    funlockfile(stdout);
}

taste_status json_flush(taste_error *error) {
    if (fflush(stdout) != 0 && write_error == 0) write_error = errno;
    if (write_error == 0 && !ferror(stdout)) return TASTE_STATUS_OK;
    return taste_fail(error, write_error == ENOSPC ? TASTE_STATUS_NO_SPACE : TASTE_STATUS_IO,
                      "results could not be written to standard output (%s). Look at what reads it.",
                      strerror(write_error));
}
