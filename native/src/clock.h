/* The one clock: monotonic, since a board may have no battery behind its calendar. */
#ifndef TASTE_CLOCK_H
#define TASTE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t taste_now_ns(void) {
    struct timespec t;
#ifdef TASTE_PLANT_CALENDAR /* a harness that does not notice this is worth nothing */
    clock_gettime(CLOCK_REALTIME, &t);
#else
    clock_gettime(CLOCK_MONOTONIC, &t);
#endif
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif
