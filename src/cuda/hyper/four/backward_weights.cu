/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward_weights.cu - from a token's sums the gradients of its weights, through them those of the sums, and
 * what its copies' gradients multiply by. A thread has a token. The forward keeps the four sums by which
 * each normalisation divides; the backward goes through them from the last to the first and multiplies the
 * matrix by them again, so no other matrix is kept: Y = X / s has dX = (dY - sum dY Y) / s.
 *
 * With c = sum p_i x_i and d_c = (d_h norm - c mean) scale the norm's part needs products of rows alone:
 * |c|^2 = sum p_i p_j x_i x_j, mean = scale^2 / C sum p_i (x_i d_h norm). Limit: latency.
 */
#include "hyper/four/weights.cuh"

enum { THREADS = 64, WARPS = THREADS / 32 };

/* c, the matrix after the normalisation, becomes the one before it; d likewise. */
template <bool ROWS> __device__ __forceinline__ void normalise_backward(float *d, float *c, const float4 &by)
{
    const float sums[] = {by.x, by.y, by.z, by.w};
#pragma unroll
    for (int l = 0; l < COPIES; l++) {
        const int along = ROWS ? 1 : COPIES, first = ROWS ? l * COPIES : l;
        const float factor = __fdividef(1.0f, sums[l]);
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < COPIES; i++) dot = fmaf(d[first + i * along], c[first + i * along], dot);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            d[first + i * along] = (d[first + i * along] - dot) * factor;
            c[first + i * along] *= sums[l];
        }
    }
}

/* d, of the weights, becomes the gradient of the logits. */
__device__ __forceinline__ void weigh_backward(const four_params &p, token_weights &w, float (&d)[WEIGHTS],
                                               const float4 *kept)
{
#pragma unroll
    for (int j = 0; j < COMB; j++) {
        const float s = j < COPIES ? w.weight[j] - p.eps : 0.5f * w.weight[j];
        d[j] *= (j < COPIES ? 1.0f : 2.0f) * s * (1.0f - s);
    }
    float c[MATRIX];
#pragma unroll
    for (int e = 0; e < MATRIX; e++) c[e] = w.weight[COMB + e];
#pragma unroll 1
    for (int step = 2 * p.iterations - 2; step > 0; step -= 2) {
        normalise_backward<false>(d + COMB, c, kept[step * THREADS]);
        normalise_backward<true>(d + COMB, c, kept[(step - 1) * THREADS]);
    }
    normalise_backward<false>(d + COMB, c, kept[0]);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        float *const row = d + COMB + i * COPIES, dot = 0.0f;
#pragma unroll
        for (int k = 0; k < COPIES; k++) dot = fmaf(row[k], w.soft[i * COPIES + k], dot);
#pragma unroll
        for (int k = 0; k < COPIES; k++) row[k] = w.soft[i * COPIES + k] * (row[k] - dot);
    }
}

/* p_i x_i x_j summed over i: what copy j has in common with their sum. */
__device__ __forceinline__ void with_collapsed(const float *pairs, const float *pre, float (&with)[COPIES])
{
    int pair = 0;
#pragma unroll
    for (int i = 0; i < COPIES; i++) with[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < COPIES; i++)
#pragma unroll
        for (int j = i; j < COPIES; j++, pair++) {
            with[j] = fmaf(pre[i], pairs[pair], with[j]);
            if (j > i) with[i] = fmaf(pre[j], pairs[pair], with[i]);
        }
}

/* The norm's factors, and the gradients of `pre`. */
__device__ __forceinline__ void norm_backward(const four_params &p, const float (&sum)[BACKWARD_SUMS],
                                              token_record &r, float (&d_pre)[COPIES])
{
    float with[COPIES], square = 0.0f, along = 0.0f;
    with_collapsed(sum + SUM_PAIR, r.pre, with);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        square = fmaf(r.pre[i], with[i], square);
        along = fmaf(r.pre[i], sum[SUM_H + i], along);
    }
    r.scale = 1.0f / sqrtf(fmaxf(square, 0.0f) / (float)p.width + p.rms_eps);
    r.mean = along / (float)p.width * r.scale * r.scale;
#pragma unroll
    for (int i = 0; i < COPIES; i++) d_pre[i] = r.scale * fmaf(-r.mean, with[i], sum[SUM_H + i]);
}

/* The gradients of a token's weights, those that the caller has added. */
__device__ __forceinline__ void gather(const four_params &p, int64_t token, const float (&sum)[BACKWARD_SUMS],
                                       const float (&d_pre)[COPIES], float (&d)[WEIGHTS])
{
    float more[COPIES];
    take_four(p.d_pre, token, 0, more);
#pragma unroll
    for (int i = 0; i < COPIES; i++) d[i] = more[i] + (p.pre_in.p != NULL ? 0.0f : d_pre[i]);
    take_four(p.d_post, token, 0, more);
#pragma unroll
    for (int i = 0; i < COPIES; i++) d[COPIES + i] = more[i] + sum[SUM_F + i];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        take_four(p.d_comb, token, i, more);
#pragma unroll
        for (int k = 0; k < COPIES; k++) d[COMB + i * COPIES + k] = more[k] + sum[SUM_OUT + i * COPIES + k];
    }
}

/* From d, of the logits, a token's record but for what norm_backward() made. */
__device__ __forceinline__ void finish(const four_params &p, const token_weights &w,
                                       const float (&d)[WEIGHTS], token_record &r)
{
    float along = 0.0f;
#pragma unroll
    for (int j = 0; j < WEIGHTS; j++) {
        const float here = d[j] * p.scale[part_of(COPIES, j)], a = here * w.root;
        along = fmaf(here, w.mean[j], along);
        r.a[0][j] = from_float<bf16>(a);
        r.a[1][j] = from_float<bf16>(a - to_float(r.a[0][j]));
    }
    r.of_x = -along * w.root * w.root / ((float)COPIES * (float)p.width);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        r.post[i] = w.weight[COPIES + i];
#pragma unroll
        for (int k = 0; k < COPIES; k++) r.comb[i][k] = w.weight[COMB + i * COPIES + k];
    }
}

__device__ __forceinline__ double warp_sum(double x)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

__global__ void __launch_bounds__(THREADS) four_weigh_backward(const __grid_constant__ four_params p)
{
    extern __shared__ __align__(16) float4 memory[];
    float4 *const kept = memory + threadIdx.x;
    const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  run = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const bool here = token < p.tokens;
    float sum[BACKWARD_SUMS], d[WEIGHTS], d_pre[COPIES];
    token_weights w;
    token_record r = {};
    add_panels(p, here ? token : p.tokens - 1, sum);
    weigh<true>(p, w, sum + SUM_FN, sum[SUM_PAIR] + sum[SUM_PAIR + 4] + sum[SUM_PAIR + 7] + sum[SUM_PAIR + 9],
                kept, THREADS);
    if (p.pre_in.p != NULL) take_four(p.pre_in, here ? token : p.tokens - 1, 0, r.pre);
    else
#pragma unroll
        for (int i = 0; i < COPIES; i++) r.pre[i] = w.weight[i];
    norm_backward(p, sum, r, d_pre);
    gather(p, here ? token : p.tokens - 1, sum, d_pre, d);
    weigh_backward(p, w, d, kept);
    finish(p, w, d, r);
    if (here) give_four(p.d_pre_in, token, 0, d_pre);
    if (here) p.records[token] = r;
#pragma unroll
    for (int j = 0; j < WEIGHTS; j++) {
        const double of_base = warp_sum(here ? (double)d[j] : 0.0),
                     of_mean = warp_sum(here ? (double)(d[j] * w.mean[j]) : 0.0);
        if (threadIdx.x % 32 != 0) continue;
        p.d_small[run * 2 * WEIGHTS + j] = of_base;
        p.d_small[(run * 2 + 1) * WEIGHTS + j] = of_mean;
    }
}

size_t four_weights_backward_bytes(int iterations)
{
    return (size_t)(2 * iterations - 1) * THREADS * sizeof(float4);
}

quern_status four_weights_backward(const four_params &p, cudaStream_t stream)
{
    return launch_shared({stream, NULL}, four_weigh_backward, dim3(blocks_for(p.tokens, THREADS)), THREADS,
                         four_weights_backward_bytes(p.iterations), "hyper, gradients of weights", p);
}
