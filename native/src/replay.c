/* The replay buffer. Its block holds no pointers: the bytes can be kept in a file and opened again elsewhere. */
#include <string.h>

#include "error.h"
#include "generator.h"
#include "taste.h"

enum { MAGIC = 0x31594c52 }; /* "RLY1" */

/* In front of the block; behind it, at offsets that follow from the options, the arrays. */
struct taste_replay {
    uint32_t magic;
    uint32_t count; /* slots in use: [0, count) */
    taste_replay_options options;
    uint64_t draws; /* random numbers used */
    uint64_t added;
};

/* Offsets of the arrays. */
typedef struct parts {
    uint64_t seen;   /* uint64 a class: samples added */
    uint64_t stored; /* uint32 a class */
    uint64_t full;   /* uint32 a class: has been the largest of a full buffer (class-balanced) */
    uint64_t places; /* uint32 a slot: slots of a class, oldest first until it wraps (ring) */
    uint64_t labels; /* int32 a slot */
    uint64_t marks;  /* a byte a slot, 0 between draws */
    uint64_t samples;
    uint64_t end;
} parts;

static uint64_t reserve(uint64_t *end, uint64_t bytes) {
    uint64_t at = *end;
    *end += (bytes + TASTE_ALIGNMENT - 1) / TASTE_ALIGNMENT * TASTE_ALIGNMENT;
    return at;
}

static parts parts_of(const taste_replay_options *o) {
    parts p = {0};
    (void)reserve(&p.end, sizeof(taste_replay));
    p.seen = reserve(&p.end, (uint64_t)o->classes * 8);
    p.stored = reserve(&p.end, (uint64_t)o->classes * 4);
    p.full = reserve(&p.end, (uint64_t)o->classes * 4);
    p.places = reserve(&p.end, (uint64_t)o->capacity * 4);
    p.labels = reserve(&p.end, (uint64_t)o->capacity * 4);
    p.marks = reserve(&p.end, o->capacity);
    p.samples = reserve(&p.end, (uint64_t)o->capacity * o->sample_bytes);
    return p;
}

static void *at(const taste_replay *replay, uint64_t offset) {
    return (unsigned char *)(uintptr_t)replay + offset;
}

/* Uniform in [0, n): the high half of a random number times n. */
static uint64_t below(taste_replay *replay, uint64_t n) {
    __extension__ typedef unsigned __int128 wide;
    uint64_t bits = taste_splitmix64(taste_generator_key(replay->options.seed, "replay") + replay->draws++);
    return (uint64_t)((wide)bits * n >> 64);
}

size_t taste_replay_bytes(const taste_replay_options *options) {
    const taste_replay_options *o = options;
    if (o->capacity == 0 || o->capacity > INT32_MAX || o->sample_bytes == 0 || o->sample_bytes > INT32_MAX) return 0;
    if (o->classes == 0 || o->capacity < o->classes) return 0;
    if (o->policy < TASTE_REPLAY_RESERVOIR || o->policy > TASTE_REPLAY_RING) return 0;
    return (size_t)parts_of(o).end;
}

static taste_status check_block(const taste_replay_options *options, const void *block, size_t block_bytes,
                                taste_error *error) {
    size_t bytes = taste_replay_bytes(options);
    if (bytes == 0) {
        return taste_fail(error, TASTE_STATUS_USAGE,
                          "a replay buffer of %u samples of %u bytes for %u classes. It must hold at least one sample of "
                          "each class.",
                          options->capacity, options->sample_bytes, options->classes);
    }
    if ((uintptr_t)block % TASTE_ALIGNMENT != 0) {
        return taste_fail(error, TASTE_STATUS_USAGE, "the replay buffer's block is not aligned to %d bytes. Align it.",
                          TASTE_ALIGNMENT);
    }
    if (block_bytes >= bytes) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT,
                      "a block of %zu bytes is too small for the replay buffer, which needs %zu. Use taste_replay_bytes.",
                      block_bytes, bytes);
}

taste_status taste_replay_init(const taste_replay_options *options, void *block, size_t block_bytes,
                               taste_replay **out_replay, taste_error *out_error) {
    taste_status status = check_block(options, block, block_bytes, out_error);
    if (status != TASTE_STATUS_OK) return status;
    taste_replay *replay = block;
    memset(block, 0, (size_t)parts_of(options).end);
    replay->magic = MAGIC;
    replay->options = *options;
    *out_replay = replay;
    return TASTE_STATUS_OK;
}

/* Whether slots, labels and counts of a block that came from a file agree. */
static int is_consistent(const taste_replay *replay, const parts *p) {
    const taste_replay_options *o = &replay->options;
    const int32_t *labels = at(replay, p->labels);
    const uint32_t *stored = at(replay, p->stored), *places = at(replay, p->places);
    uint64_t total = 0;
    uint32_t quota = o->capacity / o->classes;
    if (replay->count > o->capacity || replay->added < replay->count) return 0;
    for (uint32_t i = 0; i < o->capacity; i++) {
        if (places[i] >= o->capacity || labels[i] < 0 || (uint32_t)labels[i] >= o->classes) return 0;
    }
    for (uint32_t c = 0; c < o->classes; c++) {
        if (o->policy == TASTE_REPLAY_RING && stored[c] > quota) return 0;
        total += stored[c];
        /* What is looked for by drawing slots must be there. */
        uint32_t found = 0;
        for (uint32_t i = 0; stored[c] > 0 && i < replay->count; i++) found += (uint32_t)labels[i] == c;
        if (found != stored[c]) return 0;
    }
    return total == replay->count;
}

taste_status taste_replay_open(const taste_replay_options *options, void *block, size_t block_bytes,
                               taste_replay **out_replay, taste_error *out_error) {
    taste_status status = check_block(options, block, block_bytes, out_error);
    if (status != TASTE_STATUS_OK) return status;
    taste_replay *replay = block;
    const taste_replay_options *theirs = &replay->options;
    if (replay->magic != MAGIC) {
        return taste_fail(out_error, TASTE_STATUS_CORRUPT, "the block holds no replay buffer. Start a new one.");
    }
    if (theirs->capacity != options->capacity || theirs->sample_bytes != options->sample_bytes ||
        theirs->classes != options->classes || theirs->policy != options->policy || theirs->seed != options->seed) {
        return taste_fail(out_error, TASTE_STATUS_INCOMPATIBLE,
                          "the replay buffer holds %u samples of %u bytes, %u classes, this run's %u of %u, %u. Use the "
                          "options it was made with.",
                          theirs->capacity, theirs->sample_bytes, theirs->classes, options->capacity,
                          options->sample_bytes, options->classes);
    }
    parts p = parts_of(options);
    if (!is_consistent(replay, &p)) {
        return taste_fail(out_error, TASTE_STATUS_CORRUPT, "the replay buffer contradicts itself. Start a new one.");
    }
    memset(at(replay, p.marks), 0, options->capacity);
    *out_replay = replay;
    return TASTE_STATUS_OK;
}

/* Slot for the sample, or capacity: it is not kept. Algorithm R (Vitter 1985). */
static uint32_t choose_reservoir(taste_replay *replay) {
    uint32_t capacity = replay->options.capacity;
    if (replay->count < capacity) return replay->count;
    uint64_t chosen = below(replay, replay->added);
    return chosen < capacity ? (uint32_t)chosen : capacity;
}

/* A random slot of a class: slots are drawn until one is of it. Only for the class at hand, if it is stored, or the largest. */
static uint32_t any_of_class(taste_replay *replay, const int32_t *labels, uint32_t wanted) {
    for (;;) {
        uint32_t slot = (uint32_t)below(replay, replay->count);
        if ((uint32_t)labels[slot] == wanted) return slot;
    }
}

/* Chrysakis and Moens 2020: a class that never was the largest takes a place from the largest, another one samples its own. */
static uint32_t choose_balanced(taste_replay *replay, const parts *p, uint32_t label) {
    const uint32_t *stored = at(replay, p->stored);
    const uint64_t *seen = at(replay, p->seen);
    const int32_t *labels = at(replay, p->labels);
    uint32_t *full = at(replay, p->full), largest = 0;
    if (replay->count < replay->options.capacity) return replay->count;
    for (uint32_t c = 1; c < replay->options.classes; c++) {
        if (stored[c] > stored[largest]) largest = c;
    }
    for (uint32_t c = 0; c < replay->options.classes; c++) {
        if (stored[c] == stored[largest]) full[c] = 1;
    }
    if (!full[label]) return any_of_class(replay, labels, largest);
    if (below(replay, seen[label]) >= stored[label]) return replay->options.capacity;
    return any_of_class(replay, labels, label);
}

/* Every class has its own share of the slots and keeps its newest samples. */
static uint32_t choose_ring(taste_replay *replay, const parts *p, uint32_t label) {
    const uint64_t *seen = at(replay, p->seen);
    uint32_t *places = at(replay, p->places);
    uint32_t quota = replay->options.capacity / replay->options.classes;
    uint32_t *place = &places[label * quota + (seen[label] - 1) % quota];
    if (seen[label] <= quota) *place = replay->count;
    return *place;
}

static uint32_t choose_slot(taste_replay *replay, const parts *p, uint32_t label) {
    switch (replay->options.policy) {
    case TASTE_REPLAY_CLASS_BALANCED: return choose_balanced(replay, p, label);
    case TASTE_REPLAY_RING: return choose_ring(replay, p, label);
    default: return choose_reservoir(replay);
    }
}

taste_status taste_replay_add(taste_replay *replay, const void *sample, int32_t label, taste_error *out_error) {
    const taste_replay_options *o = &replay->options;
    if (label < 0 || (uint32_t)label >= o->classes) {
        return taste_fail(out_error, TASTE_STATUS_USAGE, "label %d, the replay buffer has %u classes. Correct it.", label,
                          o->classes);
    }
    parts p = parts_of(o);
    uint64_t *seen = at(replay, p.seen);
    uint32_t *stored = at(replay, p.stored);
    int32_t *labels = at(replay, p.labels);
    replay->added++;
    seen[label]++;
    uint32_t slot = choose_slot(replay, &p, (uint32_t)label);
    if (slot == o->capacity) return TASTE_STATUS_OK;
    if (slot == replay->count)
        replay->count++;
    else
        stored[labels[slot]]--;
    stored[label]++;
    labels[slot] = label;
    memcpy((unsigned char *)at(replay, p.samples) + (uint64_t)slot * o->sample_bytes, sample, o->sample_bytes);
    return TASTE_STATUS_OK;
}

uint32_t taste_replay_count(const taste_replay *replay) {
    return replay->count;
}

uint32_t taste_replay_draw(taste_replay *replay, uint32_t count, uint32_t *out_slots) {
    parts p = parts_of(&replay->options);
    unsigned char *marks = at(replay, p.marks);
    uint32_t drawn = count < replay->count ? count : replay->count;
    for (uint32_t i = 0; i < drawn; i++) {
        uint32_t last = replay->count - drawn + i;
        uint32_t slot = (uint32_t)below(replay, (uint64_t)last + 1);
        if (marks[slot]) slot = last;
        marks[slot] = 1;
        out_slots[i] = slot;
    }
    for (uint32_t i = 0; i < drawn; i++) marks[out_slots[i]] = 0;
    return drawn;
}

const void *taste_replay_sample(const taste_replay *replay, uint32_t slot) {
    if (slot >= replay->count) return NULL;
    return (const unsigned char *)at(replay, parts_of(&replay->options).samples) +
           (uint64_t)slot * replay->options.sample_bytes;
}

int32_t taste_replay_label(const taste_replay *replay, uint32_t slot) {
    if (slot >= replay->count) return -1;
    return ((const int32_t *)at(replay, parts_of(&replay->options).labels))[slot];
}
