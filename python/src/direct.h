/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* direct.h - operations that quern/op.h does not describe, under the names that it would give them. */
#ifndef QUERN_PYTHON_DIRECT_H
#define QUERN_PYTHON_DIRECT_H

#include <quern/quern.h>

typedef enum direct_kind { DIRECT_INTEGER, DIRECT_CHOICE } direct_kind;

typedef struct direct_param {
    const char *name;
    size_t offset;
    direct_kind kind;
    const char *const *words; /* of a choice: all, then NULL */
} direct_param;

typedef struct direct_op {
    const char *name;
    const char *const *tensors; /* fields, in the struct's order; NULL past the last */
    const direct_param *params; /* name NULL past the last */
    const void *defaults;
    size_t params_size;
    quern_status (*workspace)(quern_context *ctx, const void *params, const void *tensors, size_t *bytes);
    quern_status (*run)(quern_context *ctx, const quern_exec *exec, const void *params, const void *tensors,
                        void *workspace, size_t bytes);
} direct_op;

/* The i-th from 0 on; NULL past the last. */
const direct_op *direct_at(size_t i);
int32_t direct_tensor_count(const direct_op *op);
/* False where there is no such parameter, or it does not take the text. */
bool direct_set(const direct_op *op, void *params, const char *name, const char *text);

#endif
