/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * file.c - the one writer of files: writes a file without a name in the target's folder, syncs, gives it the
 * name. Such a file goes with the process, however that ends. Where the target exists, the file gets a name
 * of its own first and is renamed, since a link replaces nothing.
 *
 * File systems without nameless files get a file of a name of its own from the start. It is registered before
 * it exists, and its name holds 64 random bits. So a signal handler can remove it at any moment and never
 * removes a file of another program. The folder is held open, so that a change of the working directory
 * between create and commit has no effect.
 */
#include <quern/file.h>

#include "core/error.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PENDING_MAX = 64, BUFFER_BYTES = 1 << 18, LINKS_MAX = 40 };

/* A temporary file, for the signal handler. `state` guards the other members: they are valid while it is
 * PENDING. */
enum { FREE, TAKEN, PENDING, DISCARDED };
typedef struct pending_file {
    atomic_int state;
    pid_t owner; /* a forked child leaves its parent's files alone */
    int folder;
    char name[40];
} pending_file;

static pending_file pending[PENDING_MAX];

struct quern_file {
    char path[PATH_MAX];     /* as the caller gave it, for sentences */
    char base[NAME_MAX + 1]; /* the target within its folder */
    int fd;
    int folder;              /* -1: written as it stands */
    pending_file *temporary; /* NULL: written as it stands */
    bool nameless;           /* until the commit */
    quern_status failed;
    size_t used;
    unsigned char buffer[BUFFER_BYTES];
};

static quern_status cannot_write(const char *path, const char *why)
{
    return error_set(QUERN_ERR_IO, "cannot write '%s': %s", TEXT_NAME(path), why);
}

/* Resolves the path to its last link, whether or not the target exists. False with errno where a name is
 * too long or the links form a cycle. */
static bool resolve(const char *path, char target[PATH_MAX])
{
    char link[PATH_MAX], next[PATH_MAX];
    if (strlen(path) >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(target, path, strlen(path) + 1);
    for (int i = 0; i < LINKS_MAX; i++) {
        const ssize_t n = readlink(target, link, sizeof link - 1);
        if (n < 0) return true; /* no link, or nothing there: opening it reports what is wrong */
        link[n] = '\0';
        const char *slash = strrchr(target, '/');
        const int folder = *link == '/' || slash == NULL ? 0 : (int)(slash - target) + 1;
        if (snprintf(next, sizeof next, "%.*s%s", folder, target, link) >= (int)sizeof next) {
            errno = ENAMETOOLONG;
            return false;
        }
        memcpy(target, next, strlen(next) + 1);
    }
    errno = ELOOP;
    return false;
}

/* The descriptor of standard output or standard error if that is where the file is; -1 else. */
static int standard_stream(const struct stat *target)
{
    struct stat st;
    for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO; fd++)
        if (fstat(fd, &st) == 0 && st.st_dev == target->st_dev && st.st_ino == target->st_ino) return fd;
    return -1;
}

/* Opens the target's folder and notes its name there. */
static quern_status open_folder(quern_file *file)
{
    char target[PATH_MAX];
    if (!resolve(file->path, target)) return cannot_write(file->path, strerror(errno));
    char *slash = strrchr(target, '/');
    const char *base = slash != NULL ? slash + 1 : target;
    if (*base == '\0') return cannot_write(file->path, "the path ends in '/', a file's name is needed");
    if (strlen(base) > NAME_MAX) return cannot_write(file->path, strerror(ENAMETOOLONG));
    memcpy(file->base, base, strlen(base) + 1);
    if (slash != NULL) slash[1] = '\0';
    file->folder = open(slash != NULL ? target : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return file->folder >= 0 ? QUERN_OK : cannot_write(file->path, strerror(errno));
}

static pending_file *take_slot(void)
{
    for (int i = 0; i < PENDING_MAX; i++) {
        int expected = FREE;
        if (atomic_compare_exchange_strong(&pending[i].state, &expected, TAKEN)) return &pending[i];
    }
    return NULL;
}

/* The descriptor's path, by which link() finds a nameless file. */
static const char *descriptor_path(int fd, char text[32])
{
    snprintf(text, 32, "/proc/self/fd/%d", fd);
    return text;
}

static bool open_nameless(quern_file *file)
{
    char path[32];
    file->fd = openat(file->folder, ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
    if (file->fd < 0) return false;
    if (access(descriptor_path(file->fd, path), F_OK) == 0) return true;
    close(file->fd); /* no /proc, through which it would get its name */
    file->fd = -1;
    return false;
}

/* Opens a new file in the target's folder. */
static quern_status open_temporary(quern_file *file)
{
    pending_file *p = take_slot();
    if (p == NULL)
        return error_set(QUERN_ERR_OUT_OF_MEMORY,
                         "cannot write '%s': %d files are being written, at most as many are accepted",
                         TEXT_NAME(file->path), PENDING_MAX);
    p->owner = getpid();
    p->folder = file->folder;
    do {
        uint64_t random = 0;
        if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random) {
            atomic_store(&p->state, FREE);
            return cannot_write(file->path, strerror(errno));
        }
        snprintf(p->name, sizeof p->name, ".quern-%016llx.tmp", (unsigned long long)random);
        atomic_store(&p->state, PENDING);
        file->nameless = open_nameless(file);
        if (file->nameless) break;
        file->fd = openat(p->folder, p->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd < 0) atomic_store(&p->state, TAKEN);
    } while (file->fd < 0 && errno == EEXIST);
    if (file->fd >= 0) {
        file->temporary = p;
        return QUERN_OK;
    }
    const int why = errno;
    atomic_store(&p->state, FREE);
    return cannot_write(file->path, strerror(why));
}

static void remove_temporary(quern_file *file)
{
    pending_file *p = file->temporary;
    if (p == NULL) return;
    (void)unlinkat(p->folder, p->name, 0);
    atomic_store(&p->state, FREE);
    file->temporary = NULL;
}

static void release(quern_file *file)
{
    remove_temporary(file);
    if (file->fd >= 0) close(file->fd);
    if (file->folder >= 0) close(file->folder);
    free(file);
}

/* What stands at the path: nothing or a regular file (*stream false), or what is written as it stands. */
static quern_status look(const char *path, struct stat *st, bool *exists, bool *stream)
{
    *stream = false;
    *exists = stat(path, st) == 0;
    if (!*exists) return QUERN_OK; /* creating it shows whether it can be created */
    if (S_ISDIR(st->st_mode)) return cannot_write(path, "it is a folder, no regular file");
    if (S_ISBLK(st->st_mode) || S_ISSOCK(st->st_mode))
        return cannot_write(path, "it is a block device or socket, no regular file");
    *stream = !S_ISREG(st->st_mode) || standard_stream(st) >= 0;
    if (standard_stream(st) < 0 && faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) != 0)
        return cannot_write(path, strerror(errno));
    return QUERN_OK;
}

static quern_status start(quern_file *file)
{
    struct stat st;
    bool exists, stream;
    quern_status status = look(file->path, &st, &exists, &stream);
    if (status != QUERN_OK) return status;
    if (stream) {
        const int standard = standard_stream(&st);
        file->fd = standard >= 0 ? fcntl(standard, F_DUPFD_CLOEXEC, 0)
                                 : open(file->path, O_WRONLY | O_NOCTTY | O_CLOEXEC);
        return file->fd >= 0 ? QUERN_OK : cannot_write(file->path, strerror(errno));
    }
    status = open_folder(file);
    if (status == QUERN_OK) status = open_temporary(file);
    if (status == QUERN_OK && exists) {
        const int kept = fchown(file->fd, st.st_uid, st.st_gid); /* else the process's own */
        (void)kept;
        if (fchmod(file->fd, st.st_mode & 0777) != 0) return cannot_write(file->path, strerror(errno));
    }
    return status;
}

quern_status quern_file_create(const char *path, quern_file **file)
{
    if (path == NULL || file == NULL)
        return error_argument("%s is NULL: a pointer is needed", path == NULL ? "path" : "file");
    if (*path == '\0' || strlen(path) >= PATH_MAX)
        return cannot_write(path, strerror(*path == '\0' ? ENOENT : ENAMETOOLONG));
    quern_file *f = malloc(sizeof *f);
    if (f == NULL)
        return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for a write buffer of %d bytes", BUFFER_BYTES);
    memcpy(f->path, path, strlen(path) + 1);
    f->fd = -1;
    f->folder = -1;
    f->temporary = NULL;
    f->failed = QUERN_OK;
    f->used = 0;
    const quern_status status = start(f);
    if (status != QUERN_OK) {
        release(f);
        return status;
    }
    *file = f;
    return QUERN_OK;
}

quern_status quern_file_check(const char *path)
{
    struct stat st;
    bool exists, stream = false;
    if (path != NULL) {
        const quern_status status = look(path, &st, &exists, &stream);
        if (status != QUERN_OK || stream) return status;
    }
    quern_file *file = NULL;
    const quern_status status = quern_file_create(path, &file);
    quern_file_discard(file);
    return status;
}

static quern_status write_all(quern_file *file, const unsigned char *bytes, size_t size)
{
    const size_t most = (size_t)1 << 30;
    while (size > 0) {
        const ssize_t n = write(file->fd, bytes, size < most ? size : most);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return file->failed = cannot_write(file->path, strerror(n == 0 ? EIO : errno));
        bytes += n;
        size -= (size_t)n;
    }
    return QUERN_OK;
}

static quern_status flush(quern_file *file)
{
    const size_t used = file->used;
    file->used = 0;
    return write_all(file, file->buffer, used);
}

quern_status quern_file_write(quern_file *file, const void *bytes, size_t size)
{
    if (file == NULL || (bytes == NULL && size > 0))
        return error_argument("%s is NULL: a pointer is needed", file == NULL ? "file" : "bytes");
    if (file->failed != QUERN_OK) return file->failed;
    if (size > BUFFER_BYTES - file->used && flush(file) != QUERN_OK) return file->failed;
    if (size > BUFFER_BYTES) return write_all(file, bytes, size);
    if (size > 0) memcpy(file->buffer + file->used, bytes, size);
    file->used += size;
    return QUERN_OK;
}

quern_status quern_file_write_at(quern_file *file, int64_t offset, const void *bytes, size_t size)
{
    const size_t most = (size_t)1 << 30;
    const unsigned char *from = bytes;
    if (file == NULL || (bytes == NULL && size > 0))
        return error_argument("%s is NULL: a pointer is needed", file == NULL ? "file" : "bytes");
    if (offset < 0) return error_argument("offset is %lld: at least 0 is accepted", (long long)offset);
    if (file->temporary == NULL) return cannot_write(file->path, "it is no regular file, which has offsets");
    while (size > 0) {
        const ssize_t n = pwrite(file->fd, from, size < most ? size : most, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return cannot_write(file->path, strerror(n == 0 ? EIO : errno));
        from += n;
        offset += n;
        size -= (size_t)n;
    }
    return QUERN_OK;
}

/* Makes the rename itself durable. Some file systems refuse to sync a folder: the file is complete all the
 * same. */
static void sync_folder(int folder)
{
    const int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);
    close(fd);
}

/* Puts the file at its path. A nameless one is linked there; if something is there, it is linked to the
 * temporary name and renamed as others are. */
static bool put(const quern_file *file)
{
    const pending_file *p = file->temporary;
    char path[32];
    if (atomic_load(&p->state) == DISCARDED) {
        errno = ENOENT;
        return false;
    }
    if (file->nameless) {
        descriptor_path(file->fd, path);
        if (linkat(AT_FDCWD, path, file->folder, file->base, AT_SYMLINK_FOLLOW) == 0) return true;
        if (errno != EEXIST) return false;
        if (linkat(AT_FDCWD, path, p->folder, p->name, AT_SYMLINK_FOLLOW) != 0) return false;
    }
    return renameat(p->folder, p->name, file->folder, file->base) == 0;
}

quern_status quern_file_commit(quern_file *file)
{
    if (file == NULL) return error_argument("file is NULL: a pointer is needed");
    pending_file *p = file->temporary;
    quern_status status = file->failed != QUERN_OK ? file->failed : flush(file);
    if (status == QUERN_OK && p != NULL && (fsync(file->fd) != 0 || !put(file)))
        status = cannot_write(file->path, strerror(errno));
    const int closed = close(file->fd);
    file->fd = -1;
    if (status == QUERN_OK && p == NULL && closed != 0) status = cannot_write(file->path, strerror(errno));
    if (status == QUERN_OK && p != NULL) {
        sync_folder(file->folder);
        atomic_store(&p->state, FREE);
        file->temporary = NULL;
    }
    release(file);
    return status;
}

void quern_file_discard(quern_file *file)
{
    if (file != NULL) release(file);
}

void quern_file_discard_all(void)
{
    const pid_t self = getpid();
    for (int i = 0; i < PENDING_MAX; i++) {
        int state = PENDING;
        if (pending[i].owner == self && atomic_compare_exchange_strong(&pending[i].state, &state, DISCARDED))
            (void)unlinkat(pending[i].folder, pending[i].name, 0);
    }
}
