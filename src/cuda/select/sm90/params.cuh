/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the select kernels for Hopper (sm_90a): one function for each dtype and padded head dim. */
#ifndef QUERN_CUDA_SELECT_SM90_PARAMS_CUH
#define QUERN_CUDA_SELECT_SM90_PARAMS_CUH

#include "select/params.cuh"

/* What the blocks of a launch share. */
struct sm90_select_plan {
    int32_t pieces, total; /* of a unit, of all */
    int32_t queries;       /* of a piece, at most: whole tiles */
    int32_t *taken;        /* pieces taken beyond each block's first; NULL: every block has one at most */
};

struct sm90_select_call {
    const select_args *args;
    int multiprocessors;
    void *workspace; /* SM90_SELECT_BYTES, at any address: the counter of pieces */
    cudaStream_t stream;
};
enum { SM90_SELECT_BYTES = 7, SM90_SELECT_HISTORY = 32, SM90_SELECT_MOST = 32 };

typedef quern_status sm90_select(const select_kernel &s, const sm90_select_call &call);
sm90_select sm90_select_bf16_64, sm90_select_bf16_128, sm90_select_bf16_192;
sm90_select sm90_select_f16_64, sm90_select_f16_128, sm90_select_f16_192;

#endif
