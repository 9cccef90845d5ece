/* taste-train info: what this build is, and its memory as a closed form. */
#include "error.h"
#include "clock.h"
#include "footprint.h"
#include "frequency.h"
#include "json.h"
#include "sensors.h"
#include "taint.h"
#include "trainer.h"
#include "verbs.h"

#ifndef TASTE_VERSION
#define TASTE_VERSION "unversioned"
#endif

static void list_features(const char *features) {
    json_open("features", '[');
    while (*features != 0) {
        char name[64];
        size_t length = 0;
        while (*features == ' ') features++;
        while (*features != 0 && *features != ' ' && length + 1 < sizeof name) name[length++] = *features++;
        name[length] = 0;
        if (length > 0) json_element_text(name);
    }
    json_close(']');
}

static void list_names(const taste_model *model, const taste_model_facts *facts) {
    json_open("input_shape", '[');
    for (uint32_t d = 0; d < facts->input_dims; d++) json_element_count(facts->input_shape[d]);
    json_close(']');
    json_open("blocks", '[');
    for (uint32_t b = 0; b < facts->block_count; b++) {
        taste_block_facts block;
        (void)taste_model_block(model, 0, b, &block);
        json_element_text(block.name);
    }
    json_close(']');
    json_open("segments", '[');
    for (uint32_t s = 0; s < facts->segment_count; s++) json_element_text(taste_model_segment_name(model, s));
    json_close(']');
}

static taste_status list_programs(const options *options, const taste_model *model, const taste_model_facts *facts,
                                  taste_error *error) {
    json_open("programs", '{');
    for (uint32_t p = 0; p < facts->program_count; p++) {
        taste_program_facts program;
        footprint_line line;
        (void)taste_model_program(model, p, &program);
        footprint_need need = trainer_need(options, model, p);
        taste_status status = footprint_line_of(model, &need, &line, error);
        if (status != TASTE_STATUS_OK) return status;
        json_open(program.name, '{');
        json_count("fixed_bytes", line.fixed_bytes);
        json_count("per_sample_bytes", line.per_sample_bytes);
        json_close('}');
    }
    json_close('}');
    json_count("threads", trainer_threads(options));
    return TASTE_STATUS_OK;
}

/* What the frequency and the power of this board can be set to and read from. */
static void list_power(const char *root) {
    static frequency_policy policies[FREQUENCY_POLICIES];
    static sensors found;
    sensors_find(root, &found);
    json_text("power_source", found.source[0] != 0 ? found.source : NULL);
    json_open("policies", '[');
    uint32_t count = frequency_policies(root, policies);
    for (uint32_t p = 0; p < count; p++) {
        json_open(NULL, '{');
        json_count("policy", policies[p].number);
        json_text("cores", policies[p].cores);
        json_text("governor", policies[p].governor);
        json_count("current_khz", policies[p].current);
        json_open("frequencies_khz", '[');
        for (uint32_t i = 0; i < policies[p].count; i++) json_element_count((int64_t)policies[p].steps[i]);
        json_close(']');
        json_close('}');
    }
    json_close(']');
    json_count("t_ns", taste_now_ns());
}

/* With a batch size: what a run of it will take. */
static taste_status plan_one(const options *options, const taste_model *model, taste_error *error) {
    const char *name = trainer_program(options, model);
    uint32_t program;
    footprint plan;
    if (options->batch_size == 0) return TASTE_STATUS_OK;
    if (taste_model_find_program(model, name, &program) != TASTE_STATUS_OK) {
        return taste_fail(error, TASTE_STATUS_USAGE, "no program '%.60s' in this build. Use one that info lists.",
                          name);
    }
    footprint_need need = trainer_need(options, model, program);
    taste_status status = footprint_of(model, &need, &plan, error);
    if (status != TASTE_STATUS_OK) return status;
    json_count("batch_size", options->batch_size);
    json_count("planned_bytes", plan.planned_bytes);
    return TASTE_STATUS_OK;
}

taste_status verb_info(const options *options, taste_error *error) {
    const taste_model *model = taste_model_get();
    taste_model_facts facts;
    (void)taste_model_describe(model, &facts);
    if (taste_pool_bytes(trainer_threads(options)) == 0) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%u threads asked for. Use 1 to %d.", options->threads,
                          TASTE_MAX_THREADS);
    }
    json_begin("info");
    json_text("model", facts.name);
    json_text("target", facts.target);
    json_text("build_id", facts.build_id);
    json_text("version", TASTE_VERSION);
    list_features(facts.features);
    json_count("vector_bits", facts.vector_bits);
    json_count("classes", facts.classes);
    json_count("minimum_batch", facts.minimum_batch);
    json_count("seed", facts.seed);
    list_names(model, &facts);
    taste_status status = list_programs(options, model, &facts, error);
    if (status == TASTE_STATUS_OK) status = plan_one(options, model, error);
    list_power(options->system_root);
    json_flag("emulated", taint_is_emulated(options->system_root));
    json_end();
    return status;
}
