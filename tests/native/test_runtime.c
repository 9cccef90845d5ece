/* Runs every group; the exit code is 1 if any check failed. With the argument `broken` one check fails on purpose: that proves
 * that a failure is seen. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "generator.h"
#include "mlp.h"

int check_failures;

const char *const parameter_names[4] = {"hidden.weight", "hidden.bias", "head.weight", "head.bias"};
const size_t parameter_counts[4] = {HIDDEN * INPUTS, HIDDEN, CLASSES * HIDDEN, CLASSES};

void *new_block(size_t bytes) {
    void *block = NULL;
    if (posix_memalign(&block, TASTE_ALIGNMENT, bytes > 0 ? bytes : 64) != 0) abort();
    memset(block, 0xa5, bytes);
    return block;
}

void make_rows(uint32_t rows, float *x, int32_t *y) {
    uint64_t key = taste_generator_key(3, "rows");
    for (uint32_t i = 0; i < rows * INPUTS; i++) x[i] = 2 * taste_generator_uniform(key, i) - 1;
    for (uint32_t i = 0; i < rows; i++) y[i] = (int32_t)(taste_splitmix64(key ^ i) % CLASSES);
}

opened open_model(uint32_t threads, uint32_t batch_size, int accumulate) {
    const taste_use uses[] = {{0, batch_size}, {1, batch_size}};
    const taste_session_options options = {.slots = 1, .accumulate = accumulate};
    return open_uses(threads, uses, 2, &options);
}

opened open_uses(uint32_t threads, const taste_use *uses, size_t count, const taste_session_options *options) {
    opened o = {.model = taste_model_get()};
    taste_error error = {{0}};
    size_t bytes = 0, pool_bytes = taste_pool_bytes(threads), parameters_bytes = taste_parameters_bytes(o.model);
    CHECK(taste_session_bytes(o.model, uses, count, options, &bytes, &error) == TASTE_STATUS_OK);
    o.blocks[0] = new_block(parameters_bytes);
    o.blocks[1] = new_block(pool_bytes);
    o.blocks[2] = new_block(bytes);
    CHECK(taste_parameters_init(o.model, o.blocks[0], parameters_bytes, &o.parameters, &error) == TASTE_STATUS_OK);
    CHECK(taste_parameters_seed(o.parameters, 7, NULL) == TASTE_STATUS_OK);
    CHECK(taste_pool_start(threads, NULL, o.blocks[1], pool_bytes, &o.pool, &error) == TASTE_STATUS_OK);
    CHECK(taste_session_init(o.model, uses, count, options, o.pool, o.blocks[2], bytes, &o.session, &error) ==
          TASTE_STATUS_OK);
    if (error.text[0] != 0) printf("%s\n", error.text);
    return o;
}

void close_model(opened *o) {
    taste_pool_stop(o->pool);
    for (int i = 0; i < 3; i++) free(o->blocks[i]);
}

void test_generator(void) {
    /* Published vectors: FNV-1a of "", "a", "foobar"; the first outputs of splitmix64 seeded with 0. */
    CHECK(taste_fnv1a64("") == 0xcbf29ce484222325u);
    CHECK(taste_fnv1a64("a") == 0xaf63dc4c8601ec8cu);
    CHECK(taste_fnv1a64("foobar") == 0x85944171f73967e8u);
    CHECK(taste_splitmix64(0) == 0xe220a8397b1dcdafu);
    CHECK(taste_splitmix64(0x9e3779b97f4a7c15u) == 0x6e789e6aa1b965f4u);
    uint64_t key = taste_generator_key(7, "hidden.weight");
    CHECK(key == taste_splitmix64(7 ^ taste_fnv1a64("hidden.weight")));
    double sum = 0;
    for (uint64_t i = 0; i < 4096; i++) {
        float u = taste_generator_uniform(key, i);
        CHECK(u >= 0 && u < 1 && u * 0x1p24f == (float)(uint32_t)(u * 0x1p24f));
        sum += u;
    }
    CHECK(sum / 4096 > 0.48 && sum / 4096 < 0.52);
}

int main(int argc, char **argv) {
    test_generator();
    test_layout();
    test_pool();
    test_steps();
    test_fused();
    test_profile();
    test_cut_points();
    test_class_groups();
    test_errors();
    test_sessions_side_by_side();
    test_safetensors();
    test_batches();
    if (argc > 1 && strcmp(argv[1], "broken") == 0) CHECK(taste_fnv1a64("a") == 0);
    printf("%d failures\n", check_failures);
    return check_failures > 0;
}
