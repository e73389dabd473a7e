/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa.c - NSA's public functions: each plans its operation, then reports the workspace or runs the stages. */
#include "core/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/view.h"
#include "nsa/call.h"

static const nsa_operation *operation_of(nsa_op op)
{
    switch (op) {
    case NSA_FORWARD: return &nsa_forward_operation;
    case NSA_BACKWARD: return &nsa_backward_operation;
    case NSA_COMPRESS: return &nsa_compress_operation;
    case NSA_COMPRESS_BACKWARD: return &nsa_compress_backward_operation;
    case NSA_SELECT: return &nsa_select_operation;
    case NSA_ATTEND: return &nsa_attend_operation;
    case NSA_ATTEND_BACKWARD: return &nsa_attend_backward_operation;
    case NSA_GATE_BACKWARD: return &nsa_gate_backward_operation;
    default: return &nsa_gate_operation;
    }
}

/* Whether the backend takes every stage that the carved call uses. */
static quern_status check_supported(const nsa_call *c)
{
    const quern_backend *b = c->backend;
    const bool backward = nsa_is_backward(c->op);
    char why[STAGE_WHY_BYTES] = "";
    bool ok = true;
    if (c->use_compress) ok = (backward ? b->compress_backward : b->compress_forward).supports(&c->exec, &c->compress, why);
    if (ok && c->use_select && !c->use_fused) ok = b->select.supports(&c->exec, &c->select, why);
    for (int i = 0; i < NSA_BRANCHES && ok; i++)
        if (c->use_attend[i]) ok = (backward ? b->attend_backward : b->attend_forward).supports(&c->exec, &c->attend[i], why);
    if (ok && c->use_gate) ok = (backward ? b->gate_backward : b->gate_forward).supports(&c->exec, &c->gate, why);
    return ok ? QUERN_OK : error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
}

/* Plans, carves on `workspace` (NULL: sizes only) and checks that the stages are there. */
static quern_status prepare(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params, const quern_nsa_tensors *tensors, nsa_op op,
                            bool run, void *workspace, nsa_call *call, size_t *bytes)
{
    quern_status status = nsa_plan(ctx, exec, params, tensors, op, run, call);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    operation_of(op)->carve(call, &a);
    *bytes = arena_size(&a);
    return check_supported(call);
}

static quern_status workspace_of(quern_context *ctx, const quern_nsa_params *params, const quern_nsa_tensors *tensors, nsa_op op, size_t *bytes)
{
    nsa_call call;
    size_t needed;
    const quern_status status = prepare(ctx, NULL, params, tensors, op, false, NULL, &call, &needed);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = needed;
    return QUERN_OK;
}

static quern_status run(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params, const quern_nsa_tensors *tensors, nsa_op op,
                        void *workspace, size_t given)
{
    DEFAULT_FLOAT_STATE;
    nsa_call call;
    size_t needed;
    quern_status status = prepare(ctx, exec, params, tensors, op, true, NULL, &call, &needed);
    if (status != QUERN_OK) return status;
    if ((status = view_check_workspace(workspace, given, needed, &call.like)) != QUERN_OK) return status;
    status = prepare(ctx, exec, params, tensors, op, true, workspace, &call, &needed);
    if (status == QUERN_OK && call.check.status.ndim > 0) status = call.backend->check.run(&call.exec, &call.check, NULL);
    return status != QUERN_OK ? status : operation_of(op)->run(&call);
}

/* The two public functions of an operation. */
#define OPERATION(name, op)                                                                                                    \
    quern_status quern_nsa_##name##_workspace(quern_context *ctx, const quern_nsa_params *params, const quern_nsa_tensors *tensors, size_t *bytes) \
    {                                                                                                                          \
        return workspace_of(ctx, params, tensors, op, bytes);                                                                  \
    }                                                                                                                          \
    quern_status quern_nsa_##name(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,                  \
                                  const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)                   \
    {                                                                                                                          \
        return run(ctx, exec, params, tensors, op, workspace, workspace_bytes);                                                \
    }

OPERATION(forward, NSA_FORWARD)
OPERATION(backward, NSA_BACKWARD)
OPERATION(compress, NSA_COMPRESS)
OPERATION(compress_backward, NSA_COMPRESS_BACKWARD)
OPERATION(select, NSA_SELECT)
OPERATION(attend, NSA_ATTEND)
OPERATION(attend_backward, NSA_ATTEND_BACKWARD)
OPERATION(gates, NSA_GATES)
OPERATION(combine, NSA_COMBINE)
OPERATION(gate, NSA_GATE)
OPERATION(gate_backward, NSA_GATE_BACKWARD)
