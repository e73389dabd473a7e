/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.cuh - a token's weights from its sums, by four lanes, each of which has a row of its matrix. */
#ifndef QUERN_CUDA_HYPER_SM90_WEIGHTS_CUH
#define QUERN_CUDA_HYPER_SM90_WEIGHTS_CUH

#include "hyper/four/weights.cuh"

/* The products with fn that a lane's row of its token's weights follows from: of pre, of post, of comb's
 * row. */
enum { ROW_WEIGHTS = 2 + COPIES };

__device__ __forceinline__ int row_column(int row, int j)
{
    return j < 2 ? j * COPIES + row : COMB + row * COPIES + j - 2;
}

/* A matrix whose rows four lanes have: its rows, or columns, over their sums + eps. */
__device__ __forceinline__ void normalise_row(float (&c)[COPIES], float eps)
{
    const float factor = __fdividef(1.0f, ((c[0] + c[1]) + (c[2] + c[3])) + eps);
#pragma unroll
    for (int k = 0; k < COPIES; k++) c[k] *= factor;
}
__device__ __forceinline__ void normalise_columns(float (&c)[COPIES], float eps)
{
#pragma unroll
    for (int k = 0; k < COPIES; k++) {
        float sum = c[k] + __shfl_xor_sync(~0u, c[k], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        c[k] *= __fdividef(1.0f, sum + eps);
    }
}

/* A row of comb from its logits. */
__device__ __forceinline__ void make_row(const four_params &p, float (&c)[COPIES])
{
    const float most = fmaxf(fmaxf(c[0], c[1]), fmaxf(c[2], c[3]));
#pragma unroll
    for (int k = 0; k < COPIES; k++) c[k] = expf(c[k] - most);
    const float factor = 1.0f / ((c[0] + c[1]) + (c[2] + c[3]));
#pragma unroll
    for (int k = 0; k < COPIES; k++) c[k] = fmaf(c[k], factor, p.eps);
    normalise_columns(c, p.eps);
#pragma unroll 1
    for (int i = 1; i < p.iterations; i++) {
        normalise_row(c, p.eps);
        normalise_columns(c, p.eps);
    }
}

/* What a lane has of its token's weights. */
struct row_weights {
    float pre, post, comb[COPIES];
};

/* What a lane's logits are made by: in memory, and read ahead. */
struct row_bases {
    const float *scales, *bases;
    int row;
    __device__ __forceinline__ float scale(int i) const { return scales[i]; }
    __device__ __forceinline__ float base(int j) const { return bases[row_column(row, j)]; }
};
struct kept_bases {
    float scales[3], bases[ROW_WEIGHTS];
    __device__ __forceinline__ explicit kept_bases(const row_bases &from)
    {
#pragma unroll
        for (int i = 0; i < 3; i++) scales[i] = from.scale(i);
#pragma unroll
        for (int j = 0; j < ROW_WEIGHTS; j++) bases[j] = from.base(j);
    }
    __device__ __forceinline__ float scale(int i) const
    {
        return scales[i];
    }
    __device__ __forceinline__ float base(int j) const
    {
        return bases[j];
    }
};

/* From the products' sums and the square of all copies. */
template <typename Bases>
__device__ __forceinline__ void make_weights(const four_params &p, const Bases &b, float square,
                                             const float (&sum)[ROW_WEIGHTS], row_weights &w)
{
    const float root = 1.0f / sqrtf(square / ((float)COPIES * (float)p.width) + p.rms_eps);
    w.pre = sigmoid(fmaf(sum[0] * root, b.scale(0), b.base(0))) + p.eps;
    w.post = 2.0f * sigmoid(fmaf(sum[1] * root, b.scale(1), b.base(1)));
#pragma unroll
    for (int k = 0; k < COPIES; k++) w.comb[k] = fmaf(sum[2 + k] * root, b.scale(2), b.base(2 + k));
    make_row(p, w.comb);
}

/* Stores what the caller wants of them, and puts the caller's pre, if any, in the place of pre. */
__device__ __forceinline__ void give_weights(const four_params &p, int64_t token, int row, row_weights &w)
{
    if (p.pre.p != NULL) ((float *)p.pre.p)[token * p.pre.token + row] = w.pre;
    if (p.post.p != NULL) ((float *)p.post.p)[token * p.post.token + row] = w.post;
    give_four(p.comb, token, row, w.comb);
    if (p.pre_in.p != NULL) w.pre = ((const float *)p.pre_in.p)[token * p.pre_in.token + row];
}

#endif
