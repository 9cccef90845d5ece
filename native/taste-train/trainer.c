#include "trainer.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "error.h"
#include "json.h"
#include "memory.h"
#include "weights.h"

volatile sig_atomic_t trainer_interrupted;

enum { HUGE_PAGE_BYTES = 2 << 20 };

uint32_t trainer_threads(const options *options) {
    if (options->threads > 0) return options->threads;
    return options->core_count > 0 ? options->core_count : taste_pool_available_cores();
}

/* Whether gradients of several micro-batches are added up, or may be. */
static int accumulates(const options *options) {
    uint32_t effective = options->interval > 0 ? options->effective_batch_cap : options->effective_batch;
    return effective > options->batch_size || options->control != NULL;
}

const char *trainer_program(const options *options, const taste_model *model) {
    static const char fused[] = "train_fused";
    uint32_t ignored;
    if (options->program != NULL) return options->program;
    int allowed = !accumulates(options) && !(options->hyper.gradient_clip > 0) && options->dump_gradients == NULL;
    return allowed && taste_model_find_program(model, fused, &ignored) == TASTE_STATUS_OK ? fused : "train";
}

footprint_need trainer_need(const options *options, const taste_model *model, uint32_t program) {
    taste_program_facts facts = {0};
    (void)taste_model_program(model, program, &facts);
    /* SGD always has room for momentum, so that a size that was measured with it fits without it. */
    return (footprint_need){
        .program = program,
        .batch_size = options->batch_size,
        .threads = trainer_threads(options),
        .slots = options->hyper.optimizer == TASTE_OPTIMIZER_SGD ? 1 : 2,
        .accumulate = facts.updates && !facts.fused_update && accumulates(options),
        .beside_bytes = options->beside_bytes,
    };
}

/* Refuses a plan that is larger than what may be used, with the largest batch size that is not. */
static taste_status check_memory(const options *options, const trainer *t, const footprint_need *need,
                                 taste_error *error) {
    uint64_t free_bytes = memory_available_bytes(options->system_root);
    uint64_t limit = options->memory > 0 && options->memory < free_bytes ? options->memory : free_bytes;
    footprint_line line;
    if (t->footprint.planned_bytes <= limit) return TASTE_STATUS_OK;
#ifdef TASTE_PLANT_NO_LIMIT /* limits that do not notice this are worth nothing */
    return TASTE_STATUS_OK;
#endif
    taste_status status = footprint_line_of(t->model, need, &line, error);
    if (status != TASTE_STATUS_OK) return status;
    uint32_t largest = footprint_largest_batch(&line, limit);
    const char *whose = limit == options->memory ? "the limit is" : "free are";
    if (largest == 0) {
        return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT,
                          "batch size %u needs %.1f MiB; %s %.1f MiB. No batch size fits: take a smaller model or "
                          "raise the limit.",
                          t->batch_size, (double)t->footprint.planned_bytes / 1048576, whose,
                          (double)limit / 1048576);
    }
    return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT,
                      "batch size %u needs %.1f MiB; %s %.1f MiB. Largest that fits: %u.", t->batch_size,
                      (double)t->footprint.planned_bytes / 1048576, whose, (double)limit / 1048576, largest);
}

/* One block for everything, on huge pages where the kernel has them. */
static taste_status map_block(trainer *t, taste_error *error) {
    uint64_t bytes = t->footprint.block_bytes;
    unsigned char *mapped =
        mmap(NULL, bytes + HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT,
                          "%.1f MiB could not be mapped (%s). Use a smaller batch size.", (double)bytes / 1048576,
                          strerror(errno));
    }
    uintptr_t start = ((uintptr_t)mapped + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    uint64_t before = start - (uintptr_t)mapped;
    if (before > 0) munmap(mapped, before);
    if (before < HUGE_PAGE_BYTES) munmap((unsigned char *)start + bytes, HUGE_PAGE_BYTES - before);
    t->block = (unsigned char *)start;
    (void)madvise(t->block, bytes, MADV_HUGEPAGE);
    return TASTE_STATUS_OK;
}

static taste_status fill_parameters(const options *options, const trainer *t, int needs_weights, taste_error *error) {
    taste_model_facts facts;
    uint32_t unset;
    (void)taste_model_describe(t->model, &facts);
    (void)taste_parameters_seed(t->parameters, options->seed_given ? options->seed : facts.seed, &unset);
    if (options->weights != NULL) {
        return weights_load(options->weights, t->model, t->parameters, t->staging, t->footprint.staging_bytes, error);
    }
    if (unset == 0 || !needs_weights) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_USAGE, "%u tensors of %s have no seeded value. Give --weights FILE.", unset,
                      facts.name);
}

static void announce_plan(const trainer *t) {
    json_begin("plan");
    json_text("program", t->facts.name);
    json_count("batch_size", t->batch_size);
    json_count("planned_bytes", t->footprint.planned_bytes);
    json_count("threads", t->threads);
    json_end();
}

static taste_status open_parts(const options *options, trainer *t, const footprint_need *need, int needs_weights,
                               taste_error *error) {
    const footprint *f = &t->footprint;
    taste_use uses[2];
    taste_session_options session_options;
    size_t use_count = footprint_session(t->model, need, &session_options, uses);
    t->eval_program = uses[use_count - 1].program;
    for (int i = 0; i < 2; i++)
        t->batches[i] = (batch_buffer){t->block + f->x[i], t->block + f->y[i], t->block + f->raw[i]};
    t->logits = (float *)(t->block + f->logits);
    t->staging = (float *)(t->block + f->staging);
    t->beside = t->block + f->beside;
    taste_status status =
        taste_parameters_init(t->model, t->block + f->parameters, f->parameters_bytes, &t->parameters, error);
    if (status != TASTE_STATUS_OK) return status;
    /* Before the arena is touched: the pages of the weights file's header are gone again by then. */
    status = fill_parameters(options, t, needs_weights, error);
    if (status != TASTE_STATUS_OK) return status;
    memset(t->block + f->pool, 0, f->block_bytes - f->pool);
    status = taste_pool_start(t->threads, options->core_count > 0 ? options->cores : NULL, t->block + f->pool,
                              f->pool_bytes, &t->pool, error);
    if (status != TASTE_STATUS_OK) return status;
    return taste_session_init(t->model, uses, use_count, &session_options, t->pool, t->block + f->session,
                              f->session_bytes, &t->session, error);
}

taste_status trainer_open(const options *options, const char *program, int needs_weights, trainer *out,
                          taste_error *error) {
    *out =
        (trainer){.model = taste_model_get(), .batch_size = options->batch_size, .threads = trainer_threads(options)};
    taste_status status = taste_model_check_cpu(out->model, error);
    if (status != TASTE_STATUS_OK) return status;
    if (taste_model_find_program(out->model, program, &out->program) != TASTE_STATUS_OK) {
        return taste_fail(error, TASTE_STATUS_USAGE, "no program '%.60s' in this build. Use one that info lists.",
                          program);
    }
    (void)taste_model_program(out->model, out->program, &out->facts);
    if (taste_pool_bytes(out->threads) == 0) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%u threads asked for. Use 1 to %d.", out->threads,
                          TASTE_MAX_THREADS);
    }
    footprint_need need = trainer_need(options, out->model, out->program);
    status = footprint_of(out->model, &need, &out->footprint, error);
    if (status == TASTE_STATUS_OK) status = check_memory(options, out, &need, error);
    if (status != TASTE_STATUS_OK) return status;
    out->x_sample_bytes = footprint_sample_bytes(out->model, out->facts.input);
    out->y_sample_bytes = footprint_target_bytes(out->model, &out->facts);
    out->logits_sample_bytes = footprint_sample_bytes(out->model, out->facts.output);
    announce_plan(out);
    memory_volunteer();
    footprint_touch_program();
    status = map_block(out, error);
    return status == TASTE_STATUS_OK ? open_parts(options, out, &need, needs_weights, error) : status;
}

void trainer_close(trainer *trainer) {
    if (trainer->pool != NULL) taste_pool_stop(trainer->pool);
    if (trainer->block != NULL) munmap(trainer->block, trainer->footprint.block_bytes);
    trainer->pool = NULL;
    trainer->block = NULL;
}

canonical trainer_canonical(const trainer *t, uint32_t kinds) {
    return (canonical){.model = t->model,
                       .parameters = t->parameters,
                       .session = t->session,
                       .kinds = kinds,
                       .staging = t->staging,
                       .staging_bytes = t->footprint.staging_bytes};
}

taste_status trainer_failed(const trainer *trainer, taste_status status, taste_error *error) {
    return taste_fail(error, status, "%s", taste_session_error(trainer->session));
}
