/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors_read.c - validates a header and hands out views into the mapping.
 *
 * Nothing in a file is trusted: every length is compared with what is there before it is used, every
 * product is checked for overflow, and the ranges must tile the data without overlap or hole. Files
 * whose header length is no multiple of 8 put data at odd addresses; such a tensor is copied once, when
 * it is first asked for, because a view's data is aligned to its element.
 */
#include "io/json.h"
#include "io/map.h"
#include "io/safetensors.h"

#include "core/error.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct entry {
    const char *name;
    const format_dtype *dtype;
    void *copy; /* of misaligned data that has been asked for; read and set atomically */
    int64_t begin, end;
    size_t ndim, first_extent; /* its shape is extents[first_extent ...] of the file */
    int64_t elements;          /* product of the extents > 0, so that strides cannot overflow either */
    bool empty;
    bool pairs; /* of 4-bit elements, which the shape counts by two */
} entry;

typedef struct pair {
    const char *key, *value;
} pair;

/* A name and the index of what it names. */
typedef struct named {
    const char *name;
    size_t index;
} named;

struct quern_safetensors {
    char *strings; /* what names, keys and values point into */
    entry *entries;
    pair *pairs;             /* of the metadata */
    named *by_name, *by_key; /* sorted by name */
    int64_t *extents;        /* of all tensors */
    size_t count, pair_count, extent_count;
    bool has_metadata;
    const unsigned char *data; /* what data_offsets count from */
    void *mapping;             /* NULL when the bytes are the caller's */
    size_t mapping_size;
};

static quern_status no_memory(const char *what)
{
    return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for %s of a safetensors file", what);
}

static quern_status bad_json(const json_reader *r)
{
    return error_set(QUERN_ERR_FORMAT, "the header is no valid JSON: %s, at byte %td", r->error,
                     r->at - r->begin);
}

static quern_status bad_tensor(const char *name, const char *what)
{
    return error_set(QUERN_ERR_FORMAT, "tensor '%s': %s", TEXT_NAME(name), what);
}

/* Makes room for one more element after `count`; room doubles at powers of two. False without memory. */
static bool grow(void **array, size_t count, size_t size)
{
    if (count > 0 && (count < 8 || (count & (count - 1)) != 0)) return true;
    void *grown = realloc(*array, (count == 0 ? 8 : 2 * count) * size);
    if (grown == NULL) return false;
    *array = grown;
    return true;
}

static const format_dtype *dtype_named(const char *name)
{
    for (size_t i = 0; i < safetensors_dtype_count; i++)
        if (strcmp(safetensors_dtypes[i].name, name) == 0) return &safetensors_dtypes[i];
    return NULL;
}

/* An array of integers >= 0, appended to the file's extents. */
typedef struct integers {
    quern_safetensors *file;
    size_t count;
    int64_t product; /* of those > 0; -1 where it overflows */
    bool zero;       /* one is 0 */
    bool good;       /* it is such an array */
    bool no_room;    /* no memory */
} integers;

/* Reads one element. False where the JSON itself is bad, or there is no memory. */
static bool read_integer(json_reader *r, integers *list)
{
    quern_safetensors *f = list->file;
    const int next = json_peek(r);
    bool integer = false;
    int64_t value = 0;
    const bool number = next == '-' || (next >= '0' && next <= '9');
    if (!(number ? json_take_number(r, &integer, &value) : json_skip(r))) return false;
    list->good = list->good && integer && value >= 0;
    list->no_room = !grow((void **)&f->extents, f->extent_count, sizeof *f->extents);
    if (list->no_room) return false;
    f->extents[f->extent_count++] = value;
    list->count++;
    list->zero = list->zero || value == 0;
    if (value > 0 && list->product > 0 && __builtin_mul_overflow(list->product, value, &list->product))
        list->product = -1;
    return true;
}

static bool read_integers(json_reader *r, integers *list)
{
    list->good = json_peek(r) == '[';
    list->product = 1;
    if (!list->good) return json_skip(r);
    bool more = true;
    for (bool first = true; more; first = false) {
        if (!json_next_element(r, first, &more)) return false;
        if (more && !read_integer(r, list)) return false;
    }
    return true;
}

static quern_status read_shape(quern_safetensors *f, json_reader *r, entry *e)
{
    integers list = {.file = f};
    e->first_extent = f->extent_count;
    if (!read_integers(r, &list)) return list.no_room ? no_memory("the shapes") : bad_json(r);
    if (!list.good || list.count > INT32_MAX)
        return bad_tensor(e->name, "shape must be an array of integers >= 0");
    e->ndim = list.count;
    e->elements = list.product;
    e->empty = list.zero;
    return QUERN_OK;
}

static quern_status read_offsets(quern_safetensors *f, json_reader *r, entry *e)
{
    integers list = {.file = f};
    const size_t first = f->extent_count;
    if (!read_integers(r, &list)) return list.no_room ? no_memory("the offsets") : bad_json(r);
    if (!list.good || list.count != 2)
        return bad_tensor(e->name, "data_offsets must be an array of two integers >= 0");
    e->begin = f->extents[first];
    e->end = f->extents[first + 1];
    f->extent_count = first;
    return QUERN_OK;
}

static quern_status read_dtype(quern_safetensors *f, json_reader *r, entry *e)
{
    const char *dtype;
    (void)f;
    if (json_peek(r) != '"') return bad_tensor(e->name, "dtype is missing or no string");
    if (!json_take_string(r, &dtype)) return bad_json(r);
    e->dtype = dtype_named(dtype);
    if (e->dtype == NULL)
        return error_set(QUERN_ERR_FORMAT, "tensor '%s': dtype '%.40s' is none of the format's",
                         TEXT_NAME(e->name), dtype);
    return QUERN_OK;
}

static quern_status check_size(entry *e, uint64_t data_size)
{
    if (e->begin > e->end || (uint64_t)e->end > data_size)
        return error_set(QUERN_ERR_FORMAT,
                         "tensor '%s': data_offsets [%" PRId64 ", %" PRId64
                         "]: a rising range within the %" PRIu64 " bytes of data is accepted",
                         TEXT_NAME(e->name), e->begin, e->end, data_size);
    int64_t bits;
    if (e->elements < 0 || __builtin_mul_overflow(e->elements, e->dtype->bits, &bits))
        return bad_tensor(e->name, "shape overflows 64 bits");
    if (e->empty) bits = 0;
    /* torch counts pairs of 4-bit elements, and so have its writers. Only one count goes with the bytes. */
    e->pairs = e->dtype->bits == 4 && !e->empty && e->elements == e->end - e->begin;
    if (e->pairs) return QUERN_OK;
    if (bits % 8 != 0 || bits / 8 != e->end - e->begin)
        return error_set(QUERN_ERR_FORMAT,
                         "tensor '%s': shape and dtype make %" PRId64 " bits, data_offsets %" PRId64
                         " bytes: they must agree",
                         TEXT_NAME(e->name), bits, e->end - e->begin);
    return QUERN_OK;
}

/* Reads a tensor's description. */
static quern_status read_entry(quern_safetensors *f, json_reader *r, entry *e, uint64_t data_size)
{
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    static const char *const missing[] = {"dtype is missing or no string",
                                          "shape must be an array of integers >= 0",
                                          "data_offsets must be an array of two integers >= 0"};
    static quern_status (*const read[])(quern_safetensors *, json_reader *,
                                        entry *) = {read_dtype, read_shape, read_offsets};
    if (json_peek(r) != '{') return bad_tensor(e->name, "its description is no JSON object");
    bool seen[3] = {false}, more = true;
    const char *key;
    for (bool first = true; more; first = false) {
        if (!json_next_member(r, first, &more, &key)) return bad_json(r);
        if (!more) break;
        int which = 0;
        while (which < 3 && strcmp(key, keys[which]) != 0) which++;
        if (which == 3) {
            if (!json_skip(r)) return bad_json(r);
            continue;
        }
        if (seen[which]) return bad_tensor(e->name, "a key of its description is a duplicate");
        seen[which] = true;
        const quern_status status = read[which](f, r, e);
        if (status != QUERN_OK) return status;
    }
    for (int i = 0; i < 3; i++)
        if (!seen[i]) return bad_tensor(e->name, missing[i]);
    return check_size(e, data_size);
}

static quern_status read_metadata(quern_safetensors *f, json_reader *r)
{
    if (f->has_metadata) return error_set(QUERN_ERR_FORMAT, "__metadata__ is a duplicate");
    f->has_metadata = true;
    if (json_peek(r) == 'n') return json_skip(r) ? QUERN_OK : bad_json(r); /* null: as if it were not there */
    if (json_peek(r) != '{')
        return error_set(QUERN_ERR_FORMAT, "__metadata__ must be a JSON object of strings");
    bool more = true;
    const char *key, *value;
    for (bool first = true; more; first = false) {
        if (!json_next_member(r, first, &more, &key)) return bad_json(r);
        if (!more) break;
        if (json_peek(r) != '"')
            return error_set(QUERN_ERR_FORMAT, "__metadata__ '%s' is no string: only strings are accepted",
                             TEXT_NAME(key));
        if (!json_take_string(r, &value)) return bad_json(r);
        if (!grow((void **)&f->pairs, f->pair_count, sizeof *f->pairs)) return no_memory("the metadata");
        f->pairs[f->pair_count++] = (pair){key, value};
    }
    return QUERN_OK;
}

static quern_status read_header(quern_safetensors *f, json_reader *r, uint64_t data_size)
{
    bool more = true;
    const char *name;
    for (bool first = true; more; first = false) {
        if (!json_next_member(r, first, &more, &name)) return bad_json(r);
        if (!more) break;
        quern_status status;
        if (strcmp(name, SAFETENSORS_METADATA) == 0) {
            status = read_metadata(f, r);
        } else {
            if (!grow((void **)&f->entries, f->count, sizeof *f->entries)) return no_memory("the tensors");
            entry *e = &f->entries[f->count++];
            memset(e, 0, sizeof *e);
            e->name = name;
            status = read_entry(f, r, e, data_size);
        }
        if (status != QUERN_OK) return status;
    }
    return json_end(r) ? QUERN_OK : bad_json(r);
}

static int by_range(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const named *)a)->name, ((const named *)b)->name);
}

/* Sorts names; a name that comes twice is an error. */
static quern_status sort_names(named *names, size_t count)
{
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 1; i < count; i++)
        if (strcmp(names[i - 1].name, names[i].name) == 0)
            return error_set(QUERN_ERR_FORMAT, "the name '%s' is a duplicate in the header",
                             TEXT_NAME(names[i].name));
    return QUERN_OK;
}

static quern_status index_names(quern_safetensors *f)
{
    f->by_name = calloc(f->count + 1, sizeof *f->by_name);
    f->by_key = calloc(f->pair_count + 1, sizeof *f->by_key);
    if (f->by_name == NULL || f->by_key == NULL) return no_memory("the names");
    for (size_t i = 0; i < f->count; i++) f->by_name[i] = (named){f->entries[i].name, i};
    for (size_t i = 0; i < f->pair_count; i++) f->by_key[i] = (named){f->pairs[i].key, i};
    const quern_status status = sort_names(f->by_name, f->count);
    return status == QUERN_OK ? sort_names(f->by_key, f->pair_count) : status;
}

static quern_status check_tiling(const quern_safetensors *f, uint64_t data_size)
{
    int64_t at = 0;
    for (size_t i = 0; i < f->count; i++) {
        const entry *e = &f->entries[i];
        if (e->begin != at)
            return error_set(
                QUERN_ERR_FORMAT,
                "tensor '%s' begins at byte %" PRId64 " of the data where %" PRId64 " is due: %s",
                TEXT_NAME(e->name), e->begin, at, e->begin < at ? "ranges overlap" : "there is a hole");
        at = e->end;
    }
    if ((uint64_t)at != data_size)
        return error_set(QUERN_ERR_FORMAT,
                         "the tensors end at byte %" PRId64 " of the data, the file at byte %" PRIu64
                         ": they must agree",
                         at, data_size);
    return QUERN_OK;
}

static quern_status parse(quern_safetensors *f, const unsigned char *bytes, size_t size)
{
    if (bytes == NULL || size < 8)
        return error_set(QUERN_ERR_FORMAT, "the file has %zu bytes: a safetensors file has at least 8", size);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
    if (size > 8 && bytes[8] != '{')
        return error_set(QUERN_ERR_FORMAT,
                         "it is no safetensors file: one has '{' at byte 8, where its header begins");
    if (length > SAFETENSORS_MAX_HEADER || length > size - 8)
        return error_set(QUERN_ERR_FORMAT,
                         "header length %" PRIu64
                         ": at most %d, and no more than the %zu bytes that follow, is accepted",
                         length, SAFETENSORS_MAX_HEADER, size - 8);
    if (length == 0)
        return error_set(QUERN_ERR_FORMAT, "the header must be a JSON object that begins with '{'");
    f->strings = malloc(length);
    if (f->strings == NULL) return no_memory("the header");
    f->data = bytes + 8 + length;
    const uint64_t data_size = size - 8 - length;
    json_reader reader = {bytes + 8, bytes + 8, bytes + 8 + length, f->strings, NULL};
    quern_status status = read_header(f, &reader, data_size);
    if (status != QUERN_OK) return status;
    if (f->count > 0) qsort(f->entries, f->count, sizeof *f->entries, by_range);
    status = index_names(f);
    return status == QUERN_OK ? check_tiling(f, data_size) : status;
}

static quern_status open_parsed(void *mapping, const void *bytes, size_t size, quern_safetensors **file)
{
    quern_safetensors *f = calloc(1, sizeof *f);
    if (f == NULL) {
        if (mapping != NULL) munmap(mapping, size);
        return no_memory("the table");
    }
    f->mapping = mapping;
    f->mapping_size = size;
    const quern_status status = parse(f, bytes, size);
    if (status != QUERN_OK) {
        quern_safetensors_close(f);
        return status;
    }
    *file = f;
    return QUERN_OK;
}

quern_status quern_safetensors_open_bytes(const void *bytes, size_t size, quern_safetensors **file)
{
    if (file == NULL || (bytes == NULL && size > 0))
        return error_argument("%s is NULL: a pointer is needed", file == NULL ? "file" : "bytes");
    return open_parsed(NULL, bytes, size, file);
}

quern_status quern_safetensors_open(const char *path, quern_safetensors **file)
{
    if (path == NULL || file == NULL)
        return error_argument("%s is NULL: a pointer is needed", path == NULL ? "path" : "file");
    void *mapping;
    size_t size;
    char why[512];
    const quern_status status = map_file(path, &mapping, &size, why, sizeof why);
    if (status != QUERN_OK) return error_set(status, "%s", why);
    return open_parsed(mapping, mapping, size, file);
}

void quern_safetensors_close(quern_safetensors *file)
{
    if (file == NULL) return;
    for (size_t i = 0; i < file->count; i++) free(file->entries[i].copy);
    free(file->entries);
    free(file->pairs);
    free(file->by_name);
    free(file->by_key);
    free(file->extents);
    free(file->strings);
    if (file->mapping != NULL) munmap(file->mapping, file->mapping_size);
    free(file);
}

size_t quern_safetensors_count(const quern_safetensors *file)
{
    return file != NULL ? file->count : 0;
}

const char *quern_safetensors_name(const quern_safetensors *file, size_t index)
{
    return file != NULL && index < file->count ? file->entries[index].name : NULL;
}

static const named *find(const named *names, size_t count, const char *name)
{
    const named key = {name, 0};
    return name != NULL ? bsearch(&key, names, count, sizeof *names, by_name) : NULL;
}

static const named *find_tensor(const quern_safetensors *file, const char *name)
{
    return file != NULL ? find(file->by_name, file->count, name) : NULL;
}

bool quern_safetensors_has(const quern_safetensors *file, const char *name)
{
    return find_tensor(file, name) != NULL;
}

static quern_status no_tensor(const quern_safetensors *file, const char *name)
{
    if (file == NULL) return error_argument("file is NULL: an open file is needed");
    return error_argument("tensor '%s': the file has none of this name",
                          TEXT_NAME(name != NULL ? name : "(NULL)"));
}

/* The tensor's data, aligned to its element. */
static quern_status aligned_data(const quern_safetensors *file, entry *e, void **data)
{
    const size_t bytes = (size_t)(e->end - e->begin), align = e->dtype->bits >= 8 ? e->dtype->bits / 8 : 1;
    const unsigned char *from = file->data + e->begin;
    *data = bytes > 0 ? (void *)(uintptr_t)from : NULL;
    if (bytes == 0 || (uintptr_t)from % align == 0) return QUERN_OK;
    void *before = __atomic_load_n(&e->copy, __ATOMIC_ACQUIRE);
    if (before == NULL) {
        void *copy = malloc(bytes);
        if (copy == NULL)
            return error_set(QUERN_ERR_OUT_OF_MEMORY,
                             "tensor '%s': no memory for an aligned copy of %zu bytes", TEXT_NAME(e->name),
                             bytes);
        memcpy(copy, from, bytes);
        /* another thread may have been faster */
        if (__atomic_compare_exchange_n(&e->copy, &before, copy, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            before = copy;
        else free(copy);
    }
    *data = before;
    return QUERN_OK;
}

quern_status quern_safetensors_get(const quern_safetensors *file, const char *name, quern_tensor *view)
{
    const named *found = find_tensor(file, name);
    if (found == NULL) return no_tensor(file, name);
    if (view == NULL) return error_argument("view is NULL: a place for the view is needed");
    entry *e = &file->entries[found->index];
    if (e->dtype->ours < 0)
        return error_set(
            QUERN_ERR_UNSUPPORTED,
            "tensor '%s': dtype %s: every dtype of the format but F6_E2M3 and F6_E3M2 is accepted",
            TEXT_NAME(name), e->dtype->name);
    if (e->ndim > QUERN_MAX_DIMS)
        return error_set(QUERN_ERR_UNSUPPORTED, "tensor '%s': %zu dimensions: at most %d are accepted",
                         TEXT_NAME(name), e->ndim, QUERN_MAX_DIMS);
    int64_t shape[QUERN_MAX_DIMS];
    if (e->ndim > 0) memcpy(shape, file->extents + e->first_extent, e->ndim * sizeof *shape);
    if (e->dtype->bits == 4 && !e->pairs) { /* the file counts elements, a view bytes */
        if (e->ndim == 0 || shape[e->ndim - 1] % 2 != 0)
            return error_set(QUERN_ERR_UNSUPPORTED, "tensor '%s': dtype F4: an even last extent is accepted",
                             TEXT_NAME(name));
        shape[e->ndim - 1] /= 2;
    }
    void *data;
    const quern_status status = aligned_data(file, e, &data);
    if (status == QUERN_OK)
        *view = quern_tensor_contiguous(data, (quern_dtype)e->dtype->ours, (int32_t)e->ndim, shape);
    return status;
}

quern_status quern_safetensors_bytes(const quern_safetensors *file, const char *name,
                                     quern_safetensors_data *data)
{
    const named *found = find_tensor(file, name);
    if (data == NULL || data->size < sizeof *data)
        return error_argument(
            "data is NULL or smaller than quern_safetensors_data: QUERN_SAFETENSORS_DATA_INIT sets its size");
    if (found == NULL) return no_tensor(file, name);
    const entry *e = &file->entries[found->index];
    data->dtype = e->dtype->name;
    data->bytes = (size_t)(e->end - e->begin);
    data->data = file->data + e->begin;
    data->ndim = (int32_t)e->ndim;
    data->shape = e->ndim > 0 ? file->extents + e->first_extent : NULL;
    return QUERN_OK;
}

size_t quern_safetensors_metadata_count(const quern_safetensors *file)
{
    return file != NULL ? file->pair_count : 0;
}

const char *quern_safetensors_metadata_key(const quern_safetensors *file, size_t index)
{
    return file != NULL && index < file->pair_count ? file->pairs[index].key : NULL;
}

const char *quern_safetensors_metadata(const quern_safetensors *file, const char *key)
{
    const named *found = file != NULL ? find(file->by_key, file->pair_count, key) : NULL;
    return found != NULL ? file->pairs[found->index].value : NULL;
}
