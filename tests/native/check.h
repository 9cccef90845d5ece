/* A check that fails says where and ends up in the exit code. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>

#include "taste.h"

extern int check_failures;

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            check_failures++; \
        } \
    } while (0)

/* Everything that a test of steps needs, in memory of its own. */
typedef struct opened {
    const taste_model *model;
    taste_pool *pool;
    taste_parameters *parameters;
    taste_session *session;
    void *blocks[3];
} opened;

/* Opens programs train and eval for `batch_size` rows, seeded; checks that it works. */
opened open_model(uint32_t threads, uint32_t batch_size, int accumulate);
opened open_uses(uint32_t threads, const taste_use *uses, size_t count, const taste_session_options *options);
void close_model(opened *o);

/* Aligned memory, filled with a pattern so that nothing relies on zeros. */
void *new_block(size_t bytes);

/* Made-up rows, the same every time: x [rows, 40], labels in [0, 5). */
void make_rows(uint32_t rows, float *x, int32_t *y);

/* The names of the model's parameters. */
extern const char *const parameter_names[4];
extern const size_t parameter_counts[4];

/* One group of tests a file. */
void test_generator(void);
void test_layout(void);
void test_pool(void);
void test_steps(void);
void test_fused(void);
void test_profile(void);
void test_cut_points(void);
void test_class_groups(void);
void test_errors(void);
void test_sessions_side_by_side(void);
void test_safetensors(void);
void test_batches(void);

#endif
