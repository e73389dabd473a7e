/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gguf_read.c - validates a GGUF file and finds its pairs and tensors.
 *
 * Nothing in the file is trusted: a length is compared with what is left before it is used, products are
 * checked for overflow, and memory grows with what has been read, never with a count that the file claims.
 */
#include "io/gguf.h"
#include "io/map.h"

#include "core/text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { DEPTH_MAX = 8 }; /* of arrays in arrays */

typedef struct reader {
    const unsigned char *at, *end;
    char *why;
} reader;

/* A tensor, to be sorted. */
typedef struct handle {
    const gguf_tensor *tensor;
} handle;

/* A file and what it owns. `head` comes first: its address is the file's. */
typedef struct owned {
    gguf_file head;
    gguf_pair *pairs;
    gguf_tensor *tensors;
    char *names; /* every key and name, each with its 0 */
    size_t names_size, names_room;
    const char **keys; /* sorted */
    handle *by_name;   /* sorted */
    void *mapping;
    size_t mapping_size;
} owned;

static quern_status __attribute__((format(printf, 3, 4)))
fail(char *why, quern_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, GGUF_SENTENCE, format, args);
    va_end(args);
    return status;
}

static quern_status no_memory(char *why)
{
    return fail(why, QUERN_ERR_OUT_OF_MEMORY, "no memory for the tables of a GGUF file");
}

static uint64_t little(const unsigned char *bytes, size_t size)
{
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | bytes[i];
    return value;
}

/* Takes an integer of 1, 2, 4 or 8 bytes; false at the end. */
static bool take(reader *r, size_t size, uint64_t *value)
{
    if ((size_t)(r->end - r->at) < size) return false;
    *value = little(r->at, size);
    r->at += size;
    return true;
}

static bool skip(reader *r, uint64_t size)
{
    if ((uint64_t)(r->end - r->at) < size) return false;
    r->at += size;
    return true;
}

static bool grow(void **array, size_t count, size_t size)
{
    if (count > 0 && (count < 8 || (count & (count - 1)) != 0)) return true;
    void *grown = realloc(*array, (count == 0 ? 8 : 2 * count) * size);
    if (grown == NULL) return false;
    *array = grown;
    return true;
}

/* Takes a string that names something and appends it to the names, which may move: *name is good until the
 * next. */
static quern_status take_name(owned *f, reader *r, const char *what, const char **name)
{
    uint64_t length;
    if (!take(r, 8, &length) || (uint64_t)(r->end - r->at) < length)
        return fail(r->why, QUERN_ERR_FORMAT, "the file ends within %s", what);
    const unsigned char *end = r->at + length;
    for (const unsigned char *at = r->at; at < end;) {
        const size_t n = *at == 0 ? 0 : text_character(at, end);
        if (n == 0)
            return fail(r->why, QUERN_ERR_FORMAT, "%s is no UTF-8, or has a zero byte at its byte %td", what,
                        at - r->at);
        at += n;
    }
    if (f->names_room - f->names_size <= length) {
        const size_t room = 2 * (f->names_size + (size_t)length) + 256;
        char *grown = realloc(f->names, room);
        if (grown == NULL) return no_memory(r->why);
        f->names = grown;
        f->names_room = room;
    }
    *name = f->names + f->names_size;
    memcpy(f->names + f->names_size, r->at, (size_t)length);
    f->names_size += (size_t)length;
    f->names[f->names_size++] = '\0';
    r->at = end;
    return QUERN_OK;
}

/* Bytes of a value of a type; 0 where it has no fixed size. */
static size_t value_size(uint64_t type)
{
    static const uint8_t sizes[GGUF_VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < GGUF_VALUE_TYPES ? sizes[type] : 0;
}

/* Skips a value. False: the file ends within it, it has an unknown type, or arrays are nested too deep. */
static bool skip_value(reader *r, uint64_t type, int depth)
{
    uint64_t length, element;
    if (value_size(type) > 0) return skip(r, value_size(type));
    if (type == GGUF_STRING) return take(r, 8, &length) && skip(r, length);
    if (type != GGUF_ARRAY || depth > DEPTH_MAX || !take(r, 4, &element) || !take(r, 8, &length))
        return false;
    const size_t size = value_size(element);
    if (size > 0) return length <= (uint64_t)(r->end - r->at) / size && skip(r, length * size);
    if (element != GGUF_STRING && element != GGUF_ARRAY) return false;
    for (; length > 0; length--)
        if (!skip_value(r, element, depth + 1)) return false;
    return true;
}

static quern_status read_pair(owned *f, reader *r)
{
    const char *key = "";
    uint64_t type, element = 0, count = 0;
    char what[64];
    if (!grow((void **)&f->pairs, f->head.pair_count, sizeof *f->pairs)) return no_memory(r->why);
    gguf_pair *pair = &f->pairs[f->head.pair_count];
    snprintf(what, sizeof what, "key %zu", f->head.pair_count);
    const unsigned char *begin = r->at;
    const quern_status status = take_name(f, r, what, &key);
    if (status != QUERN_OK) return status;
    if (!take(r, 4, &type))
        return fail(r->why, QUERN_ERR_FORMAT, "key '%s': the file ends within it", TEXT_NAME(key));
    reader inside = *r;
    if (type == GGUF_ARRAY && (!take(&inside, 4, &element) || !take(&inside, 8, &count))) inside.at = r->at;
    const unsigned char *value = type == GGUF_ARRAY ? inside.at : r->at;
    if (!skip_value(r, type, 1))
        return fail(r->why, QUERN_ERR_FORMAT,
                    "key '%s': its value is of no type of GGUF, arrays are nested too deep, or the file ends "
                    "within it",
                    TEXT_NAME(key));
    *pair = (gguf_pair){.type = (gguf_value_type)type,
                        .element = (gguf_value_type)element,
                        .count = count,
                        .value = value,
                        .bytes = (size_t)(r->at - value),
                        .raw = begin,
                        .raw_bytes = (size_t)(r->at - begin)};
    f->head.pair_count++;
    return QUERN_OK;
}

/* Reads a tensor's description; its data is its offset until the data's beginning is known. */
static quern_status read_tensor(owned *f, reader *r, uint64_t *offset)
{
    const char *name = "";
    uint64_t ndim, type = 0, extent;
    char what[64];
    gguf_tensor *t = &f->tensors[f->head.tensor_count];
    snprintf(what, sizeof what, "the name of tensor %zu", f->head.tensor_count);
    const quern_status status = take_name(f, r, what, &name);
    if (status != QUERN_OK) return status;
    *t = (gguf_tensor){.name = NULL};
    if (!take(r, 4, &ndim)) ndim = 0;
    else if (ndim > GGUF_MAX_DIMS)
        return fail(r->why, QUERN_ERR_FORMAT, "tensor '%s': %" PRIu64 " dimensions: at most 4 are accepted",
                    TEXT_NAME(name), ndim);
    t->ndim = (int32_t)ndim;
    int64_t elements = 1;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        if (!take(r, 8, &extent)) break;
        if (extent > INT64_MAX ||
            __builtin_mul_overflow(elements, (int64_t)(extent > 0 ? extent : 1), &elements))
            return fail(r->why, QUERN_ERR_FORMAT, "tensor '%s': shape overflows 64 bits", TEXT_NAME(name));
        t->shape[i] = (int64_t)extent;
    }
    if (!take(r, 4, &type) || !take(r, 8, offset))
        return fail(r->why, QUERN_ERR_FORMAT, "tensor '%s': the file ends within its description",
                    TEXT_NAME(name));
    if (type >= GGML_TYPES || ggml_types[type].name == NULL)
        return fail(r->why, QUERN_ERR_FORMAT, "tensor '%s': type %" PRIu64 ": 0 to %d are accepted",
                    TEXT_NAME(name), type, GGML_TYPES - 1);
    t->type = (uint32_t)type;
    const ggml_type *of = &ggml_types[type];
    const int64_t row = t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
    if (row % of->block != 0)
        return fail(r->why, QUERN_ERR_FORMAT,
                    "tensor '%s': rows of %" PRId64 " elements: of type %s a multiple of %d is accepted",
                    TEXT_NAME(name), row, of->name, of->block);
    for (int32_t i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) elements = 0;
    int64_t bytes;
    if (__builtin_mul_overflow(elements / of->block, of->bytes, &bytes))
        return fail(r->why, QUERN_ERR_FORMAT, "tensor '%s': shape overflows 64 bits", TEXT_NAME(name));
    t->bytes = (size_t)bytes;
    return QUERN_OK;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const handle *)a)->tensor->name, ((const handle *)b)->tensor->name);
}

static int by_data(const void *a, const void *b)
{
    const gguf_tensor *x = ((const handle *)a)->tensor, *y = ((const handle *)b)->tensor;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Hands out the names, which no longer move, and refuses one that comes twice. */
static quern_status index_names(owned *f, char *why)
{
    const size_t pairs = f->head.pair_count, tensors = f->head.tensor_count;
    f->keys = calloc(pairs + 1, sizeof *f->keys);
    f->by_name = calloc(tensors + 1, sizeof *f->by_name);
    if (f->keys == NULL || f->by_name == NULL) return no_memory(why);
    const char *at = f->names; /* in the order in which they were read */
    for (size_t i = 0; i < pairs; i++, at += strlen(at) + 1) f->keys[i] = f->pairs[i].key = at;
    for (size_t i = 0; i < tensors; i++, at += strlen(at) + 1) {
        f->tensors[i].name = at;
        f->by_name[i].tensor = &f->tensors[i];
    }
    qsort(f->keys, pairs, sizeof *f->keys, by_text);
    qsort(f->by_name, tensors, sizeof *f->by_name, by_name);
    for (size_t i = 1; i < pairs; i++)
        if (strcmp(f->keys[i - 1], f->keys[i]) == 0)
            return fail(why, QUERN_ERR_FORMAT, "key '%s' is a duplicate", TEXT_NAME(f->keys[i]));
    for (size_t i = 1; i < tensors; i++)
        if (strcmp(f->by_name[i - 1].tensor->name, f->by_name[i].tensor->name) == 0)
            return fail(why, QUERN_ERR_FORMAT, "tensor '%s' is a duplicate",
                        TEXT_NAME(f->by_name[i].tensor->name));
    return QUERN_OK;
}

static quern_status read_alignment(owned *f, char *why)
{
    int64_t alignment = 32;
    const gguf_pair *pair = NULL;
    for (size_t i = 0; i < f->head.pair_count; i++)
        if (strcmp(f->pairs[i].key, "general.alignment") == 0) pair = &f->pairs[i];
    if (pair != NULL && (pair->type != GGUF_U32 || !gguf_integer(pair, &alignment) || alignment < 8 ||
                         (alignment & (alignment - 1)) != 0))
        return fail(why, QUERN_ERR_FORMAT,
                    "general.alignment is no u32 that is a power of two, at least 8, as is accepted");
    f->head.alignment = (uint32_t)alignment;
    return QUERN_OK;
}

/* Places the data: within the file, aligned, without overlap. */
static quern_status place(owned *f, const uint64_t *offsets, const unsigned char *begin, const reader *r)
{
    const uint64_t alignment = f->head.alignment, head = (uint64_t)(r->at - begin);
    const uint64_t start = (head + alignment - 1) / alignment * alignment, size = (uint64_t)(r->end - begin);
    const uint64_t room = start < size ? size - start : 0;
    for (size_t i = 0; i < f->head.tensor_count; i++) {
        gguf_tensor *t = &f->tensors[i];
        if (offsets[i] % alignment != 0 || offsets[i] > room || t->bytes > room - offsets[i])
            return fail(r->why, QUERN_ERR_FORMAT,
                        "tensor '%s': %zu bytes at offset %" PRIu64 ": a multiple of %" PRIu64
                        " and an end within the %" PRIu64 " bytes of data are accepted",
                        TEXT_NAME(t->name), t->bytes, offsets[i], alignment, room);
        t->data = room > 0 ? begin + start + offsets[i] : r->end;
    }
    qsort(f->by_name, f->head.tensor_count, sizeof *f->by_name, by_data);
    for (size_t i = 1; i < f->head.tensor_count; i++) {
        const gguf_tensor *a = f->by_name[i - 1].tensor, *b = f->by_name[i].tensor;
        if (a->bytes > (size_t)(b->data - a->data))
            return fail(r->why, QUERN_ERR_FORMAT, "tensors '%s' and '%s' overlap", TEXT_NAME(a->name),
                        TEXT_NAME(b->name));
    }
    qsort(f->by_name, f->head.tensor_count, sizeof *f->by_name, by_name);
    return QUERN_OK;
}

/* Reads the tensors' descriptions, and places them. */
static quern_status read_tensors(owned *f, reader *r, uint64_t count, const unsigned char *begin)
{
    uint64_t *offsets = NULL;
    quern_status status = QUERN_OK;
    for (uint64_t i = 0; i < count && status == QUERN_OK; i++) {
        if (!grow((void **)&f->tensors, f->head.tensor_count, sizeof *f->tensors) ||
            !grow((void **)&offsets, f->head.tensor_count, sizeof *offsets))
            status = no_memory(r->why);
        else status = read_tensor(f, r, &offsets[f->head.tensor_count]);
        f->head.tensor_count += status == QUERN_OK;
    }
    if (status == QUERN_OK) status = index_names(f, r->why);
    if (status == QUERN_OK) status = read_alignment(f, r->why);
    if (status == QUERN_OK) status = place(f, offsets, begin, r);
    free(offsets);
    return status;
}

static quern_status parse(owned *f, const unsigned char *bytes, size_t size, char *why)
{
    uint64_t version, tensors, pairs;
    reader r = {bytes + (size < 4 ? size : 4), bytes + size, why};
    if (size < 4 || memcmp(bytes, "GGUF", 4) != 0)
        return fail(why, QUERN_ERR_FORMAT, "the file does not begin with \"GGUF\"");
    if (!take(&r, 4, &version) || (version != 2 && version != 3))
        return fail(why, QUERN_ERR_FORMAT, "GGUF version %" PRIu64 "%s: 2 and 3, little-endian, are accepted",
                    size < 8 ? 0 : version,
                    size >= 8 && (version & 0xffff) == 0 && version > 0 ? " (big-endian)" : "");
    if (!take(&r, 8, &tensors) || !take(&r, 8, &pairs))
        return fail(why, QUERN_ERR_FORMAT, "the file ends within its head");
    f->head.version = (uint32_t)version;
    for (uint64_t i = 0; i < pairs; i++) {
        const quern_status status = read_pair(f, &r);
        if (status != QUERN_OK) return status;
    }
    const quern_status status = read_tensors(f, &r, tensors, bytes);
    f->head.pairs = f->pairs;
    f->head.tensors = f->tensors;
    return status;
}

static quern_status open_parsed(void *mapping, const void *bytes, size_t size, gguf_file **file, char *why)
{
    owned *f = calloc(1, sizeof *f);
    if (f == NULL) {
        if (mapping != NULL) munmap(mapping, size);
        return no_memory(why);
    }
    f->mapping = mapping;
    f->mapping_size = size;
    const quern_status status = parse(f, bytes != NULL ? bytes : (const void *)"", size, why);
    if (status != QUERN_OK) gguf_close(&f->head);
    else *file = &f->head;
    return status;
}

quern_status gguf_open_bytes(const void *bytes, size_t size, gguf_file **file, char why[GGUF_SENTENCE])
{
    return open_parsed(NULL, bytes, size, file, why);
}

quern_status gguf_open(const char *path, gguf_file **file, char why[GGUF_SENTENCE])
{
    void *mapping;
    size_t size;
    const quern_status status = map_file(path, &mapping, &size, why, GGUF_SENTENCE);
    return status == QUERN_OK ? open_parsed(mapping, mapping, size, file, why) : status;
}

void gguf_close(gguf_file *file)
{
    owned *f = (owned *)file;
    if (f == NULL) return;
    free(f->pairs);
    free(f->tensors);
    free(f->names);
    free((void *)f->keys);
    free(f->by_name);
    if (f->mapping != NULL) munmap(f->mapping, f->mapping_size);
    free(f);
}

const gguf_pair *gguf_find_pair(const gguf_file *file, const char *key)
{
    for (size_t i = 0; i < file->pair_count; i++)
        if (strcmp(file->pairs[i].key, key) == 0) return &file->pairs[i];
    return NULL;
}

const gguf_tensor *gguf_find_tensor(const gguf_file *file, const char *name)
{
    const owned *f = (const owned *)file;
    const gguf_tensor wanted = {.name = name};
    const handle key = {&wanted};
    const handle *found = bsearch(&key, f->by_name, file->tensor_count, sizeof *f->by_name, by_name);
    return found != NULL ? found->tensor : NULL;
}
