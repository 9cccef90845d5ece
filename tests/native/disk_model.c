#include "disk_model.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "generator.h"

enum { OPERATIONS = 4096, FILES = 64, NAME = 128, DESCRIPTORS = 64 };

typedef enum what { CREATE, WRITE, SYNC_FILE, SYNC_FOLDER, RENAME, UNLINK } what;

typedef struct operation {
    what what;
    int file;
    char name[NAME], to[NAME];
    char *bytes;
    size_t count, at;
} operation;

static operation operations[OPERATIONS];
static int operation_count, file_count, without_fsync;
static int file_of[DESCRIPTORS]; /* by descriptor; -1: the folder */
static size_t written[FILES];

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static operation *note(what kind, int file, const char *name) {
    operation *o = &operations[operation_count++];
    if (operation_count == OPERATIONS || file_count == FILES) abort();
    *o = (operation){.what = kind, .file = file};
    snprintf(o->name, NAME, "%s", name);
    return o;
}

void disk_record(int skip_fsync) {
    for (int i = 0; i < operation_count; i++) free(operations[i].bytes);
    operation_count = file_count = 0;
    memset(written, 0, sizeof written);
    without_fsync = skip_fsync;
}

int disk_count(void) {
    return operation_count;
}

static int record_open(const char *path, int flags, mode_t mode) {
    int descriptor = open(path, flags, mode);
    if (descriptor < 0 || descriptor >= DESCRIPTORS) return descriptor;
    file_of[descriptor] = -1;
    if (flags & O_CREAT) {
        file_of[descriptor] = file_count;
        (void)note(CREATE, file_count++, base_name(path));
    }
    return descriptor;
}

static ssize_t record_write(int descriptor, const void *bytes, size_t count) {
    ssize_t done = write(descriptor, bytes, count);
    if (done <= 0) return done;
    operation *o = note(WRITE, file_of[descriptor], "");
    o->bytes = malloc((size_t)done);
    memcpy(o->bytes, bytes, (size_t)done);
    o->count = (size_t)done;
    o->at = written[o->file];
    written[o->file] += o->count;
    return done;
}

static int record_fsync(int descriptor) {
    int file = file_of[descriptor];
    if (file >= 0 && without_fsync) return 0;
    (void)note(file < 0 ? SYNC_FOLDER : SYNC_FILE, file, "");
    return 0; /* the true disk does not matter here */
}

static int record_rename(const char *from, const char *to) {
    operation *o = note(RENAME, -1, base_name(from));
    snprintf(o->to, NAME, "%s", base_name(to));
    return rename(from, to);
}

static int record_unlink(const char *path) {
    (void)note(UNLINK, -1, base_name(path));
    return unlink(path);
}

const io_operations disk_operations = {record_open,  record_write, record_fsync,
                                       close,        record_rename, record_unlink};

/* The disk: names that are sure, and for every file how many operations of its own are. */
typedef struct disk {
    char names[FILES][NAME]; /* of a file; "": it has none */
    int synced[FILES];       /* writes before this operation are sure */
} disk;

static void change_names(disk *d, const operation *o) {
    int found = -1;
    for (int f = 0; f < FILES; f++) {
        if (strcmp(d->names[f], o->name) == 0) found = f;
    }
    if (o->what == CREATE) snprintf(d->names[o->file], NAME, "%s", o->name);
    if (found < 0 || o->what == CREATE) return;
    for (int f = 0; o->what == RENAME && f < FILES; f++) {
        if (strcmp(d->names[f], o->to) == 0) d->names[f][0] = 0;
    }
    snprintf(d->names[found], NAME, "%s", o->what == RENAME ? o->to : "");
}

static int changes_names(const operation *o) {
    return o->what == CREATE || o->what == RENAME || o->what == UNLINK;
}

/* What is sure before `cut`, and a few of the changes of names that followed the last sync of the folder. */
static void settle(disk *d, int cut, uint64_t *draw) {
    int sure = 0, open_changes = 0;
    memset(d, 0, sizeof *d);
    for (int i = 0; i < cut; i++) {
        if (operations[i].what == SYNC_FILE) d->synced[operations[i].file] = i;
        if (operations[i].what == SYNC_FOLDER) sure = i;
    }
    for (int i = sure; i < cut; i++) open_changes += changes_names(&operations[i]);
    int kept = (int)(taste_splitmix64((*draw)++) % (uint64_t)(open_changes + 1));
    for (int i = 0; i < cut; i++) {
        if (!changes_names(&operations[i])) continue;
        if (i < sure || kept-- > 0) change_names(d, &operations[i]);
    }
}

static void write_file(const char *path, const disk *d, int file, int cut, uint64_t *draw) {
    int out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (out < 0) abort();
    for (int i = 0; i < cut; i++) {
        const operation *o = &operations[i];
        if (o->what != WRITE || o->file != file) continue;
        size_t count = o->count;
        if (i >= d->synced[file]) {
            uint64_t chance = taste_splitmix64((*draw)++);
            count = chance % 3 == 0 ? 0 : chance % 3 == 1 ? count : (size_t)((chance >> 8) % count);
        }
        if (count > 0 && pwrite(out, o->bytes, count, (off_t)o->at) != (ssize_t)count) abort();
    }
    close(out);
}

static void empty_folder(const char *folder) {
    char path[4096];
    (void)mkdir(folder, 0777);
    DIR *entries = opendir(folder);
    for (struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        unlink(path);
    }
    closedir(entries);
}

void disk_replay(const char *folder, int cut, uint64_t seed) {
    static disk d;
    char path[4096];
    uint64_t draw = taste_splitmix64(seed);
    empty_folder(folder);
    settle(&d, cut, &draw);
    for (int f = 0; f < FILES; f++) {
        if (d.names[f][0] == 0) continue;
        snprintf(path, sizeof path, "%s/%s", folder, d.names[f]);
        write_file(path, &d, f, cut, &draw);
    }
}
