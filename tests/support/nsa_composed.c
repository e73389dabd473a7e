/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_composed.c - builds a forward as the library does, on a stage table without the fused stage. */
#include "nsa_composed.h"

#include "core/op.h"
#include "nsa/call.h"

/* nsa_build_program() on a copy of the backend's table that lacks the fused stage. */
static void build_composed(op_build *b)
{
    op_call *call = b->call;
    static _Thread_local quern_backend stages; /* must outlive the call */
    stages = *call->backend;
    stages.attend_gate_forward = (attend_gate_stage){0};
    call->backend = &stages;
    nsa_build_program(b);
}

static op_family composed(void)
{
    op_family family = nsa_family;
    family.build = build_composed;
    return family;
}

quern_status nsa_composed_workspace(quern_context *ctx, const quern_nsa_params *params,
                                    const quern_nsa_tensors *tensors, size_t *bytes)
{
    const op_family family = composed();
    return op_workspace_of(&family, NSA_FORWARD, ctx, params, tensors, bytes);
}

quern_status nsa_composed_forward(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                                  const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    const op_family family = composed();
    return op_run(&family, NSA_FORWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}
