/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors_read.c - validates a header and hands out views into the mapping.
 *
 * Nothing in a file is trusted: every length is compared with what is there before it is used, every
 * product is checked for overflow, and the ranges must tile the data without overlap or hole. Files
 * whose header length is no multiple of 8 put data at odd addresses; such tensors are copied once, at
 * open, because a view's data is aligned to its element.
 */
#include "io/safetensors.h"

#include "core/error.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct entry {
    const char *name; /* owned by the JSON tree */
    const struct format_dtype *dtype;
    const void *data;
    void *copy; /* of misaligned data */
    uint64_t begin, end;
    size_t ndim;
    int64_t shape[QUERN_MAX_DIMS]; /* valid where ndim <= QUERN_MAX_DIMS */
} entry;

struct quern_safetensors {
    json_t *header;
    json_t *metadata; /* borrowed from header; may be NULL */
    const char **keys; /* of the metadata */
    entry *entries;
    size_t count;
    void *mapping; /* NULL when the bytes are the caller's */
    size_t mapping_size;
};

/* Every dtype of the format; `ours` is -1 where quern_dtype has none. */
static const struct format_dtype {
    const char *name;
    uint8_t bits;
    int8_t ours;
} dtypes[] = {
    {"F32", 32, QUERN_F32}, {"F16", 16, QUERN_F16}, {"BF16", 16, QUERN_BF16}, {"I32", 32, QUERN_I32},
    {"U8", 8, QUERN_U8},    {"I64", 64, QUERN_I64}, {"F64", 64, -1},          {"BOOL", 8, -1},
    {"I8", 8, -1},          {"I16", 16, -1},        {"U16", 16, -1},          {"U32", 32, -1},
    {"U64", 64, -1},        {"C64", 64, -1},        {"F8_E4M3", 8, -1},       {"F8_E5M2", 8, -1},
    {"F8_E8M0", 8, -1},     {"F6_E2M3", 6, -1},     {"F6_E3M2", 6, -1},       {"F4", 4, -1},
};

static const struct format_dtype *dtype_named(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0) return &dtypes[i];
    return NULL;
}

/* Reads a JSON array of `count` non-negative integers (count < 0: any number of them, up to `room`
 * stored). False where it is anything else. */
static bool read_integers(const json_t *array, int64_t count, int64_t *out, size_t room)
{
    if (!json_is_array(array)) return false;
    const size_t n = json_array_size(array);
    if (count >= 0 && n != (size_t)count) return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(array, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0) return false;
        if (i < room) out[i] = json_integer_value(item);
    }
    return true;
}

static quern_status bad_tensor(const char *name, const char *what)
{
    return error_set(QUERN_ERR_FORMAT, "tensor '%.100s': %s", name, what);
}

static quern_status read_entry(entry *e, const char *name, const json_t *info, uint64_t data_size)
{
    if (!json_is_object(info)) return bad_tensor(name, "its description is no JSON object");
    const char *dtype = json_string_value(json_object_get(info, "dtype"));
    if (dtype == NULL) return bad_tensor(name, "dtype is missing or no string");
    e->name = name;
    e->dtype = dtype_named(dtype);
    if (e->dtype == NULL)
        return error_set(QUERN_ERR_FORMAT, "tensor '%.100s': dtype '%.40s' is none of the format's", name, dtype);
    const json_t *shape = json_object_get(info, "shape");
    if (!read_integers(shape, -1, e->shape, QUERN_MAX_DIMS))
        return bad_tensor(name, "shape must be an array of integers >= 0");
    int64_t offsets[2];
    if (!read_integers(json_object_get(info, "data_offsets"), 2, offsets, 2))
        return bad_tensor(name, "data_offsets must be an array of two integers >= 0");
    e->ndim = json_array_size(shape);
    e->begin = (uint64_t)offsets[0];
    e->end = (uint64_t)offsets[1];
    if (e->begin > e->end || e->end > data_size)
        return error_set(QUERN_ERR_FORMAT,
                         "tensor '%.100s': data_offsets [%" PRIu64 ", %" PRIu64
                         "]: a rising range within the %" PRIu64 " bytes of data is accepted",
                         name, e->begin, e->end, data_size);
    int64_t bits = e->dtype->bits; /* of the extents > 0, so that strides cannot overflow either */
    bool empty = false;
    for (size_t i = 0; i < e->ndim; i++) {
        const int64_t extent = json_integer_value(json_array_get(shape, i));
        if (extent == 0) empty = true;
        else if (__builtin_mul_overflow(bits, extent, &bits)) return bad_tensor(name, "shape overflows 64 bits");
    }
    if (empty) bits = 0;
    if (bits % 8 != 0 || (uint64_t)bits / 8 != e->end - e->begin)
        return error_set(QUERN_ERR_FORMAT,
                         "tensor '%.100s': shape and dtype make %" PRId64 " bits, data_offsets %" PRIu64
                         " bytes: they must agree",
                         name, bits, e->end - e->begin);
    return QUERN_OK;
}

static int by_range(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

static quern_status check_tiling(const quern_safetensors *f, uint64_t data_size)
{
    uint64_t at = 0;
    for (size_t i = 0; i < f->count; i++) {
        const entry *e = &f->entries[i];
        if (e->begin != at)
            return error_set(QUERN_ERR_FORMAT,
                             "tensor '%.100s' begins at byte %" PRIu64 " of the data where %" PRIu64
                             " is due: %s",
                             e->name, e->begin, at, e->begin < at ? "ranges overlap" : "there is a hole");
        at = e->end;
    }
    if (at != data_size)
        return error_set(QUERN_ERR_FORMAT,
                         "the tensors end at byte %" PRIu64 " of the data, the file at byte %" PRIu64
                         ": they must agree",
                         at, data_size);
    return QUERN_OK;
}

static quern_status read_metadata(quern_safetensors *f)
{
    f->metadata = json_object_get(f->header, SAFETENSORS_METADATA);
    if (f->metadata == NULL) return QUERN_OK;
    if (!json_is_object(f->metadata))
        return error_set(QUERN_ERR_FORMAT, "__metadata__ must be a JSON object of strings");
    f->keys = calloc(json_object_size(f->metadata) + 1, sizeof *f->keys);
    if (f->keys == NULL) return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for the metadata");
    const char *key;
    json_t *value;
    size_t n = 0;
    json_object_foreach(f->metadata, key, value) {
        if (!json_is_string(value))
            return error_set(QUERN_ERR_FORMAT, "__metadata__ '%.100s' is no string: only strings are accepted", key);
        f->keys[n++] = key;
    }
    return QUERN_OK;
}

static quern_status place_data(entry *e, const unsigned char *data)
{
    const size_t align = e->dtype->ours >= 0 ? e->dtype->bits / 8 : 1;
    e->data = data + e->begin;
    if (e->end == e->begin || (uintptr_t)e->data % align == 0) return QUERN_OK;
    e->copy = malloc(e->end - e->begin);
    if (e->copy == NULL)
        return error_set(QUERN_ERR_OUT_OF_MEMORY, "tensor '%.100s': no memory for an aligned copy of %" PRIu64 " bytes",
                         e->name, e->end - e->begin);
    memcpy(e->copy, e->data, e->end - e->begin);
    e->data = e->copy;
    return QUERN_OK;
}

static quern_status parse(quern_safetensors *f, const unsigned char *bytes, size_t size)
{
    if (bytes == NULL || size < 8)
        return error_set(QUERN_ERR_FORMAT, "the file has %zu bytes: a safetensors file has at least 8", size);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
    if (length > SAFETENSORS_MAX_HEADER || length > size - 8)
        return error_set(QUERN_ERR_FORMAT,
                         "header length %" PRIu64 ": at most %d, and no more than the %zu bytes that follow, is accepted",
                         length, SAFETENSORS_MAX_HEADER, size - 8);
    if (length == 0 || bytes[8] != '{')
        return error_set(QUERN_ERR_FORMAT, "the header must be a JSON object that begins with '{'");
    json_error_t error;
    f->header = json_loadb((const char *)bytes + 8, length, JSON_REJECT_DUPLICATES, &error);
    if (f->header == NULL)
        return error_set(QUERN_ERR_FORMAT, "the header is no valid JSON: %.150s, at byte %d", error.text,
                         error.position);
    quern_status status = read_metadata(f);
    if (status != QUERN_OK) return status;
    const uint64_t data_size = size - 8 - length;
    f->entries = calloc(json_object_size(f->header) + 1, sizeof *f->entries);
    if (f->entries == NULL)
        return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for %zu tensors", json_object_size(f->header));
    const char *name;
    json_t *info;
    json_object_foreach(f->header, name, info) {
        if (strcmp(name, SAFETENSORS_METADATA) == 0) continue;
        status = read_entry(&f->entries[f->count++], name, info, data_size);
        if (status != QUERN_OK) return status;
    }
    qsort(f->entries, f->count, sizeof *f->entries, by_range);
    status = check_tiling(f, data_size);
    for (size_t i = 0; i < f->count && status == QUERN_OK; i++)
        status = place_data(&f->entries[i], bytes + 8 + length);
    return status;
}

static quern_status open_parsed(void *mapping, const void *bytes, size_t size, quern_safetensors **file)
{
    quern_safetensors *f = calloc(1, sizeof *f);
    quern_status status = f == NULL ? error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for a file's table") : QUERN_OK;
    if (f == NULL) {
        if (mapping != NULL) munmap(mapping, size);
        return status;
    }
    f->mapping = mapping;
    f->mapping_size = size;
    status = parse(f, bytes, size);
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
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a pointer is needed", file == NULL ? "file" : "bytes");
    return open_parsed(NULL, bytes, size, file);
}

quern_status quern_safetensors_open(const char *path, quern_safetensors **file)
{
    if (path == NULL || file == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a pointer is needed", path == NULL ? "path" : "file");
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        const int why = errno;
        if (fd >= 0) close(fd);
        return error_set(QUERN_ERR_IO, "cannot open '%s': %s", path, strerror(why));
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return error_set(QUERN_ERR_IO, "cannot map '%s': it is no regular file", path);
    }
    void *mapping = NULL;
    if (st.st_size > 0) {
        mapping = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (mapping == MAP_FAILED) {
            const int why = errno;
            close(fd);
            return error_set(QUERN_ERR_IO, "cannot map '%s': %s", path, strerror(why));
        }
    }
    close(fd);
    return open_parsed(mapping, mapping, (size_t)st.st_size, file);
}

void quern_safetensors_close(quern_safetensors *file)
{
    if (file == NULL) return;
    for (size_t i = 0; i < file->count; i++) free(file->entries[i].copy);
    free(file->entries);
    free(file->keys);
    json_decref(file->header);
    if (file->mapping != NULL) munmap(file->mapping, file->mapping_size);
    free(file);
}

size_t quern_safetensors_count(const quern_safetensors *file)
{
    return file->count;
}

const char *quern_safetensors_name(const quern_safetensors *file, size_t index)
{
    return index < file->count ? file->entries[index].name : NULL;
}

static const entry *find(const quern_safetensors *file, const char *name)
{
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->entries[i].name, name) == 0) return &file->entries[i];
    return NULL;
}

bool quern_safetensors_has(const quern_safetensors *file, const char *name)
{
    return find(file, name) != NULL;
}

quern_status quern_safetensors_get(const quern_safetensors *file, const char *name, quern_tensor *view)
{
    const entry *e = find(file, name);
    if (e == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "tensor '%.100s': the file has none of this name", name);
    if (e->dtype->ours < 0)
        return error_set(QUERN_ERR_UNSUPPORTED,
                         "tensor '%.100s': dtype %s: F32, F16, BF16, I32, U8 and I64 are accepted", name,
                         e->dtype->name);
    if (e->ndim > QUERN_MAX_DIMS)
        return error_set(QUERN_ERR_UNSUPPORTED, "tensor '%.100s': %zu dimensions: at most %d are accepted", name,
                         e->ndim, QUERN_MAX_DIMS);
    const bool empty = e->begin == e->end;
    *view = quern_tensor_contiguous(empty ? NULL : (void *)(uintptr_t)e->data, (quern_dtype)e->dtype->ours,
                                    (int32_t)e->ndim, e->shape);
    return QUERN_OK;
}

size_t quern_safetensors_metadata_count(const quern_safetensors *file)
{
    return json_object_size(file->metadata);
}

const char *quern_safetensors_metadata_key(const quern_safetensors *file, size_t index)
{
    return index < json_object_size(file->metadata) ? file->keys[index] : NULL;
}

const char *quern_safetensors_metadata(const quern_safetensors *file, const char *key)
{
    return json_string_value(json_object_get(file->metadata, key));
}
