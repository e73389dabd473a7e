/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the gate stages hand to their kernels, which are compiled in a file for each dtype. */
#ifndef QUERN_CUDA_GATE_ANY_PARAMS_CUH
#define QUERN_CUDA_GATE_ANY_PARAMS_CUH

#include "common/device.cuh"

struct gate_kernel {
    int64_t rows;        /* tokens, all sequences */
    int64_t n;           /* tokens of one batch view */
    int64_t tokens;      /* of a slice */
    int64_t valid_index; /* varlen: index of the last element of cu */
    const int32_t *cu;
    int heads, dim, dim_v, kind;
    view4 q, o, d_o, ob[3], d_ob[3], d_q;
    view4 gates, d_gates;
    view3 delta[3];
    const void *w;
    int64_t ws[2];
    bool w_f32, vec, dq_f32, add_q, same; /* same: q, o, o_b, d_o, d_o_b have the strides of o or d_o */
    bool w_vec;                           /* rows of w are aligned */
    float *dw_part;                       /* [slices][H][3][D] */
};

/* Starts a pass. */
typedef quern_status gate_part(const gate_kernel &a, cudaStream_t stream);
gate_part gate_forward_f32, gate_forward_bf16, gate_forward_f16;
gate_part gate_backward_f32, gate_backward_bf16, gate_backward_f16;

#endif
