#include "options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

typedef enum kind { TEXT, COUNT, BYTES, SEED, SECONDS, FACTOR, CORES, NESTEROV } kind;

typedef struct flag {
    const char *name;
    const char *verbs; /* those that know it, by their first letters */
    kind kind;
    size_t at;
    double lowest;
} flag;

#define AT(field) offsetof(options, field)

static const flag flags[] = {
    {"--program", "ibp", TEXT, AT(program), 0},
    {"--batch-size", "ibpte", COUNT, AT(batch_size), 1},
    {"--effective-batch", "it", COUNT, AT(effective_batch), 1},
    {"--seconds", "bp", SECONDS, AT(seconds), 0},
    {"--min-steps", "b", COUNT, AT(min_steps), 1},
    {"--warmup", "b", COUNT, AT(warmup), 0},
    {"--threads", "ibpte", COUNT, AT(threads), 1},
    {"--cores", "ibpte", CORES, AT(cores), 0},
    {"--memory", "ibpte", BYTES, AT(memory), 1},
    {"--seed", "bpte", SEED, AT(seed), 0},
    {"--weights", "bpte", TEXT, AT(weights), 0},
    {"--samples", "te", TEXT, AT(samples), 0},
    {"--save", "t", TEXT, AT(save), 0},
    {"--dump-gradients", "t", TEXT, AT(dump_gradients), 0},
    {"--logits", "e", TEXT, AT(logits), 0},
    {"--steps", "t", COUNT, AT(steps), 1},
    {"--warmup-steps", "t", COUNT, AT(warmup_steps), 0},
    {"--lr", "t", FACTOR, AT(hyper.learning_rate), 0},
    {"--momentum", "t", FACTOR, AT(hyper.momentum), 0},
    {"--nesterov", "t", NESTEROV, AT(hyper.nesterov), 0},
    {"--weight-decay", "t", FACTOR, AT(hyper.weight_decay), 0},
    {"--grad-clip", "t", FACTOR, AT(hyper.gradient_clip), 0},
    {"--system-root", "ibpte", TEXT, AT(system_root), 0},
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
    default: return read_cores(text, out);
    }
}

static const flag *find_flag(const char *name) {
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (strcmp(flags[i].name, name) == 0) return &flags[i];
    }
    return NULL;
}

/* Flags that only make sense together. */
static taste_status check_together(const options *o, taste_error *error) {
    char verb = o->verb[0];
    if (verb != 'i' && o->batch_size == 0)
        return taste_fail(error, TASTE_STATUS_USAGE, "%s without a batch size. Give --batch-size N.", o->verb);
    if ((verb == 't' || verb == 'e') && o->samples == NULL) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%s without samples. Give --samples FILE.", o->verb);
    }
    if (verb == 't' && (o->steps == 0 || !o->learning_rate_given)) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "train without its length or learning rate. Give --steps K and --lr L.");
    }
    if (o->effective_batch != 0 && o->effective_batch < o->batch_size) {
        return taste_fail(error, TASTE_STATUS_USAGE, "effective batch %u is smaller than batch size %u. Correct one.",
                          o->effective_batch, o->batch_size);
    }
    if (o->hyper.nesterov && !(o->hyper.momentum > 0)) {
        return taste_fail(error, TASTE_STATUS_USAGE, "--nesterov without momentum. Give --momentum M.");
    }
    if (o->core_count > 0 && o->threads > o->core_count) {
        return taste_fail(error, TASTE_STATUS_USAGE, "%u threads on %u cores. Name as many cores as threads.",
                          o->threads, o->core_count);
    }
    return TASTE_STATUS_OK;
}

taste_status options_parse(int argc, char **argv, options *out, taste_error *error) {
    static const char *const verbs[] = {"info", "bench", "profile", "train", "eval"};
    *out = (options){.seconds = 2, .min_steps = 5, .warmup = 3, .system_root = ""};
    for (size_t i = 0; argc > 1 && i < sizeof verbs / sizeof *verbs; i++) {
        if (strcmp(argv[1], verbs[i]) == 0) out->verb = verbs[i];
    }
    if (out->verb == NULL) {
        return taste_fail(error, TASTE_STATUS_USAGE, "no verb '%.40s'. Use taste-train info, bench, profile, train or eval.",
                          argc > 1 ? argv[1] : "");
    }
    for (int i = 2; i < argc; i++) {
        const flag *f = find_flag(argv[i]);
        if (f == NULL || strchr(f->verbs, out->verb[0]) == NULL) {
            return taste_fail(error, TASTE_STATUS_USAGE, "%s does not know '%.60s'. Leave it out.", out->verb, argv[i]);
        }
        if (f->kind == NESTEROV) {
            out->hyper.nesterov = 1;
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
