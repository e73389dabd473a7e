/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * weights.cu - a token's weights from its sums, and the gradient: sigmoids, a softmax, and alternating
 * normalisations of rows and columns. A warp has a token, its matrix in shared memory; a lane sums a row or a
 * column. The backward runs the forward again and keeps the matrix after each normalisation with its
 * factors: Y = X / (sum X + eps) has dX = (dY - sum dY Y) / (sum X + eps). Limit: the chain of dependent
 * steps.
 */
#include "hyper/params.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, SQUARE = COPIES_MOST * COPIES_MOST };

/* What a warp keeps of its token. */
struct token_weights {
    float mean[WEIGHTS_MOST], weight[WEIGHTS_MOST], soft[SQUARE], factor[COPIES_MOST], d[WEIGHTS_MOST], root;
};

/* A block's shared memory; the warps' traces stand behind it where the backward runs. */
struct weights_shared {
    token_weights of[WARPS];

    static size_t bytes(const hyper_params &p, bool traces)
    {
        const size_t n = (size_t)p.copies, kept = traces ? 2 * (size_t)p.iterations * n * (n + 1) : 0;
        return sizeof(weights_shared) + WARPS * kept * sizeof(float);
    }
};

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* Rows, or columns, over their sums + eps. */
__device__ __forceinline__ void normalise(const hyper_params &p, token_weights &w, float *c, bool rows)
{
    const int n = p.copies, lane = threadIdx.x % 32, along = rows ? 1 : n, across = rows ? n : 1;
    if (lane < n) {
        float sum = 0.0f;
        for (int i = 0; i < n; i++) sum += c[lane * across + i * along];
        w.factor[lane] = 1.0f / (sum + p.eps);
    }
    __syncwarp();
    for (int e = lane; e < n * n; e += 32) c[e] *= w.factor[rows ? e / n : e % n];
    __syncwarp();
}

/* The softmax of each row, plus eps. */
__device__ __forceinline__ void soften(const hyper_params &p, token_weights &w, float *c)
{
    const int n = p.copies, i = threadIdx.x % 32;
    if (i < n) {
        float most = c[i * n], sum = 0.0f;
        for (int k = 1; k < n; k++) most = fmaxf(most, c[i * n + k]);
        for (int k = 0; k < n; k++) sum += expf(c[i * n + k] - most);
        for (int k = 0; k < n; k++) {
            w.soft[i * n + k] = expf(c[i * n + k] - most) / sum;
            c[i * n + k] = w.soft[i * n + k] + p.eps;
        }
    }
    __syncwarp();
}

/* Fills in w; `trace`: [2 iterations - 1][n n + n], or NULL. */
__device__ __forceinline__ void weigh(const hyper_params &p, token_weights &w, int64_t token, float *trace)
{
    const int lane = threadIdx.x % 32, n = p.copies, slices = n * p.slices, columns = p.weights + 1;
    float square = 0.0f;
    for (int s = 0; s < slices; s++) square += p.sums[(s * p.tokens + token) * columns + p.weights];
    const float root = 1.0f / sqrtf(square / ((float)n * (float)p.width) + p.rms_eps);
    if (lane == 0) w.root = root;
    for (int j = lane; j < p.weights; j += 32) {
        float sum = 0.0f;
        for (int s = 0; s < slices; s++) sum += p.sums[(s * p.tokens + token) * columns + j];
        w.mean[j] = sum * root;
        const float logit = fmaf(w.mean[j], p.scale[part_of(n, j)], p.base[j]);
        w.weight[j] = j < n ? sigmoid(logit) + p.eps : j < 2 * n ? 2.0f * sigmoid(logit) : logit;
    }
    __syncwarp();
    if (p.head) return;
    float *const c = w.weight + 2 * n;
    soften(p, w, c);
    for (int step = 0; step < 2 * p.iterations - 1; step++) {
        normalise(p, w, c, step % 2 == 1);
        if (trace == NULL) continue;
        float *const kept = trace + step * n * (n + 1);
        for (int e = lane; e < n * n; e += 32) kept[e] = c[e];
        if (lane < n) kept[n * n + lane] = w.factor[lane];
        __syncwarp();
    }
}

/* n floats of a token, or n x n. */
__device__ __forceinline__ void give(const hyper_params &p, const token_rows &to, int64_t token,
                                     const float *from, bool square)
{
    const int n = p.copies;
    if (to.p == NULL) return;
    float *const row = (float *)to.p + token * to.token;
    for (int e = threadIdx.x % 32; e < (square ? n * n : n); e += 32)
        row[square ? e / n * to.copy + e % n : e] = from[e];
}

__global__ void __launch_bounds__(THREADS) hyper_weigh(const __grid_constant__ hyper_params p)
{
    extern __shared__ __align__(16) char memory[];
    const int lane = threadIdx.x % 32, n = p.copies;
    token_weights &w = ((weights_shared *)memory)->of[threadIdx.x / 32];
    const int64_t token = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= p.tokens) return;
    weigh(p, w, token, NULL);
    for (int j = lane; j < p.weights; j += 32) p.of_tokens[token * p.weights + j] = w.weight[j];
    give(p, p.pre, token, w.weight, false);
    if (p.head) return;
    give(p, p.post, token, w.weight + n, false);
    give(p, p.comb, token, w.weight + 2 * n, true);
}

/* ---- backward ---- */

__device__ __forceinline__ void normalise_backward(float *d, const float *kept, int n, bool rows)
{
    const int lane = threadIdx.x % 32, along = rows ? 1 : n, across = rows ? n : 1;
    if (lane < n) {
        float sum = 0.0f;
        for (int i = 0; i < n; i++) {
            const int at = lane * across + i * along;
            sum = fmaf(d[at], kept[at], sum);
        }
        for (int i = 0; i < n; i++) {
            const int at = lane * across + i * along;
            d[at] = (d[at] - sum) * kept[n * n + lane];
        }
    }
    __syncwarp();
}

/* w.d becomes the gradient of the logits. */
__device__ __forceinline__ void weigh_backward(const hyper_params &p, token_weights &w, const float *trace)
{
    const int lane = threadIdx.x % 32, n = p.copies;
    for (int j = lane; j < (p.head ? n : 2 * n); j += 32) {
        const float s = j < n ? w.weight[j] - p.eps : 0.5f * w.weight[j];
        w.d[j] *= (j < n ? 1.0f : 2.0f) * s * (1.0f - s);
    }
    __syncwarp();
    if (p.head) return;
    float *const c = w.d + 2 * n;
    for (int step = 2 * p.iterations - 2; step >= 0; step--)
        normalise_backward(c, trace + step * n * (n + 1), n, step % 2 == 1);
    if (lane < n) {
        float sum = 0.0f;
        for (int k = 0; k < n; k++) sum = fmaf(c[lane * n + k], w.soft[lane * n + k], sum);
        for (int k = 0; k < n; k++) c[lane * n + k] = w.soft[lane * n + k] * (c[lane * n + k] - sum);
    }
    __syncwarp();
}

/* Adds what the caller has of the weights' gradients. */
__device__ __forceinline__ float given(const hyper_params &p, int64_t token, int j)
{
    const int n = p.copies;
    const token_rows &r = j < n ? p.d_pre : j < 2 * n ? p.d_post : p.d_comb;
    if (r.p == NULL) return 0.0f;
    const float *const row = (const float *)r.p + token * r.token;
    return j < n ? row[j] : j < 2 * n ? row[j - n] : row[(j - 2 * n) / n * r.copy + (j - 2 * n) % n];
}

/* A warp has every grid's tokens-th token, and sums of theirs. */
__global__ void __launch_bounds__(THREADS) hyper_weigh_backward(const __grid_constant__ hyper_params p)
{
    extern __shared__ __align__(16) char memory[];
    enum { EACH = (WEIGHTS_MOST + 31) / 32 };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = p.copies;
    weights_shared &m = *(weights_shared *)memory;
    token_weights &w = m.of[warp];
    float *const trace = (float *)(&m + 1) + (int64_t)warp * 2 * p.iterations * n * (n + 1);
    const int64_t run = (int64_t)blockIdx.x * WARPS + warp, runs = (int64_t)gridDim.x * WARPS;
    double d_base[EACH] = {}, d_mean[EACH] = {};
    for (int64_t token = run; token < p.tokens; token += runs) {
        weigh(p, w, token, trace);
        for (int j = lane; j < p.weights; j += 32) {
            const bool handed = j < n && p.pre_in.p != NULL;
            w.d[j] = (handed ? 0.0f : p.d_of_tokens[token * p.weights + j]) + given(p, token, j);
        }
        __syncwarp();
        weigh_backward(p, w, trace);
        float along = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int j = lane + e * 32;
            if (j >= p.weights) continue;
            const float d = w.d[j] * p.scale[part_of(n, j)];
            d_base[e] += (double)w.d[j];
            d_mean[e] += (double)(w.d[j] * w.mean[j]);
            along = fmaf(d, w.mean[j], along);
            p.d_sums[token * (p.weights + 1) + j] = d * w.root;
        }
#pragma unroll
        for (int by = 16; by > 0; by /= 2) along += __shfl_xor_sync(~0u, along, by);
        if (lane == 0)
            p.d_sums[token * (p.weights + 1) + p.weights] =
                -along * w.root * w.root / ((float)n * (float)p.width);
        __syncwarp();
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int j = lane + e * 32;
        if (j >= p.weights) continue;
        p.d_small[run * 2 * p.weights + j] = d_base[e];
        p.d_small[(run * 2 + 1) * p.weights + j] = d_mean[e];
    }
}

quern_status hyper_weights(const hyper_params &p, cudaStream_t stream)
{
    return launch_shared({stream, NULL}, hyper_weigh, dim3(blocks_for(p.tokens, WARPS)), THREADS,
                         weights_shared::bytes(p, false), "hyper, weights", p);
}

quern_status hyper_weights_backward(const hyper_params &p, int64_t runs, cudaStream_t stream)
{
    return launch_shared({stream, NULL}, hyper_weigh_backward, dim3((unsigned)(runs / WARPS)), THREADS,
                         weights_shared::bytes(p, true), "hyper, gradients of weights", p);
}
