/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.h - the grouped product's tensors, extents and call. */
#ifndef QUERN_NVFP4_GEMM_H
#define QUERN_NVFP4_GEMM_H

#include "core/op.h"

#include <quern/nvfp4.h>

typedef enum gemm_op { GEMM, GEMM_BACKWARD, GEMM_OPS } gemm_op;

/* In the order of quern_nvfp4_gemm_tensors. */
enum {
    G_A,
    G_A_CODES,
    G_A_SCALES,
    G_PAD,
    G_A_GLOBAL,
    G_B_CODES,
    G_B_SCALES,
    G_B_REPACKED,
    G_B_GLOBAL,
    G_OFFSETS,
    G_BIAS,
    G_C,
    G_C_CODES,
    G_C_SCALES,
    G_C_GLOBAL,
    G_C_OLD,
    G_D_C,
    G_D_A,
    GEMM_TENSORS_COUNT
};

/* GS_CODES and GS_SCALES: the extents of b_codes and b_scales past E. */
enum {
    GS_T = 1,
    GS_K,
    GS_N,
    GS_E,
    GS_OUT,
    GS_HALF_K,
    GS_K_BLOCKS,
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
