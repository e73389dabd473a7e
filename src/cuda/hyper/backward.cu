/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.cu - the gradients of hyper-connections, in three kernels about the one of weights.cu.
 *
 *   tokens   a block a token: the gradient of the sum of its copies, through the norm, and of the token's
 *            weights, which are sums over channels; d_f. A block's tokens share the sums of the norm's
 *            gradient.
 *   copies   8 tokens, a channel of all copies a thread; a: the gradient of the sums:
 *            d_x_i = a fn + p_i d_c + b x_i + sum_k comb[i, k] d_out_k
 *   fn       a share of the tokens, a channel of one copy a thread: d_fn += a^T x
 *
 * Limits: copy rate; f32 multiply-adds, J n C a token in each of the last two.
 */
#include "common/fold.cuh"
#include "hyper/params.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, SUMS = 32, TOKENS = 8, FN_TOKENS = 32, FN_WEIGHTS = 24 };

/* ---- tokens ---- */

/* The sum of a token's copies at eight channels. */
template <int N>
__device__ __forceinline__ chunk collapse(const hyper_params &p, const float *pre, int64_t token, int channel)
{
    chunk sum = {};
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i < p.copies) add_scaled(sum, pre[i], load_row(p, p.x, token, i, channel));
    return sum;
}

/* Computes a token's d_c from its d_h, into `kept`, and adds to the norm's gradient. */
template <int N>
__device__ __forceinline__ void take_d_h(const hyper_params &p, const float *pre, int64_t token, float *kept,
                                         float *d_norm, float *parts)
{
    float square = 0.0f, dot = 0.0f;
    for (int channel = threadIdx.x * CHUNK; channel < p.width; channel += THREADS * CHUNK) {
        const chunk c = collapse<N>(p, pre, token, channel), d = load_row(p, p.d_h, token, 0, channel),
                    norm = load_norm(p, channel);
        square += dot_of(c, c);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) dot = fmaf(d.x[e] * norm.x[e], c.x[e], dot);
        store_shared(kept + channel, c);
    }
    const float scale = 1.0f / sqrtf(block_sum(square, parts) / (float)p.width + p.rms_eps),
                mean = block_sum(dot, parts) / (float)p.width * scale * scale;
    if (threadIdx.x == 0) p.norms[token] = make_float2(scale, mean);
    for (int channel = threadIdx.x * CHUNK; channel < p.width; channel += THREADS * CHUNK) {
        const chunk d = load_row(p, p.d_h, token, 0, channel), norm = load_norm(p, channel);
        chunk c = load_shared(kept + channel);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) {
            if (d_norm != NULL) d_norm[channel + e] = fmaf(d.x[e] * c.x[e], scale, d_norm[channel + e]);
            c.x[e] = (d.x[e] * norm.x[e] - c.x[e] * mean) * scale;
        }
        store_shared(kept + channel, c);
    }
}

/* The sums over channels of new copies [k0, k0 + K): number i of x_i times d_c, which the first K take, and N
 * + k (N + 1) + i of x_i, or at N of f, times d_out_k. */
template <int N, int K>
__device__ __forceinline__ void dot_channels(const hyper_params &p, const float *kept, int64_t token, int k0,
                                             float (&sum)[SUMS])
{
    static_assert(N + K * (N + 1) <= SUMS, "a lane a sum");
    for (int channel = threadIdx.x * CHUNK; channel < p.width; channel += THREADS * CHUNK) {
        chunk x[N + 1];
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < p.copies) x[i] = load_row(p, p.x, token, i, channel);
            else x[i] = {};
        if (p.f.p != NULL) x[N] = load_row(p, p.f, token, 0, channel);
        if (k0 == 0 && p.d_h.p != NULL) {
            const chunk d = load_shared(kept + channel);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += dot_of(x[i], d);
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            if (p.d_out.p == NULL || k0 + k >= p.copies) continue;
            const chunk d = load_row(p, p.d_out, token, k0 + k, channel);
#pragma unroll
            for (int i = 0; i <= N; i++) sum[N + k * (N + 1) + i] += dot_of(x[i], d);
        }
    }
}

/* Which weight's gradient sum number i of dot_channels() is; -1: none. */
template <int N, int K> __device__ __forceinline__ int weight_of(const hyper_params &p, int k0, int i)
{
    const int n = p.copies, k = k0 + (i - N) / (N + 1), from = (i - N) % (N + 1);
    if (i < N) return k0 == 0 && i < n ? i : -1;
    if (i >= N + K * (N + 1) || k >= n) return -1;
    return from == N ? (p.head ? -1 : n + k) : from < n && !p.head ? 2 * n + from * n + k : -1;
}

__device__ __forceinline__ void give_d_f(const hyper_params &p, int64_t token)
{
    const float *const post = p.of_tokens + token * p.weights + p.copies;
    for (int channel = threadIdx.x * CHUNK; channel < p.width; channel += THREADS * CHUNK) {
        chunk d = {};
        for (int k = 0; k < p.copies && p.d_out.p != NULL; k++)
            add_scaled(d, post[k], load_row(p, p.d_out, token, k, channel));
        store_row(p, p.d_f, token, 0, channel, d);
    }
}

/* Rows of shared memory: the token's collapsed copies, and the block's gradient of the norm where it is
 * wanted. */
struct token_memory {
    float *kept, *d_norm;

    static size_t bytes(const hyper_params &p)
    {
        const size_t wide = (size_t)(p.width + CHUNK - 1) / CHUNK * CHUNK * sizeof(float);
        return p.d_norm_parts != NULL ? 2 * wide : wide;
    }
};

template <int N, int K>
__global__ void __launch_bounds__(THREADS) hyper_tokens(const __grid_constant__ hyper_params p)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ float parts[WARPS], shares[WARPS][SUMS];
    const int wide = (p.width + CHUNK - 1) / CHUNK * CHUNK, lane = threadIdx.x % 32;
    const token_memory m = {memory, p.d_norm_parts != NULL ? memory + wide : NULL};
    float *const kept = m.kept, *const d_norm = m.d_norm;
    for (int c = threadIdx.x; d_norm != NULL && c < wide; c += THREADS) d_norm[c] = 0.0f;
    __syncthreads();
    for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        if (p.d_h.p != NULL) take_d_h<N>(p, pre_of(p, token), token, kept, d_norm, parts);
        for (int k0 = 0; k0 < p.copies; k0 += K) {
            float sum[SUMS] = {};
            dot_channels<N, K>(p, kept, token, k0, sum);
            fold_lanes<SUMS, 16>(sum);
            shares[threadIdx.x / 32][lane] = sum[0];
            __syncthreads();
            const int j = threadIdx.x < SUMS ? weight_of<N, K>(p, k0, lane) : -1;
            if (j >= 0) {
                float all = 0.0f;
                for (int w = 0; w < WARPS; w++) all += shares[w][lane];
                p.d_of_tokens[token * p.weights + j] = all;
                if (j < p.copies && p.d_pre_in.p != NULL)
                    ((float *)p.d_pre_in.p)[token * p.d_pre_in.token + j] = all;
            }
            __syncthreads();
        }
        if (p.d_f.p != NULL) give_d_f(p, token);
    }
    for (int c = threadIdx.x; d_norm != NULL && c < p.width; c += THREADS)
        p.d_norm_parts[(int64_t)blockIdx.x * p.width + c] = d_norm[c];
}

quern_status hyper_tokens_backward(const hyper_params &p, int64_t runs, cudaStream_t stream)
{
    const launcher to = {stream, NULL};
    const size_t bytes = token_memory::bytes(p);
    const dim3 grid((unsigned)runs);
    return p.copies <= 4
               ? launch_shared(to, hyper_tokens<4, 4>, grid, THREADS, bytes, "hyper, gradients of tokens", p)
               : launch_shared(to, hyper_tokens<COPIES_MOST, 2>, grid, THREADS, bytes,
                               "hyper, gradients of tokens", p);
}

/* ---- copies ---- */

struct copies_shared {
    float a[WEIGHTS_MOST][TOKENS], x[TOKENS], pre[TOKENS][COPIES_MOST],
        comb[TOKENS][COPIES_MOST * COPIES_MOST];
};

/* What the block's tokens multiply by. */
__device__ __forceinline__ void load_tokens(const hyper_params &p, copies_shared &s, int64_t token0)
{
    const int n = p.copies;
    for (int i = threadIdx.x; i < TOKENS * (p.weights + 1); i += THREADS) {
        const int t = i % TOKENS, j = i / TOKENS;
        const float d =
            p.mixes && token0 + t < p.tokens ? p.d_sums[(token0 + t) * (p.weights + 1) + j] : 0.0f;
        if (j < p.weights) s.a[j][t] = d;
        else s.x[t] = d;
    }
    for (int i = threadIdx.x; i < TOKENS * n; i += THREADS)
        if (token0 + i / n < p.tokens) s.pre[i / n][i % n] = pre_of(p, token0 + i / n)[i % n];
    for (int i = threadIdx.x; p.d_out.p != NULL && i < TOKENS * n * n; i += THREADS) {
        const int64_t token = token0 + i / (n * n);
        if (token < p.tokens)
            s.comb[i / (n * n)][i % (n * n)] = p.of_tokens[token * p.weights + 2 * n + i % (n * n)];
    }
    __syncthreads();
}

__device__ __forceinline__ float row_at(const hyper_params &p, const token_rows &r, int64_t token, int copy,
                                        int channel)
{
    return value_at(r.p, p.dtype, token * r.token + copy * r.copy + channel);
}

__global__ void __launch_bounds__(THREADS, 2) hyper_copies(const __grid_constant__ hyper_params p)
{
    __shared__ __align__(16) copies_shared s;
    const int panels = (p.width + THREADS - 1) / THREADS,
              channel = blockIdx.x % panels * THREADS + threadIdx.x, n = p.copies;
    const int64_t token0 = (int64_t)(blockIdx.x / panels) * TOKENS;
    const int count = (int)min((int64_t)TOKENS, p.tokens - token0);
    float d_c[TOKENS] = {};
    load_tokens(p, s, token0);
    if (channel >= p.width) return;
    const float norm = p.norm.at(channel);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= count || p.d_h.p == NULL) continue;
        const float2 of_norm = p.norms[token0 + t];
        float c = 0.0f;
        for (int i = 0; i < n; i++) c = fmaf(s.pre[t][i], row_at(p, p.x, token0 + t, i, channel), c);
        d_c[t] = (row_at(p, p.d_h, token0 + t, 0, channel) * norm - c * of_norm.y) * of_norm.x;
    }
    for (int i = 0; i < n; i++) {
        float d[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) d[t] = s.pre[t][i] * d_c[t];
        for (int j = 0; p.mixes && j < p.weights; j++) {
            const float fn = __ldg(p.fn + j * p.fn_row + (int64_t)i * p.width + channel);
#pragma unroll
            for (int t = 0; t < TOKENS; t += 4) {
                const float4 a = *(const float4 *)&s.a[j][t];
                d[t] = fmaf(a.x, fn, d[t]);
                d[t + 1] = fmaf(a.y, fn, d[t + 1]);
                d[t + 2] = fmaf(a.z, fn, d[t + 2]);
                d[t + 3] = fmaf(a.w, fn, d[t + 3]);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t >= count) continue;
            if (p.mixes) d[t] = fmaf(s.x[t], row_at(p, p.x, token0 + t, i, channel), d[t]);
            for (int k = 0; p.d_out.p != NULL && k < n; k++)
                d[t] = fmaf(s.comb[t][i * n + k], row_at(p, p.d_out, token0 + t, k, channel), d[t]);
            put_at(p.d_x.p, p.dtype, (token0 + t) * p.d_x.token + i * p.d_x.copy + channel, d[t]);
        }
    }
}

quern_status hyper_copies_backward(const hyper_params &p, cudaStream_t stream)
{
    const int64_t blocks = (p.tokens + TOKENS - 1) / TOKENS * ((p.width + THREADS - 1) / THREADS);
    hyper_copies<<<(unsigned)blocks, THREADS, 0, stream>>>(p);
    return LAUNCHED("hyper, gradients of copies");
}

/* ---- fn ---- */

__global__ void __launch_bounds__(THREADS) hyper_fn(const __grid_constant__ hyper_params p)
{
    __shared__ __align__(16) float a[FN_TOKENS][FN_WEIGHTS];
    const int panels = (p.width + THREADS - 1) / THREADS, copy = blockIdx.x / panels,
              channel = blockIdx.x % panels * THREADS + threadIdx.x, j0 = blockIdx.y * FN_WEIGHTS;
    const int64_t tokens = (p.tokens + gridDim.z - 1) / gridDim.z, first = blockIdx.z * tokens,
                  end = min(p.tokens, first + tokens);
    float sum[FN_WEIGHTS] = {};
    for (int64_t token0 = first; token0 < end; token0 += FN_TOKENS) {
        const int count = (int)min((int64_t)FN_TOKENS, end - token0);
        for (int i = threadIdx.x; i < FN_TOKENS * FN_WEIGHTS; i += THREADS) {
            const int t = i / FN_WEIGHTS, j = j0 + i % FN_WEIGHTS;
            a[t][i % FN_WEIGHTS] =
                t < count && j < p.weights ? p.d_sums[(token0 + t) * (p.weights + 1) + j] : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const float x = channel < p.width ? row_at(p, p.x, token0 + t, copy, channel) : 0.0f;
#pragma unroll
            for (int j = 0; j < FN_WEIGHTS; j += 4) {
                const float4 d = *(const float4 *)&a[t][j];
                sum[j] = fmaf(d.x, x, sum[j]);
                sum[j + 1] = fmaf(d.y, x, sum[j + 1]);
                sum[j + 2] = fmaf(d.z, x, sum[j + 2]);
                sum[j + 3] = fmaf(d.w, x, sum[j + 3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < FN_WEIGHTS; j++)
        if (channel < p.width && j0 + j < p.weights)
            p.d_fn_parts[((blockIdx.z * (int64_t)p.weights + j0 + j) * p.copies + copy) * p.width + channel] =
                sum[j];
}

quern_status hyper_fn_backward(const hyper_params &p, int64_t shares, cudaStream_t stream)
{
    const dim3 grid((unsigned)(p.copies * ((p.width + THREADS - 1) / THREADS)),
                    (unsigned)((p.weights + FN_WEIGHTS - 1) / FN_WEIGHTS), (unsigned)shares);
    hyper_fn<<<grid, THREADS, 0, stream>>>(p);
    return LAUNCHED("hyper, fn's gradient");
}
