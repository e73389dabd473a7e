/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_query.c - what a call of any operation expects, and the call. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/op_entry.h"
#include "core/view.h"

#include <stdlib.h>
#include <string.h>

/* The family and the operation of a pass. */
static quern_status find(const quern_op *op, quern_op_pass pass, const op_family **family, int32_t *operation)
{
    const quern_status status = op_need(op, family);
    if (status != QUERN_OK) return status;
    *operation = pass == QUERN_OP_FORWARD ? op->forward : op->backward;
    if (pass == QUERN_OP_FORWARD || op->backward > 0) return QUERN_OK;
    return error_argument("%s has no backward pass", op->name);
}

/* A call that is only inspected, not run. */
typedef struct query {
    op_call *call;
    op_tensors own;
} query;

static quern_status open_query(const quern_op *op, quern_op_pass pass, const void *params,
                               const void *tensors, query *q)
{
    const op_family *family;
    int32_t operation;
    const quern_status status = find(op, pass, &family, &operation);
    q->call = status == QUERN_OK ? malloc(family->call_size) : NULL;
    if (status != QUERN_OK) return status;
    if (q->call != NULL) return op_begin(q->call, family, operation, params, tensors, &q->own);
    (void)error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for a call of %s", op->name);
    return QUERN_ERR_OUT_OF_MEMORY;
}

quern_status quern_op_roles(const quern_op *op, quern_op_pass pass, const void *params, const void *tensors,
                            quern_op_role *roles)
{
    query q;
    quern_status status = open_query(op, pass, params, tensors, &q);
    if (status == QUERN_OK) status = op_need_pointer(roles, "roles");
    for (int32_t i = 0; status == QUERN_OK && i < q.call->family->tensor_count; i++)
        roles[i] = (quern_op_role)q.call->role[i];
    free(q.call);
    return status;
}

static quern_dtype dtype_of(const op_call *call, int32_t tensor)
{
    const op_tensor *t = &call->family->tensors[tensor];
    const quern_tensor *source = t->gradient_of != OP_NONE ? call->given[t->gradient_of] : NULL;
    const quern_dtype like = call->like.dtype;
    switch (t->dtype) {
    case OP_ACTIVATION:
    case OP_ANY: return like;
    case OP_FLOAT: return like == QUERN_F16 || like == QUERN_BF16 ? like : QUERN_F32;
    case OP_WEIGHT:
    case OP_F32:
    case OP_SOURCE_OR_F32:
    case OP_GLOBAL: return QUERN_F32;
    case OP_I32:
    case OP_INDEX: return QUERN_I32;
    case OP_I64: return QUERN_I64;
    case OP_U8:
    case OP_CODES:
    case OP_SCALE:
    case OP_EXPONENT: return QUERN_U8;
    case OP_STORED: return call->stored;
    case OP_STORED_2: return call->stored_2;
    case OP_SOURCE: return source != NULL ? source->dtype : QUERN_F32;
    case OP_LIKE: return call->given[tensor - 1] != NULL ? call->given[tensor - 1]->dtype : like;
    }
    return like;
}

quern_status quern_op_expect(const quern_op *op, quern_op_pass pass, const void *params, const void *tensors,
                             const int64_t *asked, quern_tensor *expected)
{
    DEFAULT_FLOAT_STATE;
    query q;
    quern_status status = open_query(op, pass, params, tensors, &q);
    if (status == QUERN_OK) status = op_need_pointer(expected, "expected");
    if (status == QUERN_OK && asked != NULL) memcpy(q.call->asked, asked, sizeof q.call->asked);
    if (status == QUERN_OK) {
        q.call->contents = true;
        status = op_derive(q.call);
    }
    for (int32_t i = 0; status == QUERN_OK && i < q.call->family->tensor_count; i++) {
        const uint8_t role = q.call->role[i];
        int64_t shape[QUERN_MAX_DIMS] = {0};
        if (role == OP_UNUSED || role == OP_REFUSED || role == OP_SOURCE_MISSING) {
            expected[i] = (quern_tensor){0};
            continue;
        }
        const int32_t ndim = op_shape(q.call, i, shape);
        expected[i] = view_on(&q.call->like, NULL,
                              q.own.t[i] != NULL ? q.own.t[i]->dtype : dtype_of(q.call, i), ndim, shape);
    }
    free(q.call);
    return status;
}

quern_status quern_op_extent(const quern_op *op, const void *params, const void *tensors, const char *name,
                             int64_t *extent)
{
    DEFAULT_FLOAT_STATE;
    query q;
    quern_status status = open_query(op, QUERN_OP_FORWARD, params, tensors, &q);
    if (status == QUERN_OK) status = op_need_pointer(name, "name");
    if (status == QUERN_OK) status = op_need_pointer(extent, "extent");
    if (status == QUERN_OK) status = op_derive(q.call);
    if (status == QUERN_OK) {
        const char *word;
        int32_t i = 1;
        size_t length;
        while ((length = op_symbol_name(q.call->family, i, &word)) > 0 &&
               (length != strlen(name) || memcmp(word, name, length) != 0))
            i++;
        if (length > 0) *extent = q.call->symbol[i];
        else status = error_argument("%s has no extent '%s'", op->name, name);
    }
    free(q.call);
    return status;
}

quern_status quern_op_complete(const quern_op *op, const void *params, const void *tensors, int32_t tensor,
                               int32_t *data)
{
    query q;
    quern_status status = open_query(op, QUERN_OP_FORWARD, params, tensors, &q);
    if (status == QUERN_OK) status = op_need_pointer(data, "data");
    if (status == QUERN_OK && (tensor < 0 || tensor >= q.call->family->tensor_count))
        status =
            error_argument("tensor is %d: 0 to %d is accepted", tensor, q.call->family->tensor_count - 1);
    if (status == QUERN_OK)
        status = q.call->family->complete != NULL
                     ? q.call->family->complete(q.call, tensor, data)
                     : error_set(QUERN_ERR_UNSUPPORTED, "%s: nothing follows from its tensors", op->name);
    free(q.call);
    return status;
}

quern_status quern_op_follow(const quern_op *op, void *params, const void *tensors)
{
    const op_family *family;
    op_tensors own = {0};
    quern_status status = op_need(op, &family);
    if (status != QUERN_OK || (status = op_need_pointer(params, "params")) != QUERN_OK) return status;
    own.size = sizeof own.size + (size_t)family->tensor_count * sizeof(void *);
    if ((status = op_struct(&own, tensors, "tensors", family->tensors_init)) != QUERN_OK) return status;
    for (int32_t m = 0; m < family->mode_count; m++) {
        const op_mode *mode = &family->modes[m];
        const op_param *p = &family->params[mode->param];
        int32_t chosen = OP_NONE, otherwise = 0;
        for (int32_t i = 0; i <= p->most; i++) {
            const int8_t by = mode->by[i];
            if (by == OP_NONE) otherwise = i;
            if (by == OP_NONE || own.t[by] == NULL) continue;
            if (chosen != OP_NONE)
                return error_argument("both %s and %s: one is accepted",
                                      family->tensors[mode->by[chosen]].name, family->tensors[by].name);
            chosen = i;
        }
        op_param_store(p, params, chosen != OP_NONE ? chosen : otherwise);
    }
    return QUERN_OK;
}

quern_status quern_op_workspace(quern_context *ctx, const quern_op *op, quern_op_pass pass,
                                const void *params, const void *tensors, size_t *bytes)
{
    const op_family *family;
    int32_t operation;
    const quern_status status = find(op, pass, &family, &operation);
    return status == QUERN_OK ? op_workspace_of(family, operation, ctx, params, tensors, bytes) : status;
}

quern_status quern_op_run(quern_context *ctx, const quern_exec *exec, const quern_op *op, quern_op_pass pass,
                          const void *params, const void *tensors, void *workspace, size_t workspace_bytes)
{
    const op_family *family;
    int32_t operation;
    const quern_status status = find(op, pass, &family, &operation);
    if (status != QUERN_OK) return status;
    return op_run(family, operation, ctx, exec, params, tensors, workspace, workspace_bytes);
}
