/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_composed.c - plans a forward as the library does, on a stage table without the fused stage. */
#include "nsa_composed.h"

#include "nsa/call.h"

static quern_status prepare(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                            void *workspace, quern_backend *stages, nsa_call *call, size_t *bytes)
{
    const quern_status status = nsa_plan(ctx, exec, params, tensors, NSA_FORWARD, workspace != NULL, call);
    if (status != QUERN_OK) return status;
    *stages = *call->backend;
    stages->attend_gate_forward.supports = NULL;
    call->backend = stages;
    arena a = arena_on(workspace);
    nsa_forward_operation.carve(call, &a);
    *bytes = arena_size(&a);
    return QUERN_OK;
}

quern_status nsa_composed_workspace(quern_context *ctx, const quern_nsa_params *params,
                                    const quern_nsa_tensors *tensors, size_t *bytes)
{
    quern_backend stages;
    nsa_call call;
    return prepare(ctx, NULL, params, tensors, NULL, &stages, &call, bytes);
}

quern_status nsa_composed_forward(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                                  const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    quern_backend stages;
    nsa_call call;
    size_t bytes;
    const quern_status status = prepare(ctx, exec, params, tensors, workspace, &stages, &call, &bytes);
    if (status != QUERN_OK) return status;
    return bytes > workspace_bytes ? QUERN_ERR_WORKSPACE : nsa_forward_operation.run(&call);
}
