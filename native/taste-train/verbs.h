/* One function a verb. */
#ifndef TASTE_TRAIN_VERBS_H
#define TASTE_TRAIN_VERBS_H

#include "options.h"

taste_status verb_info(const options *options, taste_error *error);
taste_status verb_bench(const options *options, taste_error *error);
taste_status verb_profile(const options *options, taste_error *error);
taste_status verb_train(const options *options, taste_error *error);
taste_status verb_monitor(const options *options, taste_error *error);
taste_status verb_learn(const options *options, taste_error *error);
taste_status verb_eval(const options *options, taste_error *error);

#endif
