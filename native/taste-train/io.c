#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

static int open_file(const char *path, int flags, mode_t mode) {
    return open(path, flags, mode);
}

static const io_operations posix = {open_file, write, fsync, close, rename, unlink};

const io_operations *io = &posix;

taste_status io_failed(const char *what, const char *path, taste_error *error) {
    int full = errno == ENOSPC || errno == EDQUOT;
    return taste_fail(error, full ? TASTE_STATUS_NO_SPACE : TASTE_STATUS_IO, "cannot %s %.160s (%s). %s", what, path,
                      strerror(errno), full ? "Free some space." : "Look at the path and the disk.");
}

taste_status io_create(io_writer *writer, const char *path, taste_error *error) {
    struct stat facts;
    writer->file = -1;
    int named = snprintf(writer->path, sizeof writer->path, "%s", path);
    int temporary = snprintf(writer->temporary, sizeof writer->temporary, "%s.%ld.part", path, (long)getpid());
    if (named >= (int)sizeof writer->path || temporary >= (int)sizeof writer->temporary) {
        return taste_fail(error, TASTE_STATUS_USAGE, "a path of %zu characters is too long. Use a shorter one.",
                          strlen(path));
    }
    /* A device or a link to one would be replaced by the rename. */
    if (stat(path, &facts) == 0 && !S_ISREG(facts.st_mode)) {
        return taste_fail(error, TASTE_STATUS_IO, "%.160s is there and not a regular file. Name another.", path);
    }
    /* A dead process may have had our number (in a container it is always the same). */
    (void)io->unlink(writer->temporary);
    writer->file = io->open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return writer->file < 0 ? io_failed("create", writer->temporary, error) : TASTE_STATUS_OK;
}

void io_discard(io_writer *writer) {
    if (writer->file < 0) return;
    (void)io->close(writer->file);
    (void)io->unlink(writer->temporary);
    writer->file = -1;
}

taste_status io_try(const char *path, taste_error *error) {
    io_writer writer;
    taste_status status = io_create(&writer, path, error);
    io_discard(&writer);
    return status;
}

taste_status io_append(io_writer *writer, const void *bytes, size_t count, taste_error *error) {
    const char *at = bytes;
    while (count > 0) {
        ssize_t written = io->write(writer->file, at, count);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) {
            if (written == 0) errno = EIO;
            taste_status status = io_failed("write", writer->temporary, error);
            io_discard(writer);
            return status;
        }
        at += written;
        count -= (size_t)written;
    }
    return TASTE_STATUS_OK;
}

/* The name in the folder is on the disk only after this. */
static int sync_folder(const char *path) {
    char folder[IO_PATH_BYTES];
    const char *slash = strrchr(path, '/');
    if (slash == NULL)
        snprintf(folder, sizeof folder, ".");
    else
        snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    int file = io->open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (file < 0) return -1;
    int result = io->fsync(file);
    (void)io->close(file);
    return result;
}

taste_status io_commit(io_writer *writer, taste_error *error) {
    int file = writer->file;
    if (io->fsync(file) != 0) {
        /* Never again on this descriptor: after a failed fsync the pages may be gone. */
        taste_status status = io_failed("sync", writer->temporary, error);
        io_discard(writer);
        return status;
    }
    writer->file = -1;
    if (io->close(file) != 0 || io->rename(writer->temporary, writer->path) != 0) {
        taste_status status = io_failed("finish", writer->path, error);
        (void)io->unlink(writer->temporary);
        return status;
    }
    return sync_folder(writer->path) != 0 ? io_failed("sync the folder of", writer->path, error) : TASTE_STATUS_OK;
}

taste_status io_write_text(const char *path, const char *text, taste_error *error) {
    io_writer writer;
    taste_status status = io_create(&writer, path, error);
    if (status == TASTE_STATUS_OK) status = io_append(&writer, text, strlen(text), error);
    return status == TASTE_STATUS_OK ? io_commit(&writer, error) : status;
}

taste_status io_open_lock(const char *path, int *out_file, taste_error *error) {
    *out_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (*out_file < 0) return io_failed("open", path, error);
    if (flock(*out_file, LOCK_EX | LOCK_NB) == 0) return TASTE_STATUS_OK;
    return errno == EWOULDBLOCK ? TASTE_STATUS_BUSY : io_failed("lock", path, error);
}

void io_read_holder(int file, char *out_text, size_t capacity) {
    ssize_t got = pread(file, out_text, capacity - 1, 0);
    if (got <= 0) got = snprintf(out_text, capacity, "unknown");
    out_text[got] = 0;
    out_text[strcspn(out_text, "\n")] = 0;
}

taste_status io_write_holder(int file, const char *path, const char *text, taste_error *error) {
    size_t length = strlen(text);
    if (ftruncate(file, 0) == 0 && pwrite(file, text, length, 0) == (ssize_t)length) return TASTE_STATUS_OK;
    return io_failed("write", path, error);
}

taste_status io_open_to_read(const char *path, int *out_file, uint64_t *out_bytes, taste_error *error) {
    struct stat facts;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return io_failed("open", path, error);
    if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode)) {
        close(file);
        return taste_fail(error, TASTE_STATUS_IO, "%.160s is not a regular file. Give one.", path);
    }
    *out_file = file;
    *out_bytes = (uint64_t)facts.st_size;
    return TASTE_STATUS_OK;
}

taste_status io_read_at(int file, const char *path, uint64_t first, size_t count, void *out_bytes, taste_error *error) {
    char *at = out_bytes;
    while (count > 0) {
        ssize_t got = pread(file, at, count, (off_t)first);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return io_failed("read", path, error);
        if (got == 0)
            return taste_fail(error, TASTE_STATUS_CORRUPT, "%.160s became shorter while it was read. Copy it again.",
                              path);
        at += got;
        first += (uint64_t)got;
        count -= (size_t)got;
    }
    return TASTE_STATUS_OK;
}

size_t io_read_text(const char *root, const char *path, char *out_text, size_t capacity) {
    char full[IO_PATH_BYTES];
    size_t used = 0;
    if (snprintf(full, sizeof full, "%s%s", root, path) >= (int)sizeof full) return 0;
    int file = open(full, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    while (used + 1 < capacity) {
        ssize_t got = read(file, out_text + used, capacity - 1 - used);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        used += (size_t)got;
    }
    close(file);
    out_text[used] = 0;
    return used;
}
