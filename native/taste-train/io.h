/* The one seam to the file system for whatever is kept: a test build swaps in operations that fail. */
#ifndef TASTE_TRAIN_IO_H
#define TASTE_TRAIN_IO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "taste.h"

typedef struct io_operations {
    int (*open)(const char *path, int flags, mode_t mode);
    ssize_t (*write)(int file, const void *bytes, size_t count);
    int (*fsync)(int file);
    int (*close)(int file);
    int (*rename)(const char *from, const char *to);
    int (*unlink)(const char *path);
} io_operations;

extern const io_operations *io;

enum { IO_PATH_BYTES = 4096 };

/* A file that appears under its name only when it is whole and on the disk. */
typedef struct io_writer {
    int file; /* -1: not open */
    char path[IO_PATH_BYTES];
    char temporary[IO_PATH_BYTES];
} io_writer;

taste_status io_create(io_writer *writer, const char *path, taste_error *error);
taste_status io_append(io_writer *writer, const void *bytes, size_t count, taste_error *error);

/* Whether io_create would do; nothing is left behind. */
taste_status io_try(const char *path, taste_error *error);

/* A small file in one go: what io_create, io_append and io_commit do. */
taste_status io_write_text(const char *path, const char *text, taste_error *error);

/* fsync, rename, fsync of the folder. After a failure of any of the three functions nothing is left behind. */
taste_status io_commit(io_writer *writer, taste_error *error);
void io_discard(io_writer *writer);

/* Why `what` cannot be done to `path`, by errno: NO_SPACE or IO. */
taste_status io_failed(const char *what, const char *path, taste_error *error);

/* Opens a file and locks it for as long as it is open. BUSY, without a text, where another process has the lock: the file
 * is open then too, and io_read_holder tells the first line of what its holder wrote ("unknown" before it did). */
taste_status io_open_lock(const char *path, int *out_file, taste_error *error);
void io_read_holder(int file, char *out_text, size_t capacity);
taste_status io_write_holder(int file, const char *path, const char *text, taste_error *error);

/* Opens a file for reading and tells its size; must be closed with close(). */
taste_status io_open_to_read(const char *path, int *out_file, uint64_t *out_bytes, taste_error *error);

/* All of [first, first + count), or CORRUPT where the file ends before. */
taste_status io_read_at(int file, const char *path, uint64_t first, size_t count, void *out_bytes, taste_error *error);

/* The text of a small file such as those of /proc, as much as fits; 0: it cannot be read. */
size_t io_read_text(const char *root, const char *path, char *out_text, size_t capacity);

#endif
