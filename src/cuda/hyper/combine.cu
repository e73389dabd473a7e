/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* combine.cu - a token's copies to its sub-layer's input and, with f, to the new copies: a block a token,
 * eight channels of all copies a thread. Limit: copy rate. */
#include "hyper/params.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* The factors of a token: of copy i in new copy k at [k][i], of f at [k][n]. */
struct token_factors {
    float pre[COPIES_MOST], out[COPIES_MOST][COPIES_MOST + 1];
};

__device__ __forceinline__ void load_factors(const hyper_params &p, int64_t token, token_factors &m)
{
    const int n = p.copies, i = threadIdx.x;
    if (i < n) m.pre[i] = pre_of(p, token)[i];
    if (p.f.p == NULL) return;
    const float *const w = p.of_tokens + token * p.weights;
    if (i < n * n) m.out[i % n][i / n] = w[2 * n + i];
    if (i < n) m.out[i][n] = w[n + i];
}

/* N: at least the copies. */
template <int N>
__global__ void __launch_bounds__(THREADS) hyper_combine(const __grid_constant__ hyper_params p)
{
    extern __shared__ __align__(16) float collapsed[];
    __shared__ token_factors m;
    __shared__ float parts[WARPS];
    const int64_t token = blockIdx.x;
    const int n = p.copies;
    float square = 0.0f;
    load_factors(p, token, m);
    __syncthreads();
    for (int channel = threadIdx.x * CHUNK; channel < p.width; channel += THREADS * CHUNK) {
        chunk x[N], f, sum = {};
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < n) x[i] = load_row(p, p.x, token, i, channel);
        if (p.f.p != NULL) f = load_row(p, p.f, token, 0, channel);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < n) add_scaled(sum, m.pre[i], x[i]);
        square += dot_of(sum, sum);
        store_shared(collapsed + channel, sum);
#pragma unroll
        for (int k = 0; k < N; k++) {
            if (p.f.p == NULL || k >= n) continue;
            chunk out = {};
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i < n) add_scaled(out, m.out[k][i], x[i]);
            add_scaled(out, m.out[k][n], f);
            store_row(p, p.out, token, k, channel, out);
        }
    }
    const float scale = 1.0f / sqrtf(block_sum(square, parts) / (float)p.width + p.rms_eps);
    for (int channel = threadIdx.x * CHUNK; channel < p.width; channel += THREADS * CHUNK) {
        chunk c = load_shared(collapsed + channel);
        const chunk norm = load_norm(p, channel);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) c.x[e] = c.x[e] * scale * norm.x[e];
        store_row(p, p.h, token, 0, channel, c);
    }
}

quern_status hyper_combine(const hyper_params &p, cudaStream_t stream)
{
    const launcher to = {stream, NULL};
    const size_t bytes = (size_t)(p.width + CHUNK - 1) / CHUNK * CHUNK * sizeof(float);
    const dim3 grid((unsigned)p.tokens);
    return p.copies <= 4 ? launch_shared(to, hyper_combine<4>, grid, THREADS, bytes, "hyper", p)
                         : launch_shared(to, hyper_combine<COPIES_MOST>, grid, THREADS, bytes, "hyper", p);
}
