/* JSON Lines on stdout: one event a line, written field by field. */
#ifndef TASTE_TRAIN_JSON_H
#define TASTE_TRAIN_JSON_H

#include <stdint.h>

#include "taste.h"

void json_begin(const char *event);
void json_text(const char *key, const char *value); /* NULL: null */
void json_count(const char *key, uint64_t value);
void json_real(const char *key, double value); /* not finite: null */
void json_flag(const char *key, int value);
void json_open(const char *key, char bracket); /* '{' or '['; key NULL: an element of a list */
void json_close(char bracket);
void json_element_text(const char *value);
void json_element_real(double value); /* not finite: null */
void json_element_count(int64_t value);
void json_end(void);

/* For a thread beside the verb: calls `say`, which may write events, unless the result is written already. */
void json_beside(void (*say)(void *), void *context);

/* Whether everything reached stdout. */
taste_status json_flush(taste_error *error);

#endif
