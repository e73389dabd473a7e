/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* linear.h - the families of projections, RMS norm and rotation. */
#ifndef QUERN_LINEAR_LINEAR_H
#define QUERN_LINEAR_LINEAR_H

#include "core/op.h"

#include <quern/linear.h>

typedef enum linear_op { LINEAR_FORWARD, LINEAR_BACKWARD, LINEAR_OPS } linear_op;

/* The number of a tensor. */
#define L(field) OP_TENSOR(quern_linear_tensors, field)
enum { LINEAR_TENSORS = OP_TENSOR_COUNT(quern_linear_tensors) };
/* N and K of a group; LIN_GN and LIN_GK of all. */
enum { LIN_T = 1, LIN_N, LIN_K, LIN_GN, LIN_GK };
enum { LIN_SCALE = OP_LEAD };

/* What the weight is. */
typedef enum linear_kind { LINEAR_FLOAT, LINEAR_FP8, LINEAR_NVFP4 } linear_kind;

typedef struct linear_call {
    op_call head;
    quern_linear_params params;
    linear_kind kind;
    /* A loop over groups keeps how far each view moves beside a step's arguments. */
    _Alignas(op_step) char program[OP_STEP_BYTES(e4m3_round) + OP_STEP_BYTES(e4m3_weights) +
                                   OP_STEP_BYTES(grouped_gemm) + 2 * OP_STEP_BYTES(grouped_dense) +
                                   OP_STEP_BYTES(gemm) + OP_STEP_BYTES(expert_sums) + 512];
} linear_call;

extern const op_family linear_family, rms_norm_family, rope_family;

void linear_build(op_build *b);

#endif
