/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint.h - an open checkpoint: one list of tensors, whichever kind of file they stand in. */
#ifndef QUERN_CHECKPOINT_CHECKPOINT_H
#define QUERN_CHECKPOINT_CHECKPOINT_H

#include "io/checkpoint_names.h"
#include "io/gguf.h"
#include "io/model_files.h"

#include <quern/checkpoint.h>

typedef struct stored_tensor {
    const char *name, *dtype, *shard;
    const uint8_t *data;
    const int64_t *shape;
    size_t bytes;
    int32_t ndim;
    int8_t element; /* its quern_dtype, or -1 */
    quern_format format;
    checkpoint_name parts; /* of its name */
} stored_tensor;

struct quern_checkpoint {
    model_files *model; /* one of the two */
    gguf_file *gguf;
    char *file_name; /* of a GGUF file */
    stored_tensor *tensors;
    size_t *by_name; /* tensors sorted by name */
    size_t count;
};

/* NULL: there is none. */
const stored_tensor *checkpoint_tensor(const quern_checkpoint *c, const char *name);
/* The tensor beside `t`, of the same module, that has another role; NULL: there is none. */
const stored_tensor *checkpoint_beside(const quern_checkpoint *c, const stored_tensor *t, name_role role);
/* The tensor of a module that is the first `size` bytes of `name`. */
const stored_tensor *checkpoint_of_module(const quern_checkpoint *c, const char *name, size_t size,
                                          name_role role);

/* Sets every tensor's format. */
void checkpoint_classify(quern_checkpoint *c);

#endif
