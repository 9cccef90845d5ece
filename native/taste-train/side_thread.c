#include "side_thread.h"

#include <signal.h>
#include <string.h>

#include "error.h"

taste_status side_thread_start(pthread_t *out, void *(*serve)(void *), void *context, const char *purpose,
                               taste_error *error) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failed = pthread_create(out, NULL, serve, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed == 0) return TASTE_STATUS_OK;
    return taste_fail(error, TASTE_STATUS_DOES_NOT_FIT, "no thread for %s (%s). Free some memory.", purpose,
                      strerror(failed));
}
