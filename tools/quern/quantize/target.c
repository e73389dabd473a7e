/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/target.h"

#include "command.h"

#include <quern/file.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEPTH_MAX = 8, COPY_BYTES = 1 << 20 };

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int is_the_input(const char *path)
{
    return fail(EXIT_INPUT, "output '%s' is the same as the input: another folder is accepted",
                TEXT_NAME(path));
}

/* Whether the target, which may not exist yet, is in the folder. */
static bool is_within(const char *target, const char *folder)
{
    char whole[PATH_MAX], parent[PATH_MAX], in[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", target);
    size_t n = strlen(parent);
    while (n > 1 && parent[n - 1] == '/') parent[--n] = '\0';
    if (realpath(parent, whole) == NULL) {
        char *slash = strrchr(parent, '/');
        if (slash == NULL) strcpy(parent, ".");
        else slash[slash == parent] = '\0';
        if (realpath(parent, whole) == NULL) return false; /* making it reports what is wrong */
    }
    if (realpath(folder, in) == NULL) return false;
    n = strlen(in);
    return strncmp(whole, in, n) == 0 && (whole[n] == '/' || whole[n] == '\0');
}

int target_check(const conversion *c)
{
    const char *target = c->options->target;
    char path[PATH_MAX];
    struct stat st;
    for (size_t i = 0; i < c->model->shard_count; i++) {
        const model_shard *s = &c->model->shards[i];
        snprintf(path, sizeof path, "%s/%s", target, s->name);
        if (same_file(s->path, target) || same_file(s->path, path)) return is_the_input(target);
    }
    if (c->format == FORMAT_GGUF) return EXIT_DONE;
    if (c->model->folder != NULL && same_file(c->model->folder, target)) return is_the_input(target);
    if (c->model->folder != NULL && is_within(target, c->model->folder))
        return fail(EXIT_INPUT, "output '%s' is within the input: another folder is accepted",
                    TEXT_NAME(target));
    if (stat(target, &st) == 0 && !S_ISDIR(st.st_mode))
        return fail(EXIT_INPUT, "output '%s' is no folder: a folder, or a .gguf file, is accepted",
                    TEXT_NAME(target));
    return EXIT_DONE;
}

int target_check_file(const char *path)
{
    struct stat st;
    if (lstat(path, &st) == 0 && S_ISLNK(st.st_mode))
        return fail(EXIT_INPUT, "output '%s' is a symbolic link: a file of the folder's own is accepted",
                    TEXT_NAME(path));
    return EXIT_DONE;
}

/* What a killed run was writing has the name of quern_file's temporary files. */
static void remove_leftovers(int folder)
{
    const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
    for (const struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        const size_t n = strlen(e->d_name);
        if (strncmp(e->d_name, ".quern-", 7) == 0 && n == strlen(".quern-0123456789abcdef.tmp") &&
            strcmp(e->d_name + n - 4, ".tmp") == 0)
            (void)unlinkat(folder, e->d_name, 0);
    }
    if (dir != NULL) closedir(dir);
}

int target_open(const char *folder)
{
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return fail(EXIT_INPUT, "cannot make folder '%s': %s", TEXT_NAME(folder), strerror(errno));
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail(EXIT_INPUT, "cannot open folder '%s': %s", TEXT_NAME(folder), strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(fd);
        return fail(EXIT_INPUT, "folder '%s': another run writes there", TEXT_NAME(folder));
    }
    remove_leftovers(fd);
    return EXIT_DONE; /* the lock goes with the process */
}

/* ---- other files ---- */

static int copy_file(const char *from, const char *to)
{
    quern_file *out = NULL;
    int code = target_check_file(to);
    if (code != EXIT_DONE) return code;
    const int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0) return fail(EXIT_INPUT, "cannot read '%s': %s", TEXT_NAME(from), strerror(errno));
    char *buffer = malloc(COPY_BYTES);
    quern_status status = buffer != NULL ? quern_file_create(to, &out) : QUERN_ERR_OUT_OF_MEMORY;
    ssize_t n = 0;
    while (status == QUERN_OK && (n = read(in, buffer, COPY_BYTES)) > 0)
        status = quern_file_write(out, buffer, (size_t)n);
    const int why = errno;
    close(in);
    free(buffer);
    if (status == QUERN_OK && n == 0) {
        status = quern_file_commit(out);
        return status == QUERN_OK ? EXIT_DONE : fail_status(status);
    }
    quern_file_discard(out);
    return status != QUERN_OK ? fail_status(status)
                              : fail(EXIT_INPUT, "cannot read '%s': %s", TEXT_NAME(from), strerror(why));
}

/* Files at the folder's top that are written anew, or not at all. */
static bool is_rewritten(const conversion *c, const char *name)
{
    if (strcmp(name, "config.json") == 0 || strcmp(name, "hf_quant_config.json") == 0) return true;
    if (c->model->index != NULL && strcmp(name, c->model->index) == 0) return true;
    for (size_t i = 0; i < c->model->shard_count; i++)
        if (strcmp(name, c->model->shards[i].name) == 0) return true;
    return false;
}

static int copy_folder(const conversion *c, const char *from, const char *to, int depth)
{
    DIR *dir = opendir(from);
    if (dir == NULL) return fail(EXIT_INPUT, "cannot read folder '%s': %s", TEXT_NAME(from), strerror(errno));
    int code = EXIT_DONE;
    for (const struct dirent *e; code == EXIT_DONE && (e = readdir(dir)) != NULL;) {
        char source[PATH_MAX], target[PATH_MAX];
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
            (depth == 0 && is_rewritten(c, e->d_name)))
            continue;
        if (snprintf(source, sizeof source, "%s/%s", from, e->d_name) >= (int)sizeof source ||
            snprintf(target, sizeof target, "%s/%s", to, e->d_name) >= (int)sizeof target)
            code = fail(EXIT_INPUT, "'%s': the path is too long", TEXT_NAME(e->d_name));
        else if (stat(source, &st) != 0)
            code = fail(EXIT_INPUT, "cannot read '%s': %s", TEXT_NAME(source), strerror(errno));
        else if (S_ISREG(st.st_mode)) code = copy_file(source, target);
        else if (S_ISDIR(st.st_mode) && e->d_name[0] != '.' && depth < DEPTH_MAX) {
            if (mkdir(target, 0777) != 0 && errno != EEXIST)
                code = fail(EXIT_INPUT, "cannot make folder '%s': %s", TEXT_NAME(target), strerror(errno));
            else code = copy_folder(c, source, target, depth + 1);
        }
    }
    closedir(dir);
    return code;
}

int target_copy_others(const conversion *c)
{
    return c->model->folder != NULL ? copy_folder(c, c->model->folder, c->options->target, 0) : EXIT_DONE;
}
