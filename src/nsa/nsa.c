/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa.c - NSA's public functions. */
#include "nsa/call.h"

/* The two public functions of an operation. */
#define OPERATION(name, op)                                                                                  \
    quern_status quern_nsa_##name##_workspace(quern_context *ctx, const quern_nsa_params *params,            \
                                              const quern_nsa_tensors *tensors, size_t *bytes)               \
    {                                                                                                        \
        nsa_call call;                                                                                       \
        return op_workspace_of(&call.head, &nsa_family, op, ctx, params, tensors, bytes);                    \
    }                                                                                                        \
    quern_status quern_nsa_##name(quern_context *ctx, const quern_exec *exec,                                \
                                  const quern_nsa_params *params, const quern_nsa_tensors *tensors,          \
                                  void *workspace, size_t workspace_bytes)                                   \
    {                                                                                                        \
        nsa_call call;                                                                                       \
        return op_run(&call.head, &nsa_family, op, ctx, exec, params, tensors, workspace, workspace_bytes);  \
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
