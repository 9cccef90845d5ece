/* What is on a disk after a power cut: operations of a run are recorded at the seam, and replayed into a disk on which only
 * what was synced is sure. Of the rest any write may be missing, whole or torn, and names change as far as they come. */
#ifndef DISK_MODEL_H
#define DISK_MODEL_H

#include <stdint.h>

#include "io.h"

/* Starts to record what goes through disk_operations (which also does it). `skip_fsync` plants a run that never syncs files. */
void disk_record(int skip_fsync);
extern const io_operations disk_operations;

/* Operations so far. */
int disk_count(void);

/* Writes into `folder`, which is emptied, what may be there if the power goes before operation `cut`; `seed` chooses among the
 * possible. */
void disk_replay(const char *folder, int cut, uint64_t seed);

#endif
