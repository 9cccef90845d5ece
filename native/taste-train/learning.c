#include "learning.h"

#include <math.h>
#include <string.h>

#include "clock.h"
#include "error.h"
#include "generator.h"
#include "json.h"
#include "order.h"

/* Before an evaluation: 0.9^30, so that 4 % of the statistics are those from before. */
enum { SETTLE_PASSES = 30, SETTLE_ROWS = 40, SETTLE_TRIES = 1000 };

static const double reference_batch = 20; /* that lr is given for */

float learning_rate(const options *o) {
    double rate = (double)o->hyper.learning_rate;
    if (o->learn.rate_rule == LEARN_RATE_CONSTANT) return (float)rate;
    return (float)fmin(rate * o->batch_size / reference_batch, fmax(o->learn.rate_cap, 0));
}

static uint64_t reserve(learning_plan *p, uint64_t bytes) {
    uint64_t at = p->bytes;
    p->bytes += (bytes + TASTE_ALIGNMENT - 1) / TASTE_ALIGNMENT * TASTE_ALIGNMENT;
    return at;
}

static taste_status plan_replay(const options *o, learning_plan *p, taste_error *error) {
    p->stream_rows = o->batch_size - p->replay_rows;
    p->replay = (taste_replay_options){o->learn.buffer, (uint32_t)p->sample_bytes, p->classes, o->learn.policy, o->seed};
    if (o->learn.buffer == 0 || p->replay_rows == 0) return TASTE_STATUS_OK;
    p->replay_bytes = taste_replay_bytes(&p->replay);
    if (p->replay_bytes > 0) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_USAGE,
                      "a buffer of %u samples for %u classes. Use --buffer %u or more, or 0 for no replay.",
                      o->learn.buffer, p->classes, p->classes);
}

taste_status learning_plan_make(const options *o, learning_plan *out, taste_error *error) {
    const taste_model *model = taste_model_get();
    taste_model_facts facts;
    uint64_t train_count, test_count;
    (void)taste_model_describe(model, &facts);
    *out = (learning_plan){.classes = facts.classes, .sample_bytes = 1};
    for (uint32_t d = 0; d < facts.input_dims; d++) out->sample_bytes *= (uint64_t)facts.input_shape[d];
    out->groups = o->learn.scenario == LEARN_DOMAIN ? STREAM_DOMAINS : facts.classes;
    out->replay_rows = o->learn.buffer > 0 ? (uint32_t)(o->batch_size * o->learn.replay_ratio + 1e-9) : 0;
    taste_status status = task_plan_count(&o->learn, &out->tasks, error);
    if (status == TASTE_STATUS_OK) status = samples_count(o->samples, &train_count, error);
    if (status == TASTE_STATUS_OK) status = samples_count(o->test, &test_count, error);
    if (status == TASTE_STATUS_OK) status = plan_replay(o, out, error);
    if (status != TASTE_STATUS_OK) return status;
    out->learned = reserve(out, sizeof(learned) + (uint64_t)out->tasks * out->tasks * sizeof(double));
    out->buffer = reserve(out, out->replay_bytes);
    out->state_bytes = out->bytes;
    out->of = reserve(out, (uint64_t)(out->groups > facts.classes ? out->groups : facts.classes) * 2);
    out->seen = reserve(out, (uint64_t)facts.classes * 2);
    out->counts = reserve(out, (uint64_t)facts.classes * 4);
    out->train_rows = reserve(out, train_count * 4);
    out->train_first = reserve(out, (out->tasks + 1) * 4u);
    out->test_rows = reserve(out, test_count * 4);
    out->test_first = reserve(out, (out->tasks + 1) * 4u);
    out->slots = reserve(out, o->batch_size * 4u);
    out->labels = reserve(out, o->batch_size * 4u);
    out->raw = reserve(out, out->stream_rows * out->sample_bytes);
    return TASTE_STATUS_OK;
}

static void note_facts(learning *run) {
    const options *o = run->options;
    const learn_options *l = &o->learn;
    checkpoint_facts *facts = &run->facts;
    taste_model_facts model;
    (void)taste_model_describe(run->t->model, &model);
    checkpoint_note(facts, "build_id", "%s", model.build_id);
    checkpoint_note(facts, "data", "%s", run->train.samples->digest);
    checkpoint_note(facts, "test", "%s", run->test.samples->digest);
    checkpoint_note(facts, "seed", "%llu", (unsigned long long)run->seed);
    checkpoint_note(facts, "order_seed", "%llu", (unsigned long long)l->order_seed);
    checkpoint_note(facts, "scenario", "%d", l->scenario);
    checkpoint_note(facts, "tasks", "%u", run->plan.tasks);
    checkpoint_note(facts, "task_of", "%016llx", (unsigned long long)taste_fnv1a64(l->task_of != NULL ? l->task_of : ""));
    checkpoint_note(facts, "buffer", "%u", run->replay != NULL ? l->buffer : 0);
    checkpoint_note(facts, "memory_policy", "%d", l->policy);
    checkpoint_note(facts, "stream_rows", "%u", run->plan.stream_rows);
    checkpoint_note(facts, "replay_rows", "%u", run->plan.replay_rows);
    checkpoint_note(facts, "lr", "%.9g", (double)run->rate);
    checkpoint_note(facts, "passes", "%u", l->passes);
    checkpoint_note(facts, "samples_per_class", "%u", l->samples_per_class);
    checkpoint_note(facts, "loss_classes", "%d", l->loss_classes);
    checkpoint_note(facts, "augment", "%d", o->augment);
    checkpoint_note_hyper(facts, &o->hyper);
}

static void lay_out(learning *run, const samples *train, const samples *test) {
    const learning_plan *p = &run->plan;
    unsigned char *base = run->t->beside;
    run->tasks = (task_plan){.by_domain = run->options->learn.scenario == LEARN_DOMAIN,
                             .tasks = p->tasks,
                             .of = (uint16_t *)(void *)(base + p->of),
                             .capacity = p->groups};
    run->train = (stream){train, (uint32_t *)(void *)(base + p->train_rows), (uint32_t *)(void *)(base + p->train_first)};
    run->test = (stream){test, (uint32_t *)(void *)(base + p->test_rows), (uint32_t *)(void *)(base + p->test_first)};
    run->learned = (learned *)(void *)(base + p->learned);
    run->seen = (uint16_t *)(void *)(base + p->seen);
    run->slots = (uint32_t *)(void *)(base + p->slots);
    run->labels = (int32_t *)(void *)(base + p->labels);
    run->raw = base + p->raw;
}

static taste_status open_streams(learning *run, taste_error *error) {
    const learning_plan *p = &run->plan;
    uint32_t *counts = (uint32_t *)(void *)(run->t->beside + p->counts);
    const learn_options *l = &run->options->learn;
    taste_status status = task_plan_make(l, run->train.samples, p->classes, &run->tasks, error);
    if (status == TASTE_STATUS_OK)
        status = stream_fill(&run->tasks, l->samples_per_class, p->classes, counts, &run->train, error);
    if (status == TASTE_STATUS_OK) status = stream_fill(&run->tasks, 0, p->classes, counts, &run->test, error);
    return status;
}

static taste_status open_folder(learning *run, taste_error *error) {
    const options *o = run->options;
    void *block = run->t->beside + run->plan.buffer;
    int found;
    if (o->checkpoint == NULL) return TASTE_STATUS_OK;
    taste_status status = run_folder_continue(&run->folder, o->checkpoint, o->resume, &run->whole, &run->facts, &run->at,
                                              &found, error);
    if (status != TASTE_STATUS_OK || !found) return status;
    if (run->replay != NULL)
        status = taste_replay_open(&run->plan.replay, block, run->plan.replay_bytes, &run->replay, error);
#ifdef TASTE_PLANT_FORGET_BUFFER /* a harness that does not notice this is worth nothing */
    if (run->replay != NULL)
        status = taste_replay_init(&run->plan.replay, block, run->plan.replay_bytes, &run->replay, error);
#endif
    if (status != TASTE_STATUS_OK) return status;
    if (run->learned->evaluated > run->at.epoch || run->at.epoch > run->plan.tasks) {
        return taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s tells of task %llu of %u. Delete it.", run->folder.file,
                          (unsigned long long)run->at.epoch, run->plan.tasks);
    }
    taste_session_set_step(run->t->session, (uint32_t)run->seed, (uint32_t)run->at.step);
    json_begin("resume");
    json_text("path", run->folder.file);
    json_count("step", run->at.step);
    json_count("task", run->at.epoch);
    json_end();
    return TASTE_STATUS_OK;
}

taste_status learning_open(const options *options, const trainer *t, const learning_plan *plan, const samples *train,
                           const samples *test, learning *out, taste_error *error) {
    taste_model_facts model;
    taste_session_options session_options;
    taste_use uses[2];
    footprint_need need = trainer_need(options, t->model, t->program);
    (void)taste_model_describe(t->model, &model);
    (void)footprint_session(t->model, &need, &session_options, uses);
    memset(out, 0, sizeof *out);
    out->options = options;
    out->t = t;
    out->plan = *plan;
    out->folder.lock = -1;
    out->seed = options->seed_given ? options->seed : model.seed;
    out->plan.replay.seed = out->seed;
    out->rate = learning_rate(options);
    out->minimum = model.minimum_batch;
    out->has_statistics = model.state_bytes > 0;
    lay_out(out, train, test);
    if (!train->packed || train->tokens || !test->packed || train->y_elements != 1) {
        return taste_fail(error, TASTE_STATUS_USAGE, "learn takes packed images with one label each. Pack the data.");
    }
    taste_status status = open_streams(out, error);
    if (status == TASTE_STATUS_OK && plan->replay_bytes > 0)
        status = taste_replay_init(&out->plan.replay, t->beside + plan->buffer, plan->replay_bytes, &out->replay, error);
    if (status != TASTE_STATUS_OK) return status;
    note_facts(out);
    out->weights = trainer_canonical(t, 1u << TASTE_KIND_PARAMETER | 1u << TASTE_KIND_STATE);
    out->whole = out->weights;
    out->whole.kinds |= 1u << TASTE_KIND_CONSTANT;
    out->whole.slots = session_options.slots;
    out->whole.run_state = t->beside + plan->learned;
    out->whole.run_state_bytes = plan->state_bytes;
    taste_session_set_step(t->session, (uint32_t)out->seed, 0);
    progress_start(&out->progress, options);
    status = open_folder(out, error);
    return status;
}

const uint16_t *learning_groups(learning *run) {
    const learn_options *l = &run->options->learn;
    if (l->scenario == LEARN_TIL) return run->tasks.of;
    if (l->scenario == LEARN_DOMAIN || l->loss_classes == LEARN_LOSS_ALL) return NULL;
    uint64_t task = run->at.epoch < run->plan.tasks ? run->at.epoch : run->plan.tasks;
    /* Behind a task's last sample it is the one that was trained, whether or not the next has begun. */
    if (run->learned->evaluated < run->at.epoch) task = run->at.epoch - 1;
    for (uint32_t c = 0; c < run->plan.classes; c++) run->seen[c] = run->tasks.of[c] > task;
    return run->seen;
}

/* The stream's part of the step: rows as bytes, and their labels. */
static taste_status read_chunk(learning *run, uint32_t rows, taste_error *error) {
    const samples *data = run->train.samples;
    uint32_t first = run->train.first[run->at.epoch], count = run->train.first[run->at.epoch + 1] - first;
    for (uint32_t i = 0; i < rows; i++) {
        uint64_t place_of = order_sample(run->seed, run->at.epoch, count, run->at.position + i);
        uint32_t row = run->train.rows[first + place_of];
        taste_status status = samples_read_bytes(data, row, run->raw + i * run->plan.sample_bytes, error);
        if (status == TASTE_STATUS_OK) status = samples_read_column(data, &data->y, row, 1, &run->labels[i], error);
        if (status != TASTE_STATUS_OK) return status;
    }
    return TASTE_STATUS_OK;
}

static void put_row(const learning *run, uint32_t row, const void *bytes, int32_t label) {
    const batch_buffer *batch = &run->t->batches[0];
    const augment_image *image = &run->train.samples->image;
    augment_draw draw =
        augment_choose((augment_level)run->options->augment, image, run->seed, run->at.step, row);
    augment_apply(image, &draw, bytes, (float *)batch->x + row * run->plan.sample_bytes);
    ((int32_t *)batch->y)[row] = label;
}

static void report_step(learning *run, uint32_t rows, uint32_t correct, uint64_t elapsed_ns, int last) {
    uint32_t first = run->train.first[run->at.epoch], count = run->train.first[run->at.epoch + 1] - first;
    progress_step_done(&run->progress, rows, elapsed_ns);
    progress_step step = {.at = &run->at, .loss = run->loss, .correct = correct, .labels = rows, .rate = run->rate};
    step.epoch = (double)run->at.epoch + (double)run->at.position / (double)count;
    step.last_of_epoch = last;
    progress_report_step(&run->progress, &step);
}

/* One update over the chunk and a draw from the buffer. */
static taste_status update(learning *run, uint32_t rows, int last, taste_error *error) {
    const trainer *t = run->t;
    taste_hyper hyper = run->options->hyper;
    taste_step step;
    uint64_t start = taste_now_ns();
    uint32_t drawn = run->replay != NULL ? taste_replay_draw(run->replay, run->plan.replay_rows, run->slots) : 0;
    if (rows + drawn < run->minimum) return TASTE_STATUS_OK;
    for (uint32_t i = 0; i < rows; i++) put_row(run, i, run->raw + i * run->plan.sample_bytes, run->labels[i]);
    for (uint32_t i = 0; i < drawn; i++) {
        put_row(run, rows + i, taste_replay_sample(run->replay, run->slots[i]),
                taste_replay_label(run->replay, run->slots[i]));
    }
    hyper.learning_rate = run->rate;
    taste_status status = taste_session_set_class_groups(t->session, learning_groups(run));
    if (status == TASTE_STATUS_OK) {
        status = taste_session_step(t->session, t->parameters, t->program, rows + drawn, t->batches[0].x,
                                    t->batches[0].y, &hyper, &step);
    }
    if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
    run->loss = step.loss;
    run->at.step++;
    uint64_t elapsed_ns = taste_now_ns() - start;
    run->learned->samples += rows + drawn;
    run->learned->seconds += (double)elapsed_ns * 1e-9;
    report_step(run, rows + drawn, step.correct, elapsed_ns, last);
    return TASTE_STATUS_OK;
}

taste_status learning_step(learning *run, taste_error *error) {
    uint64_t left = run->train.first[run->at.epoch + 1] - run->train.first[run->at.epoch] - run->at.position;
    uint32_t rows = left < run->plan.stream_rows ? (uint32_t)left : run->plan.stream_rows;
    uint32_t passes = run->options->learn.passes;
    uint64_t start = taste_now_ns();
    taste_status status = read_chunk(run, rows, error);
    run->learned->seconds += (double)(taste_now_ns() - start) * 1e-9;
    for (uint32_t p = 0; status == TASTE_STATUS_OK && p < passes; p++)
        status = update(run, rows, rows == left && p + 1 == passes, error);
    for (uint32_t i = 0; status == TASTE_STATUS_OK && run->replay != NULL && i < rows; i++)
        status = taste_replay_add(run->replay, run->raw + i * run->plan.sample_bytes, run->labels[i], error);
    run->at.position += rows;
    if (rows < left) return status;
    run->at.position = 0;
    run->at.epoch++;
    return status;
}

/* A slot of the buffer for row `i` of a pass: in the stream's place one of the task that was just trained. */
static uint32_t slot_like_in_a_step(const learning *run, uint64_t *draw, uint32_t i) {
    uint32_t stored = taste_replay_count(run->replay), slot = 0;
    int from_stream = i % run->t->batch_size < run->plan.stream_rows && !run->tasks.by_domain;
    for (int tries = 0; tries < SETTLE_TRIES; tries++) {
        slot = (uint32_t)(taste_splitmix64((*draw)++) % stored);
        if (!from_stream || run->tasks.of[taste_replay_label(run->replay, slot)] == run->at.epoch - 1) break;
    }
    return slot;
}

/* Batch norms' running statistics are left behind by weights that a large rate moves fast, and tell of a network that is no
 * more. Forward passes over the buffer, mixed as steps are, bring them up to date; nothing is trained. Once a task: an
 * interrupted evaluation that goes on finds the same statistics. */
static taste_status settle_statistics(learning *run, taste_error *error) {
    const trainer *t = run->t;
    uint32_t rows = t->batch_size < SETTLE_ROWS ? t->batch_size : SETTLE_ROWS;
    uint64_t draw = taste_generator_key(run->seed, "settle") + (run->at.epoch << 32);
    if (run->learned->settled == run->at.epoch) return TASTE_STATUS_OK;
    for (uint32_t pass = 0; run->has_statistics && run->replay != NULL && pass < SETTLE_PASSES; pass++) {
        taste_step step;
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t slot = slot_like_in_a_step(run, &draw, pass * rows + i);
            put_row(run, i, taste_replay_sample(run->replay, slot), taste_replay_label(run->replay, slot));
        }
        taste_status status = taste_session_infer(t->session, t->parameters, t->program, rows, t->batches[0].x, &step);
        if (status != TASTE_STATUS_OK) return trainer_failed(t, status, error);
    }
    run->learned->settled = run->at.epoch;
    return TASTE_STATUS_OK;
}

taste_status learning_evaluate(learning *run, taste_error *error) {
    uint64_t last = run->at.epoch - 1;
    taste_status settled = settle_statistics(run, error);
    if (settled != TASTE_STATUS_OK) return settled;
    double *row = run->learned->accuracy + last * run->plan.tasks, sum = 0;
    for (uint64_t task = 0; task <= last; task++) {
        tally found;
        uint32_t first = run->test.first[task];
        const evaluation what = {run->test.first[task + 1] - first, run->test.rows + first, learning_groups(run)};
        taste_status status = evaluate(run->t, run->test.samples, &run->t->batches[0], &what, NULL, &found, error);
        if (status != TASTE_STATUS_OK) return status;
        row[task] = tally_accuracy(&found);
        sum += row[task];
    }
    run->learned->evaluated++;
    json_begin("eval");
    json_count("task", last);
    json_count("step", run->at.step);
    json_open("accuracy", '[');
    for (uint64_t task = 0; task <= last; task++) json_element_real(row[task]);
    json_close(']');
    json_real("average_accuracy", sum / (double)(last + 1));
    json_end();
    return TASTE_STATUS_OK;
}

taste_status learning_save_checkpoint(learning *run, taste_error *error) {
    return run_folder_checkpoint(&run->folder, &run->whole, &run->facts, &run->at, error);
}

taste_status learning_save_if_due(learning *run, taste_error *error) {
    return run_folder_checkpoint_if_due(&run->folder, run->options, &run->whole, &run->facts, &run->at, error);
}
