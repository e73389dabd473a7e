/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the arguments of hyper-connections' kernels for four copies in bf16, and the sums that they
 * pass to each other: over panels of PANEL channels of all copies, [panel][column][token], so that threads of
 * neighbouring tokens read neighbouring words.
 */
#ifndef QUERN_CUDA_HYPER_FOUR_PARAMS_CUH
#define QUERN_CUDA_HYPER_FOUR_PARAMS_CUH

#include "hyper/params.cuh"

enum {
    COPIES = 4,
    WEIGHTS = COPIES * (COPIES + 2),
    PANEL = 512,  /* channels whose part of fn a block of the sums keeps */
    STRIP = 128,  /* the same of the gradients of the copies; the width is a multiple of it */
    TILE = 16,    /* tokens of a product */
    FN_PARTS = 2, /* fn and the gradients of its products are sums of two bf16 */
    WIDTH_MOST = 8192
};

/* The columns of the sums. Backward: products of x_i with fn, with x_j (i <= j), with d_h norm, with d_out_k,
 * and f's with d_out_k. None of them depends on a weight, so one pass makes all. */
enum {
    SUM_FN,
    SUM_SQUARE = WEIGHTS,
    FORWARD_SUMS,
    SUM_PAIR = WEIGHTS,
    PAIRS = COPIES * (COPIES + 1) / 2,
    SUM_H = SUM_PAIR + PAIRS,
    SUM_OUT = SUM_H + COPIES,
    SUM_F = SUM_OUT + COPIES * COPIES,
    BACKWARD_SUMS = SUM_F + COPIES
};

/* What a token's gradients multiply by. An odd number of 16 bytes, so that eight tokens' same members stand
 * in different banks. */
struct __align__(16) token_record
{
    float pre[COPIES], post[COPIES], comb[COPIES][COPIES];
    float of_x, scale, mean, unused; /* x's factor; the norm's 1 / root mean square; its mean */
    bf16 a[FN_PARTS][WEIGHTS];       /* the gradient of the sums over fn, in two parts */
};
static_assert(sizeof(token_record) % 32 == 16, "an odd number of 16 bytes");

struct four_params : hyper_call {
    int64_t padded;                   /* tokens of whole tiles */
    uint4 *fn_of_sums, *fn_of_copies; /* fn as operands of the two products */
    float *sums;                      /* [panels][FORWARD_SUMS or BACKWARD_SUMS][padded] */
    float *weights;                   /* [tokens][WEIGHTS]: pre_in or pre, post, comb */
    token_record *records;            /* [tokens] */
    double *d_small;                  /* [runs][2 WEIGHTS] */
    float *d_norm_parts;              /* [shares][width] */
    float *d_fn_parts;                /* [shares][WEIGHTS][COPIES width] */
};

/* Blocks that a device of Hopper's size runs at once: the numbers of shares follow from it, not from the
 * device, so that bits do not depend on it. */
enum { BLOCKS_WANTED = 128 };

static inline int64_t shares_for(int64_t panels)
{
    return panels >= BLOCKS_WANTED ? 1 : BLOCKS_WANTED / panels;
}

static inline int64_t panels_of(int64_t width)
{
    return (width + PANEL - 1) / PANEL;
}

__device__ __forceinline__ uint32_t word_of(const uint4 &x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* The backward's sums on Hopper; whether it takes a call. */
bool hyper_sums_sm90_takes(const stage_exec *exec, const hyper_args *args);
quern_status hyper_sums_sm90_run(const four_params &p, cudaStream_t stream);

quern_status four_pack(const four_params &p, cudaStream_t stream);
quern_status four_sums(const four_params &p, cudaStream_t stream);
quern_status four_weights(const four_params &p, cudaStream_t stream);
quern_status four_combine(const four_params &p, cudaStream_t stream);
quern_status four_sums_backward(const four_params &p, cudaStream_t stream);
quern_status four_weights_backward(const four_params &p, cudaStream_t stream);
quern_status four_copies_backward(const four_params &p, cudaStream_t stream);
size_t four_sums_bytes();
size_t four_sums_backward_bytes();
size_t four_weights_backward_bytes(int iterations);
size_t four_copies_backward_bytes();

#endif
