/* What taste_session_set_class_groups asks for: between forward and loss, and between loss and backward. */
#ifndef TASTE_CLASS_GROUPS_H
#define TASTE_CLASS_GROUPS_H

#include "session.h"

/* Lowers the logits of every class outside the group of its row's label. Nothing without groups. */
void taste_mask_logits(const taste_session *session, const taste_program *program, uint32_t batch_size);

/* Kernels' exp saturates above zero: what is left of such a class's gradient becomes 0. */
void taste_mask_gradient(const taste_session *session, const taste_program *program, uint32_t batch_size);

#endif
