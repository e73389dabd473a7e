/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gated.cuh - what attend_gated.cuh's kernels, three branches and their gate in one pass, are called with. */
#ifndef QUERN_CUDA_SM90_GATED_CUH
#define QUERN_CUDA_SM90_GATED_CUH

#include "sm90/attend/attend.cuh"

/* Three branches and their gate (attend_gated.cuh): the compressed, the selected one by a list of at most
 * SM90_GATED_LIST blocks, and the window, all with the second one's rows and units. */
enum { SM90_BRANCHES = 3, SM90_FIRST_BRANCH = 2, SM90_GATED_LIST = 64 };
struct sm90_gated {
    attend_kernel branch[SM90_BRANCHES]; /* their o: none */
    view4 o, gates;                      /* gates: f32, of a row three; written unless they are given */
    int32_t gate;                        /* gate_kind */
    const void *w;
    int64_t w_stride[2];
    bool w_f32, w_vec;
};
typedef quern_status sm90_attend_gated(const attend_gate_args *args, const sm90_gated &a,
                                       const sm90_device &device, void *workspace, cudaStream_t stream);
sm90_attend_gated sm90_gated_bf16_64, sm90_gated_bf16_128, sm90_gated_f16_64, sm90_gated_f16_128;

#endif
