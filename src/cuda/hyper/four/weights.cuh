/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.cuh - a token's weights from its sums. A thread has a token: its matrix of 4 x 4 stays in
 * registers, and 39 normalisations take some 1500 instructions of a warp for 32 tokens. */
#ifndef QUERN_CUDA_HYPER_FOUR_WEIGHTS_CUH
#define QUERN_CUDA_HYPER_FOUR_WEIGHTS_CUH

#include "hyper/four/params.cuh"

enum { MATRIX = COPIES * COPIES, COMB = 2 * COPIES };

struct token_weights {
    float mean[WEIGHTS], weight[WEIGHTS], soft[MATRIX], root;
};

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* Sums of N columns of a token over all panels. */
template <int N>
__device__ __forceinline__ void add_panels(const four_params &p, int64_t token, float (&sum)[N])
{
    const int panels = (p.width + PANEL - 1) / PANEL;
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = 0.0f;
    for (int s = 0; s < panels; s++)
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] += p.sums[((int64_t)s * N + j) * p.padded + token];
}

/* Rows, or columns, over their sums + eps, which it returns. */
template <bool ROWS> __device__ __forceinline__ float4 normalise(float *c, float eps)
{
    float sum[COPIES];
#pragma unroll
    for (int l = 0; l < COPIES; l++) {
        const int along = ROWS ? 1 : COPIES, first = ROWS ? l * COPIES : l;
        sum[l] = ((c[first] + c[first + along]) + (c[first + 2 * along] + c[first + 3 * along])) + eps;
        const float factor = __fdividef(1.0f, sum[l]);
#pragma unroll
        for (int i = 0; i < COPIES; i++) c[first + i * along] *= factor;
    }
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

/* The softmax of each row, plus eps. */
__device__ __forceinline__ void soften(float *c, float *soft, float eps)
{
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        float most = c[i * COPIES], sum = 0.0f;
#pragma unroll
        for (int k = 1; k < COPIES; k++) most = fmaxf(most, c[i * COPIES + k]);
#pragma unroll
        for (int k = 0; k < COPIES; k++) sum += soft[i * COPIES + k] = expf(c[i * COPIES + k] - most);
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
            soft[i * COPIES + k] /= sum;
            c[i * COPIES + k] = soft[i * COPIES + k] + eps;
        }
    }
}

/* Fills in w. KEEP: what each normalisation divided by goes to kept[step stride]. */
template <bool KEEP>
__device__ __forceinline__ void weigh(const four_params &p, token_weights &w, const float *products,
                                      float square, float4 *kept, int stride)
{
    w.root = 1.0f / sqrtf(square / ((float)COPIES * (float)p.width) + p.rms_eps);
#pragma unroll
    for (int j = 0; j < WEIGHTS; j++) {
        w.mean[j] = products[j] * w.root;
        const float logit = fmaf(w.mean[j], p.scale[part_of(COPIES, j)], p.base[j]);
        w.weight[j] = j < COPIES ? sigmoid(logit) + p.eps : j < COMB ? 2.0f * sigmoid(logit) : logit;
    }
    float *const c = w.weight + COMB;
    soften(c, w.soft, p.eps);
    float4 by = normalise<false>(c, p.eps);
    if (KEEP) kept[0] = by;
#pragma unroll 1
    for (int step = 1; step < 2 * p.iterations - 1; step += 2) {
        by = normalise<true>(c, p.eps);
        if (KEEP) kept[step * stride] = by;
        by = normalise<false>(c, p.eps);
        if (KEEP) kept[(step + 1) * stride] = by;
    }
}

/* Four floats of a token's row r; zeros where there is none. */
__device__ __forceinline__ void take_four(const token_rows &r, int64_t token, int row, float *to)
{
    const float *const from = (const float *)r.p + token * r.token + row * r.copy;
#pragma unroll
    for (int i = 0; i < COPIES; i++) to[i] = r.p != NULL ? from[i] : 0.0f;
}

__device__ __forceinline__ void give_four(const token_rows &r, int64_t token, int row, const float *from)
{
    if (r.p == NULL) return;
    float *const to = (float *)r.p + token * r.token + row * r.copy;
#pragma unroll
    for (int i = 0; i < COPIES; i++) to[i] = from[i];
}

#endif
