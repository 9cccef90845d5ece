#include "options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

typedef enum kind { TEXT, COUNT, BYTES, SEED, SECONDS, FACTOR, SHARE, CHOICE, PERIOD, SWITCH, CORES } kind;

typedef struct flag {
    const char *name;
    const char *verbs; /* those that know it, by their first letters */
    kind kind;
    size_t at;
    double lowest;
    const char *choices; /* of a CHOICE: names separated by |, by their numbers */
} flag;

#define AT(field) offsetof(options, field)

static const flag flags[] = {
    {"--program", "ibp", TEXT, AT(program), 0, NULL},
    {"--batch-size", "ibptel", COUNT, AT(batch_size), 1, NULL},
    {"--effective-batch", "it", COUNT, AT(effective_batch), 1, NULL},
    {"--seconds", "bpm", SECONDS, AT(seconds), 0, NULL},
    {"--min-steps", "b", COUNT, AT(min_steps), 1, NULL},
    {"--warmup", "b", COUNT, AT(warmup), 0, NULL},
    {"--threads", "ibptel", COUNT, AT(threads), 1, NULL},
    {"--cores", "ibptel", CORES, AT(cores), 0, NULL},
    {"--memory", "ibptel", BYTES, AT(memory), 1, NULL},
    {"--seed", "bptel", SEED, AT(seed), 0, NULL},
    {"--weights", "bptel", TEXT, AT(weights), 0, NULL},
    {"--samples", "tel", TEXT, AT(samples), 0, NULL},
    {"--logits", "e", TEXT, AT(logits), 0, NULL},
    {"--limit", "e", SEED, AT(limit), 1, NULL},
    {"--test", "tl", TEXT, AT(test), 0, NULL},
    {"--save", "tl", TEXT, AT(save), 0, NULL},
    {"--dump-gradients", "t", TEXT, AT(dump_gradients), 0, NULL},
    {"--steps", "t", COUNT, AT(steps), 1, NULL},
    {"--epochs", "t", SECONDS, AT(epochs), 1e-9, NULL},
    {"--lr", "tl", FACTOR, AT(hyper.learning_rate), 0, NULL},
    {"--schedule", "t", CHOICE, AT(schedule), 0, "constant|step|cosine|linear"},
    {"--warmup", "t", SHARE, AT(warmup_share), 0, NULL},
    {"--step-every", "t", SECONDS, AT(step_every), 1e-9, NULL},
    {"--step-gamma", "t", SECONDS, AT(step_gamma), 0, NULL},
    {"--interval", "it", COUNT, AT(interval), 1, NULL},
    {"--batch-factor", "it", SECONDS, AT(batch_factor), 1, NULL},
    {"--effective-batch-cap", "it", COUNT, AT(effective_batch_cap), 1, NULL},
    {"--lr-decay", "it", SECONDS, AT(lr_decay), 1e-9, NULL},
    {"--optimizer", "itl", CHOICE, AT(hyper.optimizer), 0, "sgd|adam|adamw"},
    {"--momentum", "tl", FACTOR, AT(hyper.momentum), 0, NULL},
    {"--nesterov", "tl", SWITCH, AT(hyper.nesterov), 0, NULL},
    {"--beta1", "tl", FACTOR, AT(hyper.beta1), 0, NULL},
    {"--beta2", "tl", FACTOR, AT(hyper.beta2), 0, NULL},
    {"--eps", "tl", FACTOR, AT(hyper.epsilon), 0, NULL},
    {"--weight-decay", "tl", FACTOR, AT(hyper.weight_decay), 0, NULL},
    {"--no-decay-norm", "tl", SWITCH, AT(hyper.no_decay_norm), 0, NULL},
    {"--grad-clip", "itl", FACTOR, AT(hyper.gradient_clip), 0, NULL},
    {"--label-smoothing", "t", FACTOR, AT(label_smoothing), 0, NULL},
    {"--eval-every", "t", COUNT, AT(eval_every), 0, NULL},
    {"--augment", "tl", CHOICE, AT(augment), 0, "none|flip|crop-flip|crop-flip-cutout"},
    {"--bn-time-constant", "t", SWITCH, AT(bn_time_constant), 0, NULL},
    {"--checkpoint", "tl", TEXT, AT(checkpoint), 0, NULL},
    {"--checkpoint-every", "tl", PERIOD, AT(checkpoint_seconds), 0, NULL},
    {"--resume", "tl", SWITCH, AT(resume), 0, NULL},
    {"--report-rate", "tl", SECONDS, AT(report_rate), 0, NULL},
    {"--scenario", "l", CHOICE, AT(learn.scenario), 0, "cil|til|domain"},
    {"--tasks", "l", COUNT, AT(learn.tasks), 1, NULL},
    {"--task-of", "l", TEXT, AT(learn.task_of), 0, NULL},
    {"--order-seed", "l", SEED, AT(learn.order_seed), 0, NULL},
    {"--buffer", "l", COUNT, AT(learn.buffer), 0, NULL},
    {"--memory-policy", "l", CHOICE, AT(learn.policy), 0, "reservoir|class-balanced|ring"},
    {"--replay-ratio", "l", SHARE, AT(learn.replay_ratio), 0, NULL},
    {"--lr-rule", "l", CHOICE, AT(learn.rate_rule), 0, "linear|constant"},
    {"--lr-cap", "l", SECONDS, AT(learn.rate_cap), 0, NULL},
    {"--passes", "l", COUNT, AT(learn.passes), 1, NULL},
    {"--samples-per-class", "l", COUNT, AT(learn.samples_per_class), 1, NULL},
    {"--loss-classes", "l", CHOICE, AT(learn.loss_classes), 0, "all|seen"},
    {"--run", "btl", TEXT, AT(run), 0, NULL},
    {"--foreground", "btl", SWITCH, AT(foreground), 0, NULL},
    {"--follow", "btl", SWITCH, AT(follow), 0, NULL},
    {"--frequency", "bt", SEED, AT(frequency), 1, NULL},
    {"--power-every", "btm", SECONDS, AT(power_every), 0.001, NULL},
    {"--control", "t", TEXT, AT(control), 0, NULL},
    {"--system-root", "ibptelm", TEXT, AT(system_root), 0, NULL},
};

/* A whole decimal number up to `highest`; 0: it is none. */
static int read_number(const char *text, uint64_t highest, uint64_t *out) {
    char *end;
    if (*text < '0' || *text > '9') return 0;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != 0 || value > highest) return 0;
    *out = value;
    return 1;
}

static int read_real(const char *text, double *out) {
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    return end != text && *end == 0 && errno == 0 && isfinite(*out);
}

/* 0,2,3: distinct cores. */
static int read_cores(const char *text, options *out) {
    uint32_t count = 0;
    for (;;) {
        size_t length = strcspn(text, ",");
        char number[8] = {0};
        uint64_t core;
        if (length == 0 || length >= sizeof number || count == TASTE_MAX_THREADS) return 0;
        memcpy(number, text, length);
        if (!read_number(number, 1023, &core)) return 0;
        for (uint32_t i = 0; i < count; i++) {
            if (out->cores[i] == core) return 0;
        }
        out->cores[count++] = (uint32_t)core;
        if (text[length] == 0) break;
        text += length + 1;
    }
    out->core_count = count;
    return 1;
}

/* The place of a name in "one|two|three". */
static int read_choice(const char *text, const char *choices, int32_t *out) {
    size_t length = strlen(text);
    for (int32_t number = 0; length > 0; number++) {
        size_t n = strcspn(choices, "|");
        if (n == length && strncmp(choices, text, n) == 0) {
            *out = number;
            return 1;
        }
        if (choices[n] == 0) break;
        choices += n + 1;
    }
    return 0;
}

/* "90" or "2.5": seconds; "50steps": optimizer steps. */
static int read_period(const char *text, options *out) {
    char number[16] = {0};
    uint64_t steps;
    size_t length = strlen(text);
    if (length <= 5 || strcmp(text + length - 5, "steps") != 0)
        return read_real(text, &out->checkpoint_seconds) && out->checkpoint_seconds >= 0;
    if (length - 5 >= sizeof number) return 0;
    memcpy(number, text, length - 5);
    if (!read_number(number, INT32_MAX, &steps) || steps == 0) return 0;
    out->checkpoint_steps = (uint32_t)steps;
    return 1;
}

static int read_value(const flag *f, const char *text, options *out) {
    void *field = (char *)out + f->at;
    uint64_t number;
    double real;
    switch (f->kind) {
    case TEXT: *(const char **)field = text; return *text != 0;
    case COUNT:
        if (!read_number(text, INT32_MAX, &number) || (double)number < f->lowest) return 0;
        *(uint32_t *)field = (uint32_t)number;
        return 1;
    case BYTES:
    case SEED:
        if (!read_number(text, UINT64_MAX, &number) || (double)number < f->lowest) return 0;
        *(uint64_t *)field = number;
        return 1;
    case SECONDS: return read_real(text, field) && *(double *)field >= f->lowest;
    case FACTOR:
        if (!read_real(text, &real) || real < f->lowest) return 0;
        *(float *)field = (float)real;
        return 1;
    case SHARE: return read_real(text, field) && *(double *)field >= 0 && *(double *)field <= 1;
    case CHOICE: return read_choice(text, f->choices, field);
    case PERIOD: return read_period(text, out);
    default: return read_cores(text, out);
    }
}

/* The flag of that name that the verb knows. */
static const flag *find_flag(const char *name, char verb) {
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (strcmp(flags[i].name, name) == 0 && strchr(flags[i].verbs, verb) != NULL) return &flags[i];
    }
    return NULL;
}

/* An effective batch that grows: all four flags or none. */
static taste_status check_growth(const options *o, taste_error *error) {
    if (o->interval == 0 && o->batch_factor == 0 && o->effective_batch_cap == 0 && o->lr_decay == 0)
        return TASTE_STATUS_OK;
    if (o->interval == 0 || o->batch_factor == 0 || o->effective_batch_cap == 0 || o->lr_decay == 0 ||
        o->effective_batch == 0) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "an effective batch that grows needs all of --effective-batch, --interval, --batch-factor, "
                          "--effective-batch-cap and --lr-decay. Give them.");
    }
    if (o->schedule != 0) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "--schedule with --interval: the effective batch decides the rate. Leave one of them out.");
    }
    if (o->effective_batch > o->effective_batch_cap || o->lr_decay > 1) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "effective batch %u with a cap of %u, learning rate decay %g. Use a cap from the effective "
                          "batch on, and a decay up to 1.",
                          o->effective_batch, o->effective_batch_cap, o->lr_decay);
    }
    int grows = floor(o->effective_batch * o->batch_factor) > o->effective_batch;
    if (!grows && o->effective_batch < o->effective_batch_cap) {
        return taste_fail(error, TASTE_STATUS_USAGE, "effective batch %u does not grow by %g. Use a larger factor.",
                          o->effective_batch, o->batch_factor);
    }
    return TASTE_STATUS_OK;
}

static taste_status check_training(const options *o, taste_error *error) {
    if ((o->steps == 0) == (o->epochs == 0) || !o->learning_rate_given) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "train without its length or learning rate. Give one of --epochs E and --steps K, and --lr L.");
    }
    uint32_t largest = o->interval > 0 ? o->effective_batch_cap : o->effective_batch;
    if (largest != 0 && largest < o->batch_size) {
        return taste_fail(error, TASTE_STATUS_USAGE, "effective batch %u is smaller than batch size %u. Correct one.",
                          largest, o->batch_size);
    }
    return check_growth(o, error);
}

static taste_status check_learning(const options *o, taste_error *error) {
    const learn_options *l = &o->learn;
    if (o->test == NULL || !o->learning_rate_given) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "learn without test data or learning rate. Give --test FILE and --lr L.");
    }
    if (l->replay_ratio >= 1) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "replay ratio %g leaves no rows for the stream. Use one below 1.", l->replay_ratio);
    }
    if (l->loss_classes == LEARN_LOSS_SEEN && l->scenario != LEARN_CIL) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--loss-classes seen is of --scenario cil. Leave it out.");
    }
    if (l->tasks > 1024) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%u tasks. Use 1 to 1024.", l->tasks);
    }
    return TASTE_STATUS_OK;
}

/* What train and learn have in common. */
static taste_status check_optimizer(const options *o, taste_error *error) {
    if (o->hyper.nesterov && !(o->hyper.momentum > 0)) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--nesterov without momentum. Give --momentum M.");
    }
    if (o->hyper.optimizer != TASTE_OPTIMIZER_SGD && o->hyper.momentum > 0) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--momentum %g with Adam. Use --beta1.",
                          (double)o->hyper.momentum);
    }
    if (!(o->hyper.beta1 < 1) || !(o->hyper.beta2 < 1)) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--beta1 %g, --beta2 %g. Both must be below 1.",
                          (double)o->hyper.beta1, (double)o->hyper.beta2);
    }
    if (o->checkpoint == NULL && o->resume) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--resume without a folder. Give --checkpoint DIR.");
    }
    return TASTE_STATUS_OK;
}

/* Flags that only make sense together. */
static taste_status check_together(const options *o, taste_error *error) {
    char verb = o->verb[0];
    if (verb != 'i' && verb != 'm' && o->batch_size == 0)
        return taste_fail(error, TASTE_STATUS_USAGE, "%s without a batch size. Give --batch-size N.", o->verb);
    if ((verb == 't' || verb == 'e' || verb == 'l') && o->samples == NULL) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%s without samples. Give --samples FILE.", o->verb);
    }
    if (o->core_count > 0 && o->threads > o->core_count) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%u threads on %u cores. Name as many cores as threads.",
                          o->threads, o->core_count);
    }
    if ((o->foreground || o->follow) && o->run == NULL) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%s without a run. Give --run DIR.",
                          o->foreground ? "--foreground" : "--follow");
    }
    if (o->foreground && o->follow) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--foreground and --follow. Give one of them.");
    }
    if (verb != 't' && verb != 'l') return TASTE_STATUS_OK;
    taste_status status = verb == 't' ? check_training(o, error) : check_learning(o, error);
    return status == TASTE_STATUS_OK ? check_optimizer(o, error) : status;
}

taste_status options_parse(int argc, char **argv, options *out, taste_error *error) {
    static const char *const verbs[] = {"info", "bench", "profile", "train", "eval", "learn", "monitor"};
    *out = (options){.seconds = 2, .min_steps = 5, .warmup = 3, .system_root = "", .report_rate = 10};
    out->hyper = (taste_hyper){.beta1 = 0.9f, .beta2 = 0.999f, .epsilon = 1e-8f};
    out->checkpoint_seconds = 300;
    out->step_every = 30;
    out->step_gamma = 0.1;
    out->learn = (learn_options){.tasks = 5, .replay_ratio = 0.5, .rate_cap = 0.4, .passes = 1};
    for (size_t i = 0; argc > 1 && i < sizeof verbs / sizeof *verbs; i++) {
        if (strcmp(argv[1], verbs[i]) == 0) out->verb = verbs[i];
    }
    if (out->verb == NULL) {
        return taste_fail(error, TASTE_STATUS_USAGE, "no verb '%.40s'. Use info, bench, profile, train, eval, learn or monitor.",
                          argc > 1 ? argv[1] : "");
    }
    for (int i = 2; i < argc; i++) {
        const flag *f = find_flag(argv[i], out->verb[0]);
        if (f == NULL) {
            return taste_fail(error, TASTE_STATUS_USAGE, "%s does not know '%.60s'. Leave it out.", out->verb, argv[i]);
        }
        if (f->kind == SWITCH) {
            *(int32_t *)(void *)((char *)out + f->at) = 1;
            continue;
        }
        const char *value = i + 1 < argc ? argv[++i] : "";
        if (!read_value(f, value, out)) {
            return taste_fail(error, TASTE_STATUS_USAGE, "%s '%.60s' is not a value that it takes. Correct it.",
                              f->name, value);
        }
        if (f->at == AT(hyper.learning_rate)) out->learning_rate_given = 1;
        if (f->at == AT(seed)) out->seed_given = 1;
    }
    return check_together(out, error);
}
