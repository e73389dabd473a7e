/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.h - the grouped product's tensors, extents and call. */
#ifndef QUERN_NVFP4_GEMM_H
#define QUERN_NVFP4_GEMM_H

#include "core/op.h"

#include <quern/nvfp4.h>

typedef enum gemm_op { GEMM, GEMM_BACKWARD, GEMM_OPS } gemm_op;

/* The number of a tensor. */
#define G(field) OP_TENSOR(quern_nvfp4_gemm_tensors, field)
enum { GEMM_TENSORS = OP_TENSOR_COUNT(quern_nvfp4_gemm_tensors) };

/* GS_CODES and GS_SCALES: the extents of b_codes and b_scales past E. */
enum {
    GS_T = 1,
    GS_K,
    GS_N,
    GS_E,
    GS_OUT,
    GS_E1,
    GS_BYTES,
    GS_CODES_0,
    GS_CODES_1,
    GS_CODE_COLUMNS,
    GS_CODE_BLOCKS
};
enum { GL_A_SCALES = OP_LEAD, GL_A_GLOBAL, GL_B_SCALES, GL_B_GLOBAL, GL_C_GLOBAL };

typedef struct gemm_call {
    op_call head;
    quern_nvfp4_gemm_params params;
    quern_tensor transposed; /* b_codes as [E, N, K/2], if the caller's view is that in memory */
    bool k_major;
    quern_tensor a_global, b_global, c_global;
    _Alignas(op_step) char program[OP_STEP_BYTES(prepack) + 2 * OP_STEP_BYTES(grouped_gemm) +
                                   OP_STEP_BYTES(swiglu)];
} gemm_call;

extern const op_family nvfp4_gemm_family;

void nvfp4_gemm_build(op_build *b);

#endif
