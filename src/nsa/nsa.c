/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa.c - NSA's public functions. */
#include "nsa/call.h"

quern_status quern_nsa_forward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                         const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_nsa_forward(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                               const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_FORWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                          const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_nsa_backward(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                                const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_compress_workspace(quern_context *ctx, const quern_nsa_params *params,
                                          const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_COMPRESS, ctx, params, tensors, bytes);
}

quern_status quern_nsa_compress(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                                const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_COMPRESS, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_compress_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                   const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_COMPRESS_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_nsa_compress_backward(quern_context *ctx, const quern_exec *exec,
                                         const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                         void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_COMPRESS_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_select_workspace(quern_context *ctx, const quern_nsa_params *params,
                                        const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_SELECT, ctx, params, tensors, bytes);
}

quern_status quern_nsa_select(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                              const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_SELECT, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_attend_workspace(quern_context *ctx, const quern_nsa_params *params,
                                        const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_ATTEND, ctx, params, tensors, bytes);
}

quern_status quern_nsa_attend(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                              const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_ATTEND, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_attend_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                 const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_ATTEND_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_nsa_attend_backward(quern_context *ctx, const quern_exec *exec,
                                       const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                       void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_ATTEND_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_gates_workspace(quern_context *ctx, const quern_nsa_params *params,
                                       const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_GATES, ctx, params, tensors, bytes);
}

quern_status quern_nsa_gates(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                             const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_GATES, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_combine_workspace(quern_context *ctx, const quern_nsa_params *params,
                                         const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_COMBINE, ctx, params, tensors, bytes);
}

quern_status quern_nsa_combine(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                               const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_COMBINE, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_gate_workspace(quern_context *ctx, const quern_nsa_params *params,
                                      const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_GATE, ctx, params, tensors, bytes);
}

quern_status quern_nsa_gate(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                            const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_GATE, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nsa_gate_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                               const quern_nsa_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_family, NSA_GATE_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_nsa_gate_backward(quern_context *ctx, const quern_exec *exec,
                                     const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                     void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_family, NSA_GATE_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}
