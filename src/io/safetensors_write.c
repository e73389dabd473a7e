/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors_write.c - writes beside the target, syncs, renames.
 *
 * Tensors are laid out widest element first and the header is padded so that the data starts at a
 * multiple of 64: every tensor is aligned to its element without a hole. Contiguous tensors go to the
 * file from where they lie; strided ones row by row through one buffer.
 */
#include "io/safetensors.h"

#include "core/error.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DATA_ALIGN = 64, BUFFER_BYTES = 1 << 18 };

typedef struct output {
    int fd;
    size_t used;
    unsigned char *buffer; /* BUFFER_BYTES */
} output;

static const char *format_name(quern_dtype dtype)
{
    static const char *const names[] = {"F32", "F16", "BF16", "I32", "U8", "I64"};
    return (unsigned)dtype < sizeof names / sizeof *names ? names[dtype] : NULL;
}

/* Bytes of a tensor's elements, or -1 where the view is not one that can be written. */
static int64_t tensor_bytes(const quern_tensor *t)
{
    if (format_name(t->dtype) == NULL || t->device != QUERN_CPU || t->ndim < 0 || t->ndim > QUERN_MAX_DIMS)
        return -1;
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

static json_t *describe(const quern_tensor *t, int64_t begin, int64_t end)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->ndim; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", format_name(t->dtype), "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)end);
}

static quern_status add_metadata(json_t *header, const quern_safetensors_pair *pairs, size_t count)
{
    if (count == 0) return QUERN_OK;
    json_t *object = json_object();
    json_object_set_new(header, SAFETENSORS_METADATA, object);
    for (size_t i = 0; i < count; i++) {
        if (pairs[i].key == NULL || pairs[i].value == NULL || json_object_get(object, pairs[i].key) != NULL ||
            json_object_set_new(object, pairs[i].key, json_string(pairs[i].value)) != 0)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "metadata[%zu]: a key that occurs once and a value, both UTF-8, are accepted", i);
    }
    return QUERN_OK;
}

/* Describes the tensors in file order: `order` lists them widest element first. */
static quern_status build_header(json_t *header, const quern_safetensors_item *items, size_t count, size_t *order)
{
    int64_t at = 0;
    size_t placed = 0;
    for (size_t i = 0; i < count; i++) {
        if (items[i].name == NULL || items[i].tensor == NULL || strcmp(items[i].name, SAFETENSORS_METADATA) == 0)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "items[%zu]: a name other than __metadata__ and a tensor are needed", i);
        if (tensor_bytes(items[i].tensor) < 0)
            return error_set(
                QUERN_ERR_INVALID_ARGUMENT,
                "items[%zu] '%.100s': a CPU tensor with data, of a known dtype, with 0 to %d extents >= 0 and fewer than 2^63 bytes is accepted", i,
                items[i].name, QUERN_MAX_DIMS);
    }
    for (size_t width = 8; width > 0; width /= 2) {
        for (size_t i = 0; i < count; i++) {
            const quern_tensor *t = items[i].tensor;
            if (quern_dtype_size(t->dtype) != width) continue;
            int64_t end;
            if (__builtin_add_overflow(at, tensor_bytes(t), &end))
                return error_set(QUERN_ERR_INVALID_ARGUMENT, "items: together they have 2^63 bytes or more");
            if (json_object_get(header, items[i].name) != NULL ||
                json_object_set_new(header, items[i].name, describe(t, at, end)) != 0)
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "items[%zu] '%.100s': a UTF-8 name that occurs once is accepted", i, items[i].name);
            order[placed++] = i;
            at = end;
        }
    }
    return QUERN_OK;
}

static bool write_all(int fd, const unsigned char *bytes, size_t size)
{
    const size_t most = (size_t)1 << 30;
    while (size > 0) {
        const ssize_t n = write(fd, bytes, size < most ? size : most);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            if (n == 0) errno = EIO;
            return false;
        }
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

static bool flush(output *out)
{
    const size_t used = out->used;
    out->used = 0;
    return write_all(out->fd, out->buffer, used);
}

static bool put(output *out, const unsigned char *bytes, size_t size)
{
    if (size > BUFFER_BYTES - out->used && !flush(out)) return false;
    if (size > BUFFER_BYTES) return write_all(out->fd, bytes, size);
    if (size > 0) memcpy(out->buffer + out->used, bytes, size);
    out->used += size;
    return true;
}

/* Writes dimensions dim ... ndim - 1 of the tensor from `data` on. */
static bool put_tensor(output *out, const quern_tensor *t, int32_t dim, const unsigned char *data)
{
    const int64_t element = (int64_t)quern_dtype_size(t->dtype);
    int64_t run = 1; /* elements from `dim` on, if they lie without a gap */
    bool dense = true;
    for (int32_t i = t->ndim - 1; i >= dim; i--) {
        dense = dense && (t->strides[i] == run || t->shape[i] == 1);
        run *= t->shape[i];
    }
    if (dense) return put(out, data, (size_t)(run * element));
    for (int64_t i = 0; i < t->shape[dim]; i++)
        if (!put_tensor(out, t, dim + 1, data + i * t->strides[dim] * element)) return false;
    return true;
}

static bool put_file(output *out, const char *header, size_t length, const quern_safetensors_item *items,
                     size_t count, const size_t *order)
{
    static const unsigned char spaces[DATA_ALIGN + 1] = "                                                                ";
    const size_t pad = (DATA_ALIGN - (8 + length) % DATA_ALIGN) % DATA_ALIGN;
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)((uint64_t)(length + pad) >> 8 * i);
    if (!put(out, size, 8) || !put(out, (const unsigned char *)header, length) || !put(out, spaces, pad)) return false;
    for (size_t i = 0; i < count; i++) {
        const quern_tensor *t = items[order[i]].tensor;
        if (tensor_bytes(t) > 0 && !put_tensor(out, t, 0, t->data)) return false;
    }
    return flush(out) && fsync(out->fd) == 0;
}

/* Makes the rename itself durable. Some file systems refuse to sync a directory: the file is complete
 * all the same. */
static void sync_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash == NULL ? strdup(".") : strndup(path, (size_t)(slash - path) + 1);
    const int fd = dir == NULL ? -1 : open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(dir);
}

/* Opens a new file beside `path`; its name is left in `temporary`. */
static int open_temporary(const char *path, char *temporary, size_t room)
{
    int fd = -1;
    for (int attempt = 0; attempt < 1000 && fd < 0; attempt++) {
        snprintf(temporary, room, "%s.%ld-%d.tmp", path, (long)getpid(), attempt);
        fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0 && errno != EEXIST) break;
    }
    return fd;
}

static quern_status write_file(const char *path, const char *header, const quern_safetensors_item *items,
                               size_t count, const size_t *order)
{
    const size_t room = strlen(path) + 64;
    char *temporary = malloc(room);
    output out = {-1, 0, malloc(BUFFER_BYTES)};
    quern_status status = QUERN_OK;
    if (temporary == NULL || out.buffer == NULL) {
        status = error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for a write buffer of %d bytes", BUFFER_BYTES);
        goto done;
    }
    out.fd = open_temporary(path, temporary, room);
    if (out.fd < 0) {
        status = error_set(QUERN_ERR_IO, "cannot create '%s': %s", temporary, strerror(errno));
        goto done;
    }
    bool written = put_file(&out, header, strlen(header), items, count, order);
    int why = errno;
    if (close(out.fd) != 0 && written) {
        written = false;
        why = errno;
    }
    if (written && rename(temporary, path) != 0) {
        written = false;
        why = errno;
    }
    if (written) {
        sync_directory(path);
    } else {
        unlink(temporary);
        status = error_set(QUERN_ERR_IO, "cannot write '%s': %s", path, strerror(why));
    }
done:
    free(out.buffer);
    free(temporary);
    return status;
}

quern_status quern_safetensors_save(const char *path, const quern_safetensors_item *items, size_t count,
                                    const quern_safetensors_pair *metadata, size_t metadata_count)
{
    if (path == NULL || (items == NULL && count > 0) || (metadata == NULL && metadata_count > 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a pointer is needed",
                         path == NULL ? "path" : items == NULL && count > 0 ? "items" : "metadata");
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return error_set(QUERN_ERR_IO, "cannot write '%s': it exists and is no regular file", path);
    char *target = realpath(path, NULL); /* writes through a symbolic link rather than over it */
    char *text = NULL;
    size_t *order = calloc(count + 1, sizeof *order);
    json_t *header = json_object();
    quern_status status;
    if (order == NULL || header == NULL) {
        status = error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for %zu tensors", count);
        goto done;
    }
    status = add_metadata(header, metadata, metadata_count);
    if (status == QUERN_OK) status = build_header(header, items, count, order);
    if (status != QUERN_OK) goto done;
    text = json_dumps(header, JSON_COMPACT);
    if (text == NULL)
        status = error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for the header of %zu tensors", count);
    else if (strlen(text) > SAFETENSORS_MAX_HEADER - DATA_ALIGN)
        status = error_set(QUERN_ERR_INVALID_ARGUMENT, "items and metadata: a header of %zu bytes, at most %d is accepted",
                           strlen(text), SAFETENSORS_MAX_HEADER - DATA_ALIGN);
    else
        status = write_file(target != NULL ? target : path, text, items, count, order);
done:
    free(text);
    json_decref(header);
    free(order);
    free(target);
    return status;
}
