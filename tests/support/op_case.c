/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "op_case.h"

#include "cmocka_c11.h"

#include <string.h>

/* An operation with its tensors. */
typedef struct described {
    char name[32];
    const quern_op *op;
    quern_op_info info;
    quern_op_tensor tensor[QUERN_OP_TENSORS_MAX];
} described;

/* The description is kept: tests ask for a tensor's name millions of times. */
static const described *describe(const char *name)
{
    static _Thread_local described known[8];
    static _Thread_local unsigned used;
    for (unsigned i = 0; i < 8; i++)
        if (strcmp(known[i].name, name) == 0) return &known[i];
    described *d = &known[used++ % 8];
    d->name[0] = '\0';
    d->op = quern_op_named(name);
    if (d->op == NULL || strlen(name) >= sizeof d->name || quern_op_get(d->op, &d->info) != QUERN_OK ||
        quern_op_get_tensors(d->op, d->tensor) != QUERN_OK)
        fail_msg("no operation '%s'", name);
    strcpy(d->name, name);
    return d;
}

const char *op_case_field(const char *op, int tensor)
{
    return describe(op)->tensor[tensor].field;
}

void op_case_bind(const char *op, const test_tensor *t, int count, uint64_t set, void *tensors)
{
    const described *d = describe(op);
    const quern_tensor *field[QUERN_OP_TENSORS_MAX] = {NULL};
    assert_true(count <= d->info.tensor_count);
    for (int i = 0; i < count; i++)
        if (t[i].buffer != NULL && (set >> i & 1) != 0) field[i] = &t[i].view;
    memcpy(tensors, &d->info.tensors_size, sizeof(size_t));
    memcpy((char *)tensors + sizeof(size_t), field, d->info.tensors_size - sizeof(size_t));
}

void op_case_call(quern_context *ctx, const char *op, quern_op_pass pass, const void *params,
                  const void *tensors)
{
    const quern_op *called = quern_op_named(op);
    const char *way = pass == QUERN_OP_BACKWARD ? ", backward" : "";
    size_t bytes = 0;
    if (called == NULL) fail_msg("no operation '%s'", op);
    if (quern_op_workspace(ctx, called, pass, params, tensors, &bytes) != QUERN_OK)
        fail_msg("%s%s, workspace: %s", op, way, quern_last_error(ctx));
    test_workspace workspace = test_workspace_make(bytes);
    if (quern_op_run(ctx, NULL, called, pass, params, tensors, workspace.data, bytes) != QUERN_OK)
        fail_msg("%s%s: %s", op, way, quern_last_error(ctx));
    test_workspace_close(&workspace);
}

void op_case_run(quern_context *ctx, const char *op, quern_op_pass pass, const void *params,
                 const void *tensors, test_tensor *t, int count)
{
    const described *d = describe(op);
    quern_op_role role[QUERN_OP_TENSORS_MAX];
    const quern_tensor *given[QUERN_OP_TENSORS_MAX];
    memcpy(given, (const char *)tensors + sizeof(size_t), sizeof *given * (size_t)count);
    if (quern_op_roles(d->op, pass, params, tensors, role) != QUERN_OK)
        fail_msg("%s: %s", op, quern_last_error(ctx));
    for (int i = 0; i < count; i++)
        if (given[i] == &t[i].view) memcpy(t[i].snapshot, t[i].buffer, t[i].bytes);
    op_case_call(ctx, op, pass, params, tensors);
    for (int i = 0; i < count; i++) {
        if (given[i] != &t[i].view) continue;
        if (role[i] == QUERN_OP_RESULT || role[i] == QUERN_OP_OPTIONAL_RESULT || role[i] == QUERN_OP_UPDATED)
            test_tensor_check_guards(&t[i], d->tensor[i].field);
        else test_tensor_check_unchanged(&t[i], d->tensor[i].field);
    }
}
