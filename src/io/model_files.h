/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * model_files.h - a model's safetensors as one list of tensors: a file, or a folder with an index and its
 * shards, or with one file alone.
 *
 * Everything is mapped; views live until the model is closed. Only files that the index names are read, and
 * the index must say exactly what its shards hold. Symbolic links are read through.
 *
 * The library and the command both compile this file, so a failure comes with its sentence in the caller's
 * buffer instead of quern_last_error.
 */
#ifndef QUERN_IO_MODEL_FILES_H
#define QUERN_IO_MODEL_FILES_H

#include <quern/safetensors.h>

enum { MODEL_SENTENCE = 1024 };

typedef struct model_shard {
    char *name; /* within the folder */
    char *path;
    quern_safetensors *file;
    int64_t bytes, changed; /* of the file; when, in nanoseconds */
} model_shard;

/* A tensor as its file has it. The pointers belong to the file. */
typedef struct model_tensor {
    const char *name, *dtype; /* the format's name: "BF16" */
    const uint8_t *data;      /* not necessarily aligned */
    int64_t bytes;
    const int64_t *shape;
    int32_t ndim;
    size_t shard;
} model_tensor;

typedef struct model_files {
    char *folder;          /* where the shards stand; NULL: the model is a file alone */
    char *index;           /* the index file's name within the folder; NULL: there is none */
    model_shard *shards;   /* by name */
    model_tensor *tensors; /* by shard, and there in the order of their data */
    size_t *by_name;       /* tensors sorted by name */
    size_t shard_count, count;
} model_files;

/* On failure *model is untouched and `why` has the sentence. QUERN_ERR_IO: something cannot be read, or is
 * missing; QUERN_ERR_FORMAT: it is not what it should be. */
quern_status model_files_open(const char *path, model_files **model, char why[MODEL_SENTENCE]);
void model_files_close(model_files *model); /* NULL is allowed */
/* NULL: there is none. */
const model_tensor *model_files_find(const model_files *model, const char *name);

#endif
