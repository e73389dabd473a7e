/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* model_files.c - finds the shards, maps them, and compares them with the index. */
#include "io/model_files.h"

#include "core/text.h"
#include "io/json.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX ".safetensors"
#define INDEX_SUFFIX ".safetensors.index.json"
enum { INDEX_MAX = 1 << 30 };

/* The index: which shard each tensor is said to be in. */
typedef struct placed {
    const char *tensor, *shard;
} placed;

typedef struct index_file {
    char *text, *strings; /* as it is, and its decoded strings */
    size_t size;
    placed *placed;
    size_t count;
} index_file;

static quern_status __attribute__((format(printf, 3, 4)))
explain(char why[MODEL_SENTENCE], quern_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, MODEL_SENTENCE, format, args);
    va_end(args);
    return status;
}

static quern_status no_memory(char why[MODEL_SENTENCE])
{
    return explain(why, QUERN_ERR_OUT_OF_MEMORY, "no memory for the list of a model's tensors");
}

/* folder/name; NULL without memory. */
static char *joined(const char *folder, const char *name)
{
    char *path = NULL;
    return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

static bool has_suffix(const char *name, const char *suffix)
{
    const size_t n = strlen(name), m = strlen(suffix);
    return n > m && strcmp(name + n - m, suffix) == 0;
}

static void close_index(index_file *index)
{
    free(index->text);
    free(index->strings);
    free(index->placed);
}

/* The whole file as text. */
static quern_status read_text(const char *path, index_file *index, char why[MODEL_SENTENCE])
{
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > INDEX_MAX) {
        const char *reason = fd < 0 ? strerror(errno) : "a regular file of at most 1 GB is accepted";
        if (fd >= 0) close(fd);
        return explain(why, QUERN_ERR_IO, "index '%s': %s", TEXT_NAME(path), reason);
    }
    index->size = (size_t)st.st_size;
    index->text = malloc(index->size + 1);
    index->strings = malloc(index->size + 1);
    size_t at = 0;
    ssize_t n = 1;
    while (index->text != NULL && index->strings != NULL && at < index->size && n > 0) {
        n = read(fd, index->text + at, index->size - at);
        if (n > 0) at += (size_t)n;
    }
    const int failed = errno;
    close(fd);
    if (index->text == NULL || index->strings == NULL) return no_memory(why);
    if (at == index->size) return QUERN_OK;
    return explain(why, QUERN_ERR_IO, "index '%s': %s", TEXT_NAME(path),
                   n < 0 ? strerror(failed) : "it became shorter while it was read");
}

static quern_status bad_index(const char *path, const json_reader *r, char why[MODEL_SENTENCE])
{
    return explain(why, QUERN_ERR_FORMAT, "index '%s': no valid JSON: %s, at byte %td", TEXT_NAME(path),
                   r->error, r->at - r->begin);
}

/* A shard's name must stay in the folder. */
static bool is_plain(const char *name)
{
    return *name != '\0' && strchr(name, '/') == NULL && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static quern_status read_map(const char *path, json_reader *r, index_file *index, char why[MODEL_SENTENCE])
{
    size_t room = 0;
    bool more = true;
    const char *name, *shard;
    for (bool first = true; more; first = false) {
        if (!json_next_member(r, first, &more, &name)) return bad_index(path, r, why);
        if (!more) break;
        if (!json_take_string(r, &shard)) return bad_index(path, r, why);
        if (!is_plain(shard))
            return explain(why, QUERN_ERR_FORMAT,
                           "index '%s': shard '%s' of tensor '%s' is no file of the folder", TEXT_NAME(path),
                           TEXT_NAME(shard), TEXT_NAME(name));
        if (index->count == room) {
            room = 2 * room + 64;
            placed *grown = realloc(index->placed, room * sizeof *grown);
            if (grown == NULL) return no_memory(why);
            index->placed = grown;
        }
        index->placed[index->count++] = (placed){name, shard};
    }
    return QUERN_OK;
}

static int by_tensor(const void *a, const void *b)
{
    return strcmp(((const placed *)a)->tensor, ((const placed *)b)->tensor);
}

static quern_status read_index(const char *path, index_file *index, char why[MODEL_SENTENCE])
{
    quern_status status = read_text(path, index, why);
    if (status != QUERN_OK) return status;
    const unsigned char *text = (const unsigned char *)index->text;
    json_reader r = {text, text, text + index->size, index->strings, NULL};
    bool more = true, found = false;
    const char *key;
    for (bool first = true; more; first = false) {
        if (!json_next_member(&r, first, &more, &key)) return bad_index(path, &r, why);
        if (!more) break;
        if (strcmp(key, "weight_map") == 0 && !found) {
            found = true;
            status = read_map(path, &r, index, why);
            if (status != QUERN_OK) return status;
        } else if (!json_skip(&r)) {
            return bad_index(path, &r, why);
        }
    }
    if (!json_end(&r)) return bad_index(path, &r, why);
    if (!found || index->count == 0)
        return explain(why, QUERN_ERR_FORMAT, "index '%s': a weight_map with tensors is needed",
                       TEXT_NAME(path));
    qsort(index->placed, index->count, sizeof *index->placed, by_tensor);
    for (size_t i = 1; i < index->count; i++)
        if (strcmp(index->placed[i - 1].tensor, index->placed[i].tensor) == 0)
            return explain(why, QUERN_ERR_FORMAT, "index '%s': tensor '%s' is a duplicate", TEXT_NAME(path),
                           TEXT_NAME(index->placed[i].tensor));
    return QUERN_OK;
}

static int by_pointed_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The shards' names, each once. */
static quern_status list_shards(model_files *m, const index_file *index, char why[MODEL_SENTENCE])
{
    const char **names = malloc((index->count + 1) * sizeof *names);
    m->shards = calloc(index->count + 1, sizeof *m->shards);
    if (names == NULL || m->shards == NULL) {
        free(names);
        return no_memory(why);
    }
    for (size_t i = 0; i < index->count; i++) names[i] = index->placed[i].shard;
    qsort(names, index->count, sizeof *names, by_pointed_text);
    bool good = true;
    for (size_t i = 0; i < index->count && good; i++) {
        if (i > 0 && strcmp(names[i - 1], names[i]) == 0) continue;
        m->shards[m->shard_count].name = strdup(names[i]);
        good = m->shards[m->shard_count++].name != NULL;
    }
    free(names);
    return good ? QUERN_OK : no_memory(why);
}

static quern_status open_shard(model_files *m, model_shard *s, char why[MODEL_SENTENCE])
{
    struct stat st;
    if (m->folder != NULL) s->path = joined(m->folder, s->name);
    if (s->path == NULL) return no_memory(why);
    if (stat(s->path, &st) != 0)
        return explain(why, QUERN_ERR_IO, "shard '%s': %s", TEXT_NAME(s->path), strerror(errno));
    const quern_status status = quern_safetensors_open(s->path, &s->file);
    if (status != QUERN_OK)
        return explain(why, status, "shard '%s': %s", TEXT_NAME(s->path), quern_last_error(NULL));
    s->bytes = (int64_t)st.st_size;
    s->changed = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    m->count += quern_safetensors_count(s->file);
    return QUERN_OK;
}

static int by_tensor_name(const void *a, const void *b, void *arg)
{
    const model_files *m = arg;
    return strcmp(m->tensors[*(const size_t *)a].name, m->tensors[*(const size_t *)b].name);
}

static quern_status list_tensors(model_files *m, char why[MODEL_SENTENCE])
{
    m->tensors = calloc(m->count + 1, sizeof *m->tensors);
    m->by_name = calloc(m->count + 1, sizeof *m->by_name);
    if (m->tensors == NULL || m->by_name == NULL) return no_memory(why);
    size_t n = 0;
    for (size_t s = 0; s < m->shard_count; s++) {
        const quern_safetensors *file = m->shards[s].file;
        for (size_t i = 0; i < quern_safetensors_count(file); i++, n++) {
            quern_safetensors_data data = QUERN_SAFETENSORS_DATA_INIT;
            const char *name = quern_safetensors_name(file, i);
            const quern_status status = quern_safetensors_bytes(file, name, &data);
            if (status != QUERN_OK)
                return explain(why, status, "shard '%s': %s", TEXT_NAME(m->shards[s].path),
                               quern_last_error(NULL));
            m->tensors[n] =
                (model_tensor){name, data.dtype, data.data, (int64_t)data.bytes, data.shape, data.ndim, s};
            m->by_name[n] = n;
        }
    }
    qsort_r(m->by_name, m->count, sizeof *m->by_name, by_tensor_name, m);
    for (size_t i = 1; i < m->count; i++) {
        const model_tensor *a = &m->tensors[m->by_name[i - 1]], *b = &m->tensors[m->by_name[i]];
        if (strcmp(a->name, b->name) == 0)
            return explain(why, QUERN_ERR_FORMAT, "tensor '%s' is in shard '%s' and in shard '%s'",
                           TEXT_NAME(a->name), TEXT_NAME(m->shards[a->shard].name),
                           TEXT_NAME(m->shards[b->shard].name));
    }
    return QUERN_OK;
}

/* Every tensor stands where the index says, and the index knows every tensor. */
static quern_status compare_index(const model_files *m, const index_file *index, char why[MODEL_SENTENCE])
{
    for (size_t i = 0; i < index->count; i++) {
        const placed *p = &index->placed[i];
        const model_tensor *t = model_files_find(m, p->tensor);
        if (t == NULL || strcmp(m->shards[t->shard].name, p->shard) != 0)
            return explain(why, QUERN_ERR_FORMAT,
                           "index '%s': tensor '%s' is not in shard '%s', where it says so",
                           TEXT_NAME(m->index), TEXT_NAME(p->tensor), TEXT_NAME(p->shard));
    }
    for (size_t i = 0; i < m->count; i++) {
        const placed key = {m->tensors[i].name, NULL};
        if (index->count == 0 || bsearch(&key, index->placed, index->count, sizeof key, by_tensor) == NULL)
            return explain(why, QUERN_ERR_FORMAT, "index '%s': it lacks tensor '%s' of shard '%s'",
                           TEXT_NAME(m->index), TEXT_NAME(key.tensor),
                           TEXT_NAME(m->shards[m->tensors[i].shard].name));
    }
    return QUERN_OK;
}

/* What the folder's files say: an index, or one file alone. */
typedef struct found {
    char index[NAME_MAX + 1], alone[NAME_MAX + 1];
    size_t indices, files;
} found;

static quern_status look_around(const char *folder, found *f, char why[MODEL_SENTENCE])
{
    DIR *dir = opendir(folder);
    if (dir == NULL) return explain(why, QUERN_ERR_IO, "'%s': %s", TEXT_NAME(folder), strerror(errno));
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        const bool index = has_suffix(e->d_name, INDEX_SUFFIX), file = has_suffix(e->d_name, SUFFIX);
        if (index && strcmp(f->index, "model" INDEX_SUFFIX) != 0)
            snprintf(f->index, sizeof f->index, "%s", e->d_name);
        if (file && strcmp(f->alone, "model" SUFFIX) != 0)
            snprintf(f->alone, sizeof f->alone, "%s", e->d_name);
        f->indices += index;
        f->files += file;
    }
    closedir(dir);
    if (f->indices > 1 && strcmp(f->index, "model" INDEX_SUFFIX) != 0)
        return explain(why, QUERN_ERR_FORMAT,
                       "'%s' has %zu files *" INDEX_SUFFIX ": one index, or model" INDEX_SUFFIX
                       ", is accepted",
                       TEXT_NAME(folder), f->indices);
    if (f->indices == 0 && (f->files == 0 || (f->files > 1 && strcmp(f->alone, "model" SUFFIX) != 0)))
        return explain(why, QUERN_ERR_FORMAT,
                       "'%s' has no index and %zu files *" SUFFIX ": an index, or one file, is needed",
                       TEXT_NAME(folder), f->files);
    return QUERN_OK;
}

static quern_status one_shard(model_files *m, const char *path, char why[MODEL_SENTENCE])
{
    const char *slash = strrchr(path, '/');
    m->shards = calloc(1, sizeof *m->shards);
    if (m->shards == NULL) return no_memory(why);
    m->shard_count = 1;
    m->shards->name = strdup(slash != NULL ? slash + 1 : path);
    if (m->folder == NULL) m->shards->path = strdup(path);
    return m->shards->name != NULL ? QUERN_OK : no_memory(why);
}

static quern_status open_folder(model_files *m, const char *path, index_file *index, char why[MODEL_SENTENCE])
{
    found f = {0};
    quern_status status = look_around(path, &f, why);
    if (status != QUERN_OK) return status;
    m->folder = strdup(path);
    if (m->folder == NULL) return no_memory(why);
    if (f.indices == 0) return one_shard(m, f.alone, why);
    m->index = strdup(f.index);
    char *index_path = joined(path, f.index);
    status = m->index != NULL && index_path != NULL ? read_index(index_path, index, why) : no_memory(why);
    free(index_path);
    return status == QUERN_OK ? list_shards(m, index, why) : status;
}

quern_status model_files_open(const char *path, model_files **model, char why[MODEL_SENTENCE])
{
    struct stat st;
    index_file index = {0};
    if (stat(path, &st) != 0) return explain(why, QUERN_ERR_IO, "'%s': %s", TEXT_NAME(path), strerror(errno));
    model_files *m = calloc(1, sizeof *m);
    if (m == NULL) return no_memory(why);
    quern_status status = S_ISDIR(st.st_mode) ? open_folder(m, path, &index, why) : one_shard(m, path, why);
    for (size_t i = 0; i < m->shard_count && status == QUERN_OK; i++)
        status = open_shard(m, &m->shards[i], why);
    if (status == QUERN_OK) status = list_tensors(m, why);
    if (status == QUERN_OK && m->index != NULL) status = compare_index(m, &index, why);
    close_index(&index);
    if (status == QUERN_OK) *model = m;
    else model_files_close(m);
    return status;
}

void model_files_close(model_files *m)
{
    if (m == NULL) return;
    for (size_t i = 0; i < m->shard_count; i++) {
        quern_safetensors_close(m->shards[i].file);
        free(m->shards[i].name);
        free(m->shards[i].path);
    }
    free(m->shards);
    free(m->tensors);
    free(m->by_name);
    free(m->index);
    free(m->folder);
    free(m);
}

const model_tensor *model_files_find(const model_files *m, const char *name)
{
    size_t low = 0, high = m->count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const model_tensor *t = &m->tensors[m->by_name[middle]];
        const int order = strcmp(name, t->name);
        if (order == 0) return t;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}
