/* taste-train monitor: the board's sensors for some seconds, without a step: what it takes when idle. */
#include <time.h>

#include "clock.h"
#include "error.h"
#include "json.h"
#include "sensors.h"
#include "trainer.h"
#include "verbs.h"

taste_status verb_monitor(const options *options, taste_error *error) {
    static sensors found;
    double watts;
    sensors_find(options->system_root, &found);
    uint64_t start = taste_now_ns(), length = (uint64_t)(options->seconds * 1e9);
    taste_status status = sensors_watts(&found, &watts, error);
    while (status == TASTE_STATUS_OK && !trainer_interrupted && taste_now_ns() - start < length)
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    if (status != TASTE_STATUS_OK) return status;
    if (trainer_interrupted) return taste_fail(error, TASTE_STATUS_INTERRUPTED, "interrupted. Run it again.");
    json_begin("result");
    json_text("verb", "monitor");
    json_text("source", found.source[0] != 0 ? found.source : NULL);
    json_open("rails", '[');
    for (uint32_t i = 0; i < found.count; i++) json_element_text(found.rails[i].name);
    json_close(']');
    json_count("start_ns", start);
    json_count("t_ns", taste_now_ns());
    json_end();
    return TASTE_STATUS_OK;
}
