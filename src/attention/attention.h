/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.h - dense attention inside the family: its description, and a call. */
#ifndef QUERN_ATTENTION_CALL_H
#define QUERN_ATTENTION_CALL_H

#include "core/op.h"

#include <quern/attention.h>

typedef enum attention_op { ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION_OPS } attention_op;

/* In the order of quern_attention_tensors. */
typedef enum attention_tensor {
    ATTENTION_Q,
    ATTENTION_K,
    ATTENTION_V,
    ATTENTION_CU_Q,
    ATTENTION_CU_KV,
    ATTENTION_O,
    ATTENTION_LSE,
    ATTENTION_D_O,
    ATTENTION_D_Q,
    ATTENTION_D_K,
    ATTENTION_D_V,
    ATTENTION_TENSORS
} attention_tensor;

/* Extents: fixed length B and N, varlen T. */
typedef enum attention_symbol {
    ATTENTION_B = 1,
    ATTENTION_B1,
    ATTENTION_NQ,
    ATTENTION_NKV,
    ATTENTION_TQ,
    ATTENTION_TKV,
    ATTENTION_H,
    ATTENTION_HKV,
    ATTENTION_D,
    ATTENTION_DV
} attention_symbol;

typedef struct attention_call {
    op_call head;
    quern_attention_params params;
    _Alignas(
        op_step) char program[OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(rowdot) + OP_STEP_BYTES(attend)];
} attention_call;

extern const op_family attention_family;

/* In attention.c. */
void attention_build(op_build *b);

#endif
