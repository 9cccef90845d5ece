/* Preloaded: a calendar that is set an hour back, or forward, at every look. The monotonic clock is left as it is. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long looks;

int clock_gettime(clockid_t clock, struct timespec *out) {
    int status = (int)syscall(SYS_clock_gettime, clock, out);
    const char *jump = getenv("TASTE_TEST_JUMP_S");
    if (clock == CLOCK_REALTIME && jump != NULL) out->tv_sec += ++looks * atol(jump);
    return status;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    *out = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) *out = now.tv_sec;
    return now.tv_sec;
}
