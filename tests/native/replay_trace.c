/* What a replay buffer does, as text: replay_trace trace POLICY CAPACITY CLASSES SEED ADDED DRAWN prints the slots drawn after
 * every add and at the end each slot's label and sample; the block is moved to other memory in between.
 * replay_trace inclusion CAPACITY ADDED STREAMS prints how often each sample of a stream was kept by a reservoir. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generator.h"
#include "taste.h"

static taste_replay *opened(const taste_replay_options *options, void **out_block) {
    taste_error error;
    taste_replay *replay = NULL;
    size_t bytes = taste_replay_bytes(options);
    *out_block = aligned_alloc(TASTE_ALIGNMENT, bytes);
    if (*out_block == NULL || taste_replay_init(options, *out_block, bytes, &replay, &error) != TASTE_STATUS_OK) exit(1);
    return replay;
}

/* The same buffer from a copy of its bytes. */
static taste_replay *moved(const taste_replay_options *options, void **block) {
    taste_replay *replay = NULL;
    size_t bytes = taste_replay_bytes(options);
    void *copy = aligned_alloc(TASTE_ALIGNMENT, bytes);
    if (copy == NULL) exit(1);
    memcpy(copy, *block, bytes);
    free(*block);
    *block = copy;
    if (taste_replay_open(options, copy, bytes, &replay, NULL) != TASTE_STATUS_OK) exit(1);
    return replay;
}

static void trace(const taste_replay_options *options, uint32_t added, uint32_t drawn) {
    void *block;
    taste_replay *replay = opened(options, &block);
    uint32_t *slots = malloc((drawn + 1) * sizeof *slots);
    for (uint64_t i = 0; slots != NULL && i < added; i++) {
        /* Early samples are of few classes, and some classes are rare. */
        uint64_t label = taste_splitmix64(i) % (1 + i * options->classes / added);
        if (taste_replay_add(replay, &i, (int32_t)label, NULL) != TASTE_STATUS_OK) exit(1);
        uint32_t got = taste_replay_draw(replay, drawn, slots);
        for (uint32_t d = 0; d < got; d++) printf("%u%c", slots[d], d + 1 < got ? ' ' : '\n');
        if (i == added / 2) replay = moved(options, &block);
    }
    for (uint32_t s = 0; s < taste_replay_count(replay); s++) {
        uint64_t number;
        memcpy(&number, taste_replay_sample(replay, s), sizeof number);
        printf("%d %llu\n", taste_replay_label(replay, s), (unsigned long long)number);
    }
    free(slots);
    free(block);
}

static void inclusion(uint32_t capacity, uint32_t added, uint32_t streams) {
    uint32_t *kept = calloc(added, sizeof *kept);
    for (uint64_t seed = 0; kept != NULL && seed < streams; seed++) {
        const taste_replay_options options = {capacity, 4, 1, TASTE_REPLAY_RESERVOIR, seed};
        void *block;
        taste_replay *replay = opened(&options, &block);
        for (uint32_t i = 0; i < added; i++) (void)taste_replay_add(replay, &i, 0, NULL);
        for (uint32_t s = 0; s < taste_replay_count(replay); s++)
            kept[*(const uint32_t *)taste_replay_sample(replay, s)]++;
        free(block);
    }
    for (uint32_t i = 0; kept != NULL && i < added; i++) printf("%u\n", kept[i]);
    free(kept);
}

int main(int argc, char **argv) {
    uint32_t n[8] = {0};
    for (int i = 2; i < argc && i < 10; i++) n[i - 2] = (uint32_t)strtoul(argv[i], NULL, 10);
    if (argc == 8 && strcmp(argv[1], "trace") == 0) {
        const taste_replay_options options = {n[1], 8, n[2], (int32_t)n[0], n[3]};
        trace(&options, n[4], n[5]);
    } else if (argc == 5) {
        inclusion(n[0], n[1], n[2]);
    }
    return argc == 8 || argc == 5 ? 0 : 2;
}
