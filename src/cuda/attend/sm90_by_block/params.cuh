/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what kernel.cuh's kernels of a slice are called with. */
#ifndef QUERN_CUDA_ATTEND_SM90_BY_BLOCK_PARAMS_CUH
#define QUERN_CUDA_ATTEND_SM90_BY_BLOCK_PARAMS_CUH

#include "attend/sm90/attend.cuh"

/* Bits of an id that are the block's place in the token's clean list; the others are the token's place in its
 * slice. */
enum { RANK_BITS = 5, SLICE_LISTS = 8192 };

/* 64 keys, and ids [first, first + count) of those that chose them. */
struct alignas(16) block_item {
    int32_t block, first, count;
};

/* `lists` tokens of a view and unit from query0 on. */
struct token_slice {
    int32_t view, unit, query0, lists;
    bool first; /* of the call's */
    int32_t most_items;
    const int32_t *item_count;
    const block_item *items;
    const int32_t *ids;
    const int32_t *counts; /* entries of each token's clean list; -1: not here */
    void *parts, *stats;   /* [lists][list_k][rows of a list]: O's columns; maximum, sum and scale */
};

typedef quern_status sm90_attend_by_block(const attend_args *args, const attend_kernel &a,
                                          const token_slice &s, cudaStream_t stream);
sm90_attend_by_block sm90_by_block_bf16_64, sm90_by_block_bf16_128, sm90_by_block_f16_64,
    sm90_by_block_f16_128;

/* sm90_tokens/kernel.cuh's forward but for the pieces that `elsewhere` tells. */
typedef quern_status sm90_attend_but(const attend_args *args, const attend_launch &l,
                                     const int32_t *elsewhere, const sm90_device &device, void *workspace,
                                     cudaStream_t stream);
sm90_attend_but sm90_tokens_but_bf16_64, sm90_tokens_but_bf16_128;
sm90_attend_but sm90_tokens_but_f16_64, sm90_tokens_but_f16_128;

#endif
