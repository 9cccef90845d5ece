#include "class_groups.h"

#include <math.h>

#include "error.h"
#include "layout.h"

enum { PIECE = 256 }; /* elements of a row looked at at a time */

/* So far below the others that a class adds nothing to their sum in float32. */
static const float far_below = 1000;

taste_status taste_session_set_class_groups(taste_session *session, const uint16_t *groups) {
    const taste_model *model = session->model;
    int has_labels = 0;
    for (uint32_t i = 0; i < model->program_count; i++) {
        uint16_t target = model->programs[i].target;
        has_labels |= target != TASTE_NO_TENSOR && model->tensors[target].dtype == TASTE_DTYPE_INT32;
    }
    if (groups != NULL && !has_labels) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "groups of classes for %s, whose loss has no labels. Leave them out.", model->name);
    }
    if (groups != NULL && session->label_smoothing > 0) {
        return taste_fail(&session->error, TASTE_STATUS_USAGE,
                          "groups of classes together with label smoothing %g. Use one of them.",
                          (double)session->label_smoothing);
    }
    session->groups = groups;
    return TASTE_STATUS_OK;
}

/* The rows of a program's logits. */
typedef struct rows {
    const taste_tensor *logits, *target;
    void *stored;
    const void *stored_labels;
    uint32_t batch_size, classes;
    uint64_t count;
} rows;

static rows rows_of(const taste_session *session, const taste_program *program, uint16_t tensor, uint32_t batch_size) {
    const taste_model *model = session->model;
    rows r = {.logits = &model->tensors[tensor], .target = &model->tensors[program->target], .batch_size = batch_size};
    r.stored = taste_session_at(session, r.logits, batch_size);
    r.stored_labels = taste_session_at(session, r.target, batch_size);
    r.count = taste_layout_count(r.target, batch_size);
    r.classes = (uint32_t)(taste_layout_count(r.logits, batch_size) / r.count);
    return r;
}

static uint16_t group_of_row(const rows *r, const uint16_t *groups, uint64_t row) {
    int32_t label;
    taste_layout_gather(r->target, r->batch_size, row, 1, r->stored_labels, &label);
    return groups[label];
}

/* The largest value of a row within its group. */
static float highest_of(const rows *r, const uint16_t *groups, uint64_t row, uint16_t group) {
    float piece[PIECE], highest = -INFINITY;
    for (uint32_t first = 0; first < r->classes; first += PIECE) {
        uint32_t n = r->classes - first < PIECE ? r->classes - first : PIECE;
        taste_layout_gather(r->logits, r->batch_size, row * r->classes + first, n, r->stored, piece);
        for (uint32_t i = 0; i < n; i++) {
            /* A NaN has to be seen by the loss. */
            if (groups[first + i] == group && !(piece[i] <= highest)) highest = piece[i];
        }
    }
    return highest;
}

static void replace_others(const rows *r, const uint16_t *groups, uint64_t row, uint16_t group, float value) {
    float piece[PIECE];
    for (uint32_t first = 0; first < r->classes; first += PIECE) {
        uint32_t n = r->classes - first < PIECE ? r->classes - first : PIECE;
        uint64_t at = row * r->classes + first;
        taste_layout_gather(r->logits, r->batch_size, at, n, r->stored, piece);
        for (uint32_t i = 0; i < n; i++) {
            if (groups[first + i] != group) piece[i] = value;
        }
        taste_layout_scatter(r->logits, r->batch_size, at, n, piece, r->stored);
    }
}

void taste_mask_logits(const taste_session *session, const taste_program *program, uint32_t batch_size) {
    if (session->groups == NULL) return;
    rows r = rows_of(session, program, program->output, batch_size);
    for (uint64_t row = 0; row < r.count; row++) {
        uint16_t group = group_of_row(&r, session->groups, row);
        replace_others(&r, session->groups, row, group, highest_of(&r, session->groups, row, group) - far_below);
    }
}

void taste_mask_gradient(const taste_session *session, const taste_program *program, uint32_t batch_size) {
    uint16_t gradient = program->blocks[session->model->block_count - 1].output_gradient;
    if (session->groups == NULL || gradient == TASTE_NO_TENSOR) return;
    rows r = rows_of(session, program, gradient, batch_size);
    for (uint64_t row = 0; row < r.count; row++)
        replace_others(&r, session->groups, row, group_of_row(&r, session->groups, row), 0);
}
