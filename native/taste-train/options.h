/* The command line as one value. */
#ifndef TASTE_TRAIN_OPTIONS_H
#define TASTE_TRAIN_OPTIONS_H

#include "taste.h"

/* Of `learn`, which has flags of its own. */
typedef struct learn_options {
    int32_t scenario; /* learn_scenario */
    uint32_t tasks;
    const char *task_of; /* "0,0,1,1": the task of each class; NULL: classes are shared out in a keyed order */
    uint64_t order_seed;
    uint32_t buffer; /* samples; 0: no replay */
    int32_t policy;  /* taste_replay_policy */
    double replay_ratio;
    int32_t rate_rule; /* learn_rate_rule */
    double rate_cap;
    uint32_t passes;
    uint32_t samples_per_class; /* 0: all */
    int32_t loss_classes;       /* learn_loss_classes */
} learn_options;

typedef enum learn_scenario { LEARN_CIL, LEARN_TIL, LEARN_DOMAIN } learn_scenario;
typedef enum learn_rate_rule { LEARN_RATE_LINEAR, LEARN_RATE_CONSTANT } learn_rate_rule;
typedef enum learn_loss_classes { LEARN_LOSS_ALL, LEARN_LOSS_SEEN } learn_loss_classes;

typedef struct options {
    const char *verb;
    const char *program;      /* NULL: the verb's own */
    uint32_t batch_size;      /* 0: not given */
    uint32_t effective_batch; /* samples an optimizer step; 0: batch_size */
    double seconds;
    uint32_t min_steps;
    uint32_t warmup;
    uint32_t threads; /* 0: all cores */
    uint32_t cores[TASTE_MAX_THREADS];
    uint32_t core_count;
    uint64_t memory; /* bytes that may be used; 0: what is free */
    uint64_t seed;
    int seed_given;
    const char *weights;
    const char *samples;
    const char *save;
    const char *dump_gradients;
    const char *logits;
    const char *test;       /* NULL: no evaluation in between */
    uint32_t steps;         /* 0: epochs */
    double epochs;          /* 0: steps */
    uint64_t limit;         /* samples that eval looks at; 0: all */
    int32_t schedule;       /* schedule_kind */
    double warmup_share;    /* of all steps */
    double step_every;      /* epochs */
    double step_gamma;
    uint32_t interval;            /* epochs after which the effective batch grows; 0: it stays */
    double batch_factor;          /* by which it grows */
    uint32_t effective_batch_cap; /* up to where */
    double lr_decay;              /* of the rate after an interval, were the effective batch the same */
    taste_hyper hyper;
    int learning_rate_given;
    float label_smoothing;
    uint32_t eval_every; /* epochs; 0: at the end only */
    int32_t augment;     /* augment_level */
    int bn_time_constant; /* running statistics move as with whole effective batches */
    const char *checkpoint; /* folder; NULL: none */
    double checkpoint_seconds;
    uint32_t checkpoint_steps; /* instead of seconds, where not 0 */
    int resume;
    uint64_t beside_bytes;  /* no flag: set by a verb that keeps more than its batches */
    struct learn_options learn;
    const char *run; /* folder of a run that outlives who started it; NULL: an ordinary process */
    int32_t foreground; /* of such a run: the process that is called is its watcher, and ends with it */
    int32_t follow;     /* of such a run: the process that is called says what the run says, to its end */
    uint64_t frequency;  /* kHz; 0: unchanged */
    double power_every;  /* seconds between samples of the sensors; 0: none */
    const char *control; /* file that moves the operating point between steps; NULL: none */
    double report_rate; /* step events a second, at most */
    const char *system_root; /* put before /proc and /sys: tests hand in a tree of their own */
} options;

/* Reads argv into `out`; USAGE and the reason otherwise. */
taste_status options_parse(int argc, char **argv, options *out, taste_error *error);

#endif
