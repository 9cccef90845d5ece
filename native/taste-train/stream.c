#include "stream.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "order.h"

enum { PIECE = 1024 }; /* labels read at a time */

/* The next number of "0,0,1"; 0: there is none. */
static int next_task(const char **at, uint32_t *out) {
    char *end;
    if (**at < '0' || **at > '9') return 0;
    unsigned long value = strtoul(*at, &end, 10);
    if (value >= 1024 || (*end != ',' && *end != 0) || (*end == ',' && end[1] == 0)) return 0;
    *out = (uint32_t)value;
    *at = *end == ',' ? end + 1 : end;
    return 1;
}

taste_status task_plan_count(const learn_options *options, uint32_t *out_tasks, taste_error *error) {
    const char *at = options->task_of;
    uint32_t task, tasks = 0;
    *out_tasks = options->tasks;
    if (at == NULL) return TASTE_STATUS_OK;
    while (*at != 0) {
        if (!next_task(&at, &task)) {
            return taste_fail(error, TASTE_STATUS_USAGE,
                              "--task-of '%.60s' is no list of tasks below 1024. Give the task of each class: 0,0,1,1.",
                              options->task_of);
        }
        if (task >= tasks) tasks = task + 1;
    }
    *out_tasks = tasks;
    return TASTE_STATUS_OK;
}

/* What `visit` gets: the row, its label and its class or domain. */
typedef taste_status (*row_visit)(void *context, uint64_t row, int32_t label, int32_t group, taste_error *error);

static taste_status walk(const samples *data, int by_domain, row_visit visit, void *context, taste_error *error) {
    int32_t labels[PIECE], domains[PIECE];
    for (uint64_t first = 0; first < data->count; first += PIECE) {
        size_t n = data->count - first < PIECE ? (size_t)(data->count - first) : PIECE;
        taste_status status = samples_read_column(data, &data->y, first, n, labels, error);
        if (status == TASTE_STATUS_OK && by_domain)
            status = samples_read_column(data, &data->domain, first, n, domains, error);
        for (size_t i = 0; status == TASTE_STATUS_OK && i < n; i++)
            status = visit(context, first + i, labels[i], by_domain ? domains[i] : labels[i], error);
        if (status != TASTE_STATUS_OK) return status;
    }
    return TASTE_STATUS_OK;
}

typedef struct extent {
    int by_domain;
    uint32_t classes, capacity, groups;
} extent;

static taste_status measure_row(void *context, uint64_t row, int32_t label, int32_t group, taste_error *error) {
    extent *e = context;
    if (label < 0 || (e->by_domain && (group < 0 || (uint32_t)group >= e->capacity))) {
        return taste_fail(error, TASTE_STATUS_BAD_DATA,
                          "sample %llu has label %d, %s %d. Labels count from 0, domains to below %d.",
                          (unsigned long long)row, label, e->by_domain ? "domain" : "class", group, STREAM_DOMAINS);
    }
    if ((uint32_t)label >= e->classes) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "sample %llu has label %d, the model has room for %u classes. Build it with --max-classes %d or "
                          "more.",
                          (unsigned long long)row, label, e->classes, label + 1);
    }
    if ((uint32_t)group >= e->groups) e->groups = (uint32_t)group + 1;
    return TASTE_STATUS_OK;
}

taste_status task_plan_make(const learn_options *options, const samples *train, uint32_t classes, task_plan *plan,
                            taste_error *error) {
    extent e = {plan->by_domain, classes, plan->capacity, 0};
    if (plan->by_domain && !train->has_domain) {
        return taste_fail(error, TASTE_STATUS_BAD_DATA,
                          "%.120s has no tensor 'domain' (int32 [%llu]). Pack the data with domains.", train->file.path,
                          (unsigned long long)train->count);
    }
    taste_status status = walk(train, plan->by_domain, measure_row, &e, error);
    if (status != TASTE_STATUS_OK) return status;
    for (uint32_t g = 0; g < plan->capacity; g++) plan->of[g] = STREAM_NO_TASK;
    if (options->task_of != NULL) {
        const char *at = options->task_of;
        uint32_t task;
        for (plan->groups = 0; plan->groups < plan->capacity && next_task(&at, &task); plan->groups++)
            plan->of[plan->groups] = (uint16_t)task;
        if (*at == 0) return TASTE_STATUS_OK;
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "--task-of names more classes than the %u that there is room for. Build with --max-classes.",
                          plan->capacity);
    }
    plan->groups = e.groups;
    for (uint32_t i = 0; i < e.groups; i++) {
        uint64_t group = order_sample(options->order_seed, 0, e.groups, i);
        plan->of[group] = (uint16_t)((uint64_t)i * plan->tasks / e.groups);
    }
    return TASTE_STATUS_OK;
}

typedef struct sorting {
    const task_plan *plan;
    uint32_t per_class;
    uint32_t classes;
    uint32_t *counts;
    stream *stream;
    int counting; /* else filling: `first[task]` is the end of what is there */
} sorting;

static taste_status sort_row(void *context, uint64_t row, int32_t label, int32_t group, taste_error *error) {
    sorting *s = context;
    uint32_t *first = s->stream->first;
    if (group < 0 || (uint32_t)group >= s->plan->groups || label < 0 || (uint32_t)label >= s->classes) {
        return taste_fail(error, TASTE_STATUS_BAD_DATA,
                          "sample %llu of %.100s is of %s %d, which is in no task (there are %u). Declare it.",
                          (unsigned long long)row, s->stream->samples->file.path,
                          s->plan->by_domain ? "domain" : "class", group, s->plan->groups);
    }
    uint32_t task = s->plan->of[group];
    if (s->per_class > 0 && s->counts[label]++ >= s->per_class) return TASTE_STATUS_OK;
    if (s->counting)
        first[task + 1]++;
    else
        s->stream->rows[first[task]++] = (uint32_t)row;
    return TASTE_STATUS_OK;
}

taste_status stream_fill(const task_plan *plan, uint32_t per_class, uint32_t classes, uint32_t *counts, stream *s,
                         taste_error *error) {
    sorting sorting = {plan, per_class, classes, counts, s, 1};
    if (plan->by_domain && !s->samples->has_domain) {
        return taste_fail(error, TASTE_STATUS_BAD_DATA, "%.120s has no tensor 'domain'. Pack the data with domains.",
                          s->samples->file.path);
    }
    memset(s->first, 0, (plan->tasks + 1) * sizeof *s->first);
    memset(counts, 0, classes * sizeof *counts);
    taste_status status = walk(s->samples, plan->by_domain, sort_row, &sorting, error);
    if (status != TASTE_STATUS_OK) return status;
    for (uint32_t t = 0; t < plan->tasks; t++) {
        if (s->first[t + 1] == 0) {
            return taste_fail(error, TASTE_STATUS_BAD_DATA,
                              "task %u of %u has no samples in %.120s (%u %s). Use fewer tasks, or declare others.", t,
                              plan->tasks, s->samples->file.path, plan->groups,
                              plan->by_domain ? "domains" : "classes");
        }
        s->first[t + 1] += s->first[t];
    }
    sorting.counting = 0;
    memset(counts, 0, classes * sizeof *counts);
    status = walk(s->samples, plan->by_domain, sort_row, &sorting, error);
    /* Every start has moved to its end, which is the next one's start. */
    memmove(s->first + 1, s->first, plan->tasks * sizeof *s->first);
    s->first[0] = 0;
    return status;
}
