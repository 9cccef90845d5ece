#include "progress.h"

#include <math.h>
#include <stdio.h>

#include "clock.h"
#include "io.h"
#include "json.h"
#include "memory.h"
#include "sensors.h"

static const double burst = 10;

void progress_start(progress *p, const options *options) {
    *p = (progress){
        .rate = options->report_rate,
        .allowance = burst,
        .last_ns = taste_now_ns(),
        .system_root = options->system_root,
        .folder = options->run,
    };
}

void progress_step_done(progress *p, uint64_t samples, uint64_t elapsed_ns) {
    p->samples += samples;
    p->step_ns += elapsed_ns;
}

static double per_second(uint64_t samples, uint64_t ns) {
    return ns > 0 ? (double)samples * 1e9 / (double)ns : 0;
}

static double progress_seconds(const progress *p) {
    return (double)p->step_ns * 1e-9;
}

double progress_samples_per_s(const progress *p) {
    return per_second(p->samples, p->step_ns);
}

static int may_report(progress *p) {
    uint64_t now = taste_now_ns();
    p->allowance = fmin(fmax(burst, p->rate), p->allowance + p->rate * (double)(now - p->last_ns) * 1e-9);
    p->last_ns = now;
    if (p->allowance < 1) return 0;
    p->allowance -= 1;
    return 1;
}

/* Whole or not at all for a reader, but not synced: after a power cut nobody asks where the run stood. */
static void keep_step(const char *folder, const progress_step *step, double samples_per_s) {
    char path[IO_PATH_BYTES], part[IO_PATH_BYTES + 8];
    if (snprintf(path, sizeof path, "%s/progress.json", folder) >= (int)sizeof path) return;
    snprintf(part, sizeof part, "%s.part", path);
    FILE *file = fopen(part, "w");
    if (file == NULL) return;
    fprintf(file, "{\"step\":%llu,\"epoch\":%.9g,", (unsigned long long)step->at->step, step->epoch);
    if (isfinite(step->loss)) fprintf(file, "\"loss\":%.9g,", step->loss);
    if (step->labels > 0) fprintf(file, "\"accuracy\":%.9g,", (double)step->correct / (double)step->labels);
    fprintf(file, "\"samples_per_s\":%.9g}\n", samples_per_s);
    if (fclose(file) == 0) (void)rename(part, path);
}

void progress_report_step(progress *p, const progress_step *step) {
    if (!may_report(p) && !step->last_of_epoch) return;
    double samples_per_s = per_second(p->samples - p->samples_reported, p->step_ns - p->step_ns_reported);
    double temperature = sensors_temperature(p->system_root);
    uint64_t resident = memory_resident_bytes();
    json_begin("step");
    json_count("step", step->at->step);
    json_real("epoch", step->epoch);
    json_real("loss", step->loss);
    json_real("accuracy", step->labels > 0 ? (double)step->correct / (double)step->labels : NAN);
    json_real("lr", (double)step->rate);
    if (step->effective > 0) json_count("effective_batch", step->effective);
    json_real("samples_per_s", samples_per_s);
    json_real("temperature_c", temperature);
    json_count("rss_bytes", resident);
    json_real("seconds", progress_seconds(p));
    json_end();
    if (p->folder != NULL) keep_step(p->folder, step, samples_per_s);
    p->samples_reported = p->samples;
    p->step_ns_reported = p->step_ns;
}

void progress_report_eval(const progress *p, double epoch, const tally *sum) {
    json_begin("eval");
    json_real("epoch", epoch);
    json_real("seconds", progress_seconds(p));
    json_real("loss", tally_loss(sum));
    json_real("accuracy", tally_accuracy(sum));
    json_count("samples", sum->samples);
    json_end();
}

void progress_report_checkpoint(const char *path, uint64_t step) {
    json_begin("checkpoint");
    json_text("path", path);
    json_count("step", step);
    json_end();
}
