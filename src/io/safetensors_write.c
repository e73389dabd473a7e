/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors_write.c - lays tensors out and writes them through file.c.
 *
 * Tensors are laid out widest element first and the header is padded so that the data starts at a
 * multiple of 64: every tensor is aligned to its element without a hole. Contiguous tensors go to the
 * file from where they lie; strided ones row by row.
 */
#include "io/header_text.h"
#include "io/json.h"
#include "io/safetensors.h"

#include "core/error.h"

#include <quern/file.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { DATA_ALIGN = 64 };

/* UTF-8, with U+0000 as the reader hands it out. */
static bool is_text(const char *string)
{
    const unsigned char *at = (const unsigned char *)string, *end = at + strlen(string);
    while (at < end) {
        const bool zero = end - at >= 2 && memcmp(at, JSON_ZERO, 2) == 0;
        const size_t n = zero ? 2 : text_character(at, end);
        if (n == 0) return false;
        at += n;
    }
    return true;
}

static const char *format_name(quern_dtype dtype)
{
    for (size_t i = 0; i < safetensors_dtype_count; i++)
        if (safetensors_dtypes[i].ours == (int)dtype) return safetensors_dtypes[i].name;
    return NULL;
}

/* Bytes of a tensor's elements, or -1 where the view is not one that can be written. */
static int64_t tensor_bytes(const quern_tensor *t)
{
    if (format_name(t->dtype) == NULL || t->device != QUERN_CPU || t->ndim < 0 || t->ndim > QUERN_MAX_DIMS)
        return -1;
    const bool packed = t->dtype == QUERN_E2M1X2; /* the file counts its 4-bit elements */
    if (packed && (t->ndim == 0 || t->shape[t->ndim - 1] > INT64_MAX / 2)) return -1;
    int64_t bytes = (int64_t)quern_dtype_size(t->dtype);
    bool empty = false;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0) return -1;
        empty = empty || t->shape[i] == 0;
    }
    for (int32_t i = 0; i < t->ndim && !empty; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes)) return -1;
    if (empty) return 0;
    return t->data == NULL ? -1 : bytes;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* One of `count` names that occurs twice; NULL where each occurs once. Sorts them. */
static const char *duplicate(const char **names, size_t count)
{
    qsort(names, count, sizeof *names, by_text);
    for (size_t i = 1; i < count; i++)
        if (strcmp(names[i - 1], names[i]) == 0) return names[i];
    return NULL;
}

static quern_status check_metadata(const quern_safetensors_pair *pairs, size_t count, const char **names)
{
    for (size_t i = 0; i < count; i++) {
        if (pairs[i].key == NULL || pairs[i].value == NULL || !is_text(pairs[i].key) ||
            !is_text(pairs[i].value))
            return error_argument("metadata[%zu]: a key and a value, both UTF-8, are accepted", i);
        names[i] = pairs[i].key;
    }
    const char *twice = duplicate(names, count);
    return twice == NULL
               ? QUERN_OK
               : error_argument("metadata: the key '%s' occurs twice, once is accepted", TEXT_NAME(twice));
}

static quern_status check_items(const quern_safetensors_item *items, size_t count, const char **names)
{
    int64_t all = 0;
    for (size_t i = 0; i < count; i++) {
        if (items[i].name == NULL || items[i].tensor == NULL ||
            strcmp(items[i].name, SAFETENSORS_METADATA) == 0)
            return error_argument("items[%zu]: a name other than __metadata__ and a tensor are needed", i);
        if (!is_text(items[i].name))
            return error_argument("items[%zu] '%s': a UTF-8 name is accepted", i, TEXT_NAME(items[i].name));
        const int64_t bytes = tensor_bytes(items[i].tensor);
        if (bytes < 0)
            return error_argument("items[%zu] '%s': a CPU tensor with data, of a known dtype, with 0 to %d "
                                  "extents >= 0 (e2m1x2: at least 1) and fewer than 2^63 bytes is accepted",
                                  i, TEXT_NAME(items[i].name), QUERN_MAX_DIMS);
        if (__builtin_add_overflow(all, bytes, &all))
            return error_argument("items: together they have 2^63 bytes or more");
        names[i] = items[i].name;
    }
    const char *twice = duplicate(names, count);
    return twice == NULL
               ? QUERN_OK
               : error_argument("items[...]: the name '%s' occurs twice, once is accepted", TEXT_NAME(twice));
}

/* Calls visit for each tensor in file order: widest element first. */
static bool each_item(const quern_safetensors_item *items, size_t count,
                      bool (*visit)(void *arg, const quern_safetensors_item *item), void *arg)
{
    for (size_t width = 8; width > 0; width /= 2)
        for (size_t i = 0; i < count; i++)
            if (quern_dtype_size(items[i].tensor->dtype) == width && !visit(arg, &items[i])) return false;
    return true;
}

typedef struct layout {
    header_text *header;
    int64_t at; /* where the next tensor's data begins */
} layout;

static bool describe(void *arg, const quern_safetensors_item *item)
{
    layout *l = arg;
    const quern_tensor *t = item->tensor;
    const int64_t end = l->at + tensor_bytes(t);
    header_add(l->header, "%s", l->header->size > 1 ? "," : "");
    header_add_string(l->header, item->name);
    header_add(l->header, ":{\"dtype\":\"%s\",\"shape\":[", format_name(t->dtype));
    for (int32_t i = 0; i < t->ndim; i++) {
        const bool packed = t->dtype == QUERN_E2M1X2 && i == t->ndim - 1;
        header_add(l->header, "%s%" PRId64, i > 0 ? "," : "", packed ? 2 * t->shape[i] : t->shape[i]);
    }
    header_add(l->header, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", l->at, end);
    l->at = end;
    return true;
}

static void describe_metadata(header_text *header, const quern_safetensors_pair *pairs, size_t count)
{
    if (count == 0) return;
    header_add(header, "\"%s\":{", SAFETENSORS_METADATA);
    for (size_t i = 0; i < count; i++) {
        header_add(header, "%s", i > 0 ? "," : "");
        header_add_string(header, pairs[i].key);
        header_add(header, ":");
        header_add_string(header, pairs[i].value);
    }
    header_add(header, "}");
}

/* The header padded with spaces, after its length. */
static void build_header(header_text *header, const quern_safetensors_item *items, size_t count,
                         const quern_safetensors_pair *pairs, size_t pair_count)
{
    layout l = {header, 0};
    header_add(header, "{");
    describe_metadata(header, pairs, pair_count);
    each_item(items, count, describe, &l);
    header_add(header, "}");
    while (!header->failed && (8 + header->size) % DATA_ALIGN != 0) header_add(header, " ");
}

/* Writes dimensions dim ... ndim - 1 of the tensor from `data` on. */
static bool put_tensor(quern_file *file, const quern_tensor *t, int32_t dim, const unsigned char *data)
{
    const int64_t element = (int64_t)quern_dtype_size(t->dtype);
    int64_t run = 1; /* elements from `dim` on, if they lie without a gap */
    bool dense = true;
    for (int32_t i = t->ndim - 1; i >= dim; i--) {
        dense = dense && (t->strides[i] == run || t->shape[i] == 1);
        run *= t->shape[i];
    }
    if (dense) return quern_file_write(file, data, (size_t)(run * element)) == QUERN_OK;
    for (int64_t i = 0; i < t->shape[dim]; i++)
        if (!put_tensor(file, t, dim + 1, data + i * t->strides[dim] * element)) return false;
    return true;
}

static bool put_item(void *arg, const quern_safetensors_item *item)
{
    return tensor_bytes(item->tensor) == 0 || put_tensor(arg, item->tensor, 0, item->tensor->data);
}

static quern_status write_file(const char *path, const header_text *header,
                               const quern_safetensors_item *items, size_t count)
{
    quern_file *file = NULL;
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)((uint64_t)header->size >> 8 * i);
    quern_status status = quern_file_create(path, &file);
    if (status == QUERN_OK) status = quern_file_write(file, size, sizeof size);
    if (status == QUERN_OK) status = quern_file_write(file, header->bytes, header->size);
    if (status == QUERN_OK && !each_item(items, count, put_item, file)) status = QUERN_ERR_IO;
    if (status == QUERN_OK) return quern_file_commit(file);
    quern_file_discard(file);
    return status;
}

quern_status quern_safetensors_save(const char *path, const quern_safetensors_item *items, size_t count,
                                    const quern_safetensors_pair *metadata, size_t metadata_count)
{
    if (path == NULL || (items == NULL && count > 0) || (metadata == NULL && metadata_count > 0))
        return error_argument("%s is NULL: a pointer is needed", path == NULL                 ? "path"
                                                                 : items == NULL && count > 0 ? "items"
                                                                                              : "metadata");
    header_text header = {0};
    const char **names = calloc((count > metadata_count ? count : metadata_count) + 1, sizeof *names);
    if (names == NULL) return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for %zu tensors", count);
    quern_status status = check_metadata(metadata, metadata_count, names);
    if (status == QUERN_OK) status = check_items(items, count, names);
    free(names);
    if (status != QUERN_OK) return status;
    build_header(&header, items, count, metadata, metadata_count);
    if (!header.failed) status = write_file(path, &header, items, count);
    else if (header.size > SAFETENSORS_MAX_HEADER)
        status = error_argument(
            "items and metadata: their header is longer than the %d bytes that the format accepts",
            SAFETENSORS_MAX_HEADER);
    else status = error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for the header of %zu tensors", count);
    free(header.bytes);
    return status;
}
