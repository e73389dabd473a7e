/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * combine.cu - a token's copies to its sub-layer's input and, with f, to the new copies: a block a token, two
 * chunks of eight channels of all copies a thread, all of which are on their way before the weights are read.
 * The last tokens come first: the sums have left their copies in L2. Limit: copy rate.
 */
#include "hyper/four/params.cuh"

enum { THREADS_MOST = 512, EACH = 2, BLOCK_WARPS = THREADS_MOST / 32 };

__device__ __forceinline__ const bf16 *row_of(const token_rows &r, int64_t token, int copy, int channel)
{
    return (const bf16 *)r.p + token * r.token + copy * r.copy + channel;
}

__device__ __forceinline__ void unpack(const uint4 &x, float (&to)[CHUNK])
{
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 both = unpack2<bf16>(word_of(x, w));
        to[2 * w] = both.x;
        to[2 * w + 1] = both.y;
    }
}

__device__ __forceinline__ void store(const token_rows &r, int64_t token, int copy, int channel,
                                      const float (&x)[CHUNK])
{
    __stcs((uint4 *)row_of(r, token, copy, channel),
           make_uint4(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]), pack2<bf16>(x[4], x[5]),
                      pack2<bf16>(x[6], x[7])));
}

/* The sum of copies, or of them and f: factors are of x_0 ... x_3. */
__device__ __forceinline__ void mix(const uint4 (&x)[COPIES], const float (&factor)[COPIES],
                                    float (&sum)[CHUNK])
{
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        float here[CHUNK];
        unpack(x[i], here);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) sum[e] = fmaf(factor[i], here[e], sum[e]);
    }
}

/* New copy k at eight channels. */
__device__ __forceinline__ void make_copy(const four_params &p, const float *w, int64_t token, int k,
                                          int channel, const uint4 (&x)[COPIES], const uint4 &f)
{
    float sum[CHUNK], factor[COPIES];
    unpack(f, sum);
#pragma unroll
    for (int e = 0; e < CHUNK; e++) sum[e] *= w[COPIES + k];
#pragma unroll
    for (int i = 0; i < COPIES; i++) factor[i] = w[2 * COPIES + i * COPIES + k];
    mix(x, factor, sum);
    store(p.out, token, k, channel, sum);
}

__device__ __forceinline__ void make_input(const four_params &p, int64_t token, int channel,
                                           const float (&c)[CHUNK], float scale)
{
    const chunk norm = p.norm.dtype == QUERN_F32 ? load_chunk<float>((const float *)p.norm.p + channel, true)
                                                 : load_chunk<bf16>((const bf16 *)p.norm.p + channel, true);
    float h[CHUNK];
#pragma unroll
    for (int e = 0; e < CHUNK; e++) h[e] = c[e] * scale * norm.x[e];
    store(p.h, token, 0, channel, h);
}

template <bool OUT>
__global__ void __launch_bounds__(THREADS_MOST, 1) four_mix(const __grid_constant__ four_params p)
{
    __shared__ __align__(16) float w[WEIGHTS];
    __shared__ float parts[BLOCK_WARPS];
    const int64_t token = p.tokens - 1 - blockIdx.x;
    uint4 x[EACH][COPIES] = {}, f[EACH] = {};
    float c[EACH][CHUNK] = {}, square = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int channel = (threadIdx.x + e * blockDim.x) * CHUNK;
        if (channel >= p.width) continue;
#pragma unroll
        for (int i = 0; i < COPIES; i++) x[e][i] = load_once(row_of(p.x, token, i, channel));
        if (OUT) f[e] = load_once(row_of(p.f, token, 0, channel));
    }
    if (threadIdx.x < WEIGHTS) w[threadIdx.x] = p.weights[token * WEIGHTS + threadIdx.x];
    __syncthreads();
    const float pre[] = {w[0], w[1], w[2], w[3]};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int channel = (threadIdx.x + e * blockDim.x) * CHUNK;
        if (channel >= p.width) continue;
        mix(x[e], pre, c[e]);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) square = fmaf(c[e][i], c[e][i], square);
#pragma unroll 1
        for (int k = 0; OUT && k < COPIES; k++) make_copy(p, w, token, k, channel, x[e], f[e]);
    }
    const float scale = 1.0f / sqrtf(block_sum(square, parts) / (float)p.width + p.rms_eps);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int channel = (threadIdx.x + e * blockDim.x) * CHUNK;
        if (channel < p.width) make_input(p, token, channel, c[e], scale);
    }
}

quern_status four_combine(const four_params &p, cudaStream_t stream)
{
    static_assert(THREADS_MOST * EACH * CHUNK >= WIDTH_MOST, "a block has a token");
    const int threads = (p.width / CHUNK + EACH * 32 - 1) / (EACH * 32) * 32;
    const unsigned blocks = (unsigned)p.tokens;
    if (p.f.p != NULL) four_mix<true><<<blocks, threads, 0, stream>>>(p);
    else four_mix<false><<<blocks, threads, 0, stream>>>(p);
    return LAUNCHED("hyper");
}
