/* The folder of a run: a lock that dies with its holder, and two generations of checkpoints. */
#ifndef TASTE_TRAIN_RUN_FOLDER_H
#define TASTE_TRAIN_RUN_FOLDER_H

#include "checkpoint.h"
#include "io.h"
#include "options.h"

enum { RUN_FOLDER_GENERATIONS = 2 };

typedef struct run_folder {
    const char *path;
    int lock;                  /* -1: not held */
    uint32_t next;             /* the generation that the next checkpoint replaces */
    char file[IO_PATH_BYTES];  /* of the newest generation */
    uint64_t saved_step, saved_ns; /* of the newest checkpoint, else where and when this run began */
} run_folder;

/* Makes the folder if need be, locks it (BUSY names the holder) and removes what a killed run left half written. To be closed
 * with run_folder_close, whatever the outcome. */
taste_status run_folder_open(const char *path, run_folder *out, taste_error *error);
void run_folder_close(run_folder *folder);

/* Finds the newest whole checkpoint. `out_found` 0: there is none and never was. CORRUPT: there are only damaged ones. Where
 * one of two is damaged, `out_warning` says so (else it is empty). */
taste_status run_folder_find(run_folder *folder, const canonical *c, place *out_at, int *out_found,
                             taste_error *out_warning, taste_error *error);

/* Opens the folder and, with `resume`, loads its newest whole checkpoint; says on both outputs if the newest was damaged. USAGE:
 * there is one, but no `resume`. `out_at` is left alone where none was found. */
taste_status run_folder_continue(run_folder *folder, const char *path, int resume, const canonical *c,
                                 const checkpoint_facts *facts, place *out_at, int *out_found, taste_error *error);

/* Writes a checkpoint over the older generation; it is on the disk when this returns OK. */
taste_status run_folder_save(run_folder *folder, const canonical *c, const checkpoint_facts *facts, const place *at,
                             taste_error *error);

/* The same and its event, if the folder is held; or, the second, only once --checkpoint-every has passed since the last. */
taste_status run_folder_checkpoint(run_folder *folder, const canonical *c, const checkpoint_facts *facts,
                                   const place *at, taste_error *error);
taste_status run_folder_checkpoint_if_due(run_folder *folder, const options *options, const canonical *c,
                                          const checkpoint_facts *facts, const place *at, taste_error *error);

#endif
