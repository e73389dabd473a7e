/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* open.c - opens a checkpoint and hands out its tensors. */
#include "checkpoint/checkpoint.h"

#include "core/error.h"
#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static quern_status no_memory(void)
{
    return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for the list of a checkpoint's tensors");
}

/* The quern_dtype of safetensors' name, or -1. */
static int8_t element_of(const char *dtype)
{
    for (size_t i = 0; i < safetensors_dtype_count; i++)
        if (strcmp(safetensors_dtypes[i].name, dtype) == 0) return safetensors_dtypes[i].ours;
    return -1;
}

static void list_model(quern_checkpoint *c)
{
    for (size_t i = 0; i < c->count; i++) {
        const model_tensor *t = &c->model->tensors[i];
        c->tensors[i] = (stored_tensor){.name = t->name,
                                        .dtype = t->dtype,
                                        .shard = c->model->shards[t->shard].name,
                                        .data = t->data,
                                        .shape = t->shape,
                                        .bytes = (size_t)t->bytes,
                                        .ndim = t->ndim,
                                        .element = element_of(t->dtype)};
    }
}

static void list_gguf(quern_checkpoint *c)
{
    for (size_t i = 0; i < c->count; i++) {
        const gguf_tensor *t = &c->gguf->tensors[i];
        c->tensors[i] = (stored_tensor){.name = t->name,
                                        .dtype = ggml_types[t->type].name,
                                        .shard = c->file_name,
                                        .data = t->data,
                                        .shape = t->shape,
                                        .bytes = t->bytes,
                                        .ndim = t->ndim,
                                        .element = ggml_types[t->type].dtype};
    }
}

static int by_name(const void *a, const void *b, void *arg)
{
    const quern_checkpoint *c = arg;
    return strcmp(c->tensors[*(const size_t *)a].name, c->tensors[*(const size_t *)b].name);
}

static quern_status list_tensors(quern_checkpoint *c)
{
    c->count = c->gguf != NULL ? c->gguf->tensor_count : c->model->count;
    c->tensors = calloc(c->count + 1, sizeof *c->tensors);
    c->by_name = calloc(c->count + 1, sizeof *c->by_name);
    if (c->tensors == NULL || c->by_name == NULL) return no_memory();
    if (c->gguf != NULL) list_gguf(c);
    else list_model(c);
    for (size_t i = 0; i < c->count; i++) {
        c->tensors[i].parts = checkpoint_name_read(c->tensors[i].name);
        c->by_name[i] = i;
    }
    qsort_r(c->by_name, c->count, sizeof *c->by_name, by_name, c);
    checkpoint_classify(c);
    return QUERN_OK;
}

/* Whether the file begins as GGUF files do. */
static bool is_gguf(const char *path)
{
    char magic[4];
    FILE *f = fopen(path, "rbe");
    const bool is = f != NULL && fread(magic, 1, sizeof magic, f) == sizeof magic &&
                    memcmp(magic, "GGUF", sizeof magic) == 0;
    if (f != NULL) fclose(f);
    return is;
}

static quern_status open_files(quern_checkpoint *c, const char *path)
{
    char why[MODEL_SENTENCE]; /* the longer of both readers' */
    _Static_assert((int)GGUF_SENTENCE <= (int)MODEL_SENTENCE, "room for either");
    if (!is_gguf(path)) {
        const quern_status status = model_files_open(path, &c->model, why);
        return status == QUERN_OK ? status : error_set(status, "%s", why);
    }
    const char *slash = strrchr(path, '/');
    c->file_name = strdup(slash != NULL ? slash + 1 : path);
    if (c->file_name == NULL) return no_memory();
    const quern_status status = gguf_open(path, &c->gguf, why);
    return status == QUERN_OK ? status : error_set(status, "'%s': %s", TEXT_NAME(path), why);
}

quern_status quern_checkpoint_open(const char *path, quern_checkpoint **checkpoint)
{
    if (path == NULL || checkpoint == NULL)
        return error_argument("%s is NULL: a pointer is needed", path == NULL ? "path" : "checkpoint");
    quern_checkpoint *c = calloc(1, sizeof *c);
    if (c == NULL) return no_memory();
    quern_status status = open_files(c, path);
    if (status == QUERN_OK) status = list_tensors(c);
    if (status == QUERN_OK) *checkpoint = c;
    else quern_checkpoint_close(c);
    return status;
}

void quern_checkpoint_close(quern_checkpoint *c)
{
    if (c == NULL) return;
    model_files_close(c->model);
    gguf_close(c->gguf);
    free(c->file_name);
    free(c->tensors);
    free(c->by_name);
    free(c);
}

size_t quern_checkpoint_count(const quern_checkpoint *c)
{
    return c->count;
}

int64_t quern_checkpoint_find(const quern_checkpoint *c, const char *name)
{
    const stored_tensor *t = name != NULL ? checkpoint_tensor(c, name) : NULL;
    return t != NULL ? t - c->tensors : -1;
}

static quern_status bad_number(const quern_checkpoint *c, size_t number)
{
    return error_argument("number %zu: the checkpoint has %zu tensors, from 0 on", number, c->count);
}

quern_status quern_checkpoint_info(const quern_checkpoint *c, size_t number, quern_checkpoint_tensor *tensor)
{
    if (tensor == NULL || tensor->size < sizeof *tensor)
        return error_argument("tensor is NULL or smaller than quern_checkpoint_tensor: "
                              "QUERN_CHECKPOINT_TENSOR_INIT sets its size");
    if (number >= c->count) return bad_number(c, number);
    const stored_tensor *t = &c->tensors[number];
    tensor->name = t->name;
    tensor->dtype = t->dtype;
    tensor->format = t->format;
    tensor->ndim = t->ndim;
    tensor->shape = t->shape;
    tensor->data = t->data;
    tensor->bytes = t->bytes;
    tensor->shard = t->shard;
    return QUERN_OK;
}

quern_status quern_checkpoint_view(const quern_checkpoint *c, size_t number, quern_tensor *view)
{
    if (view == NULL) return error_argument("view is NULL: a pointer is needed");
    if (number >= c->count) return bad_number(c, number);
    const stored_tensor *t = &c->tensors[number];
    if (t->element < 0)
        return error_set(QUERN_ERR_UNSUPPORTED,
                         "tensor '%s': dtype %s has no view: quern_checkpoint_info hands out its bytes",
                         TEXT_NAME(t->name), t->dtype);
    const size_t size = quern_dtype_size((quern_dtype)t->element);
    if (t->bytes > 0 && (uintptr_t)t->data % size != 0)
        return error_set(
            QUERN_ERR_UNSUPPORTED,
            "tensor '%s': its data stands at an address that is no multiple of its element's %zu "
            "bytes: quern_checkpoint_info hands out its bytes",
            TEXT_NAME(t->name), size);
    if (c->model != NULL)
        return quern_safetensors_get(c->model->shards[c->model->tensors[number].shard].file, t->name, view);
    *view = quern_tensor_contiguous(t->bytes > 0 ? (void *)(uintptr_t)t->data : NULL, (quern_dtype)t->element,
                                    t->ndim, t->shape);
    return QUERN_OK;
}

size_t quern_checkpoint_metadata_count(const quern_checkpoint *c)
{
    if (c->gguf != NULL) return c->gguf->pair_count;
    return c->model->shard_count > 0 ? quern_safetensors_metadata_count(c->model->shards[0].file) : 0;
}

const char *quern_checkpoint_metadata_key(const quern_checkpoint *c, size_t number)
{
    if (number >= quern_checkpoint_metadata_count(c)) return NULL;
    return c->gguf != NULL ? c->gguf->pairs[number].key
                           : quern_safetensors_metadata_key(c->model->shards[0].file, number);
}

size_t quern_checkpoint_metadata_text(const quern_checkpoint *c, size_t number, char *text, size_t room)
{
    const char *key = quern_checkpoint_metadata_key(c, number);
    if (text == NULL || room == 0) return 0;
    *text = '\0';
    if (key == NULL) return 0;
    if (c->gguf != NULL) gguf_text(&c->gguf->pairs[number], text, room);
    else snprintf(text, room, "%s", quern_safetensors_metadata(c->model->shards[0].file, key));
    return strlen(text);
}
