/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * launch.cu - hyper-connections of a few tokens of four copies in bf16, forward.
 *
 *   sums   a block has 256 channels of a copy for eight tokens: each warp three rows of fn, of which a lane
 *          keeps eight channels in registers and multiplies them by each token's. On the f32 cores.
 *   apply  a block has a token. It starts to load the copies, adds the slices' sums in a fixed order, and
 *          normalises the matrix of 4 x 4, an element a lane, whose rows and columns are summed over lanes;
 *          then it computes the input and the new copies from the loaded ones.
 *
 * A decoding step is bound by latency: sums as tiles of tensor cores, one block a slice of 2048 channels,
 * take 30 to 48 us on an H200, a token's matrix in shared memory 18. Limit: two launches, and three trips to
 * memory.
 */
#include "hyper/params.cuh"
#include "variants.cuh"

enum {
    COPIES = 4,
    TOKENS_MOST = 511,
    CHANNELS = 256,
    SUM_THREADS = 256,
    SUM_WARPS = SUM_THREADS / 32,
    EACH = COPIES * (COPIES + 2) / SUM_WARPS,
    GROUP = 8,
    THREADS = 512,
    WARPS = THREADS / 32,
    TURNS = 2,
    WIDTH_MOST = TURNS * THREADS * CHUNK
};

struct few_params : hyper_call {
    bool head;
    int32_t weights, slices; /* J; of all copies */
    float *sums;             /* [slices][tokens][J + 1] */
};

__device__ __forceinline__ void widen(const uint4 &x, float (&to)[CHUNK])
{
    const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 both = unpack2<bf16>(words[i]);
        to[2 * i] = both.x;
        to[2 * i + 1] = both.y;
    }
}

__device__ __forceinline__ uint4 narrow(const float (&x)[CHUNK])
{
    return make_uint4(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]), pack2<bf16>(x[4], x[5]),
                      pack2<bf16>(x[6], x[7]));
}

__device__ __forceinline__ float sum_of_lanes(float x)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

__global__ void __launch_bounds__(SUM_THREADS) hyper_few_sums(const __grid_constant__ few_params p)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x, each = p.width / CHANNELS,
              copy = slice / each, channel = slice % each * CHANNELS + lane * CHUNK;
    const int64_t first = (int64_t)blockIdx.y * GROUP, end = min(first + GROUP, p.tokens);
    float fn[EACH][CHUNK] = {};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int j = warp + e * SUM_WARPS;
        if (j >= p.weights) continue;
        const float4 *from = (const float4 *)(p.fn + j * p.fn_row + (int64_t)copy * p.width + channel);
        const float4 low = __ldg(from), high = __ldg(from + 1);
        fn[e][0] = low.x, fn[e][1] = low.y, fn[e][2] = low.z, fn[e][3] = low.w;
        fn[e][4] = high.x, fn[e][5] = high.y, fn[e][6] = high.z, fn[e][7] = high.w;
    }
    for (int64_t token = first; token < end; token++) {
        float x[CHUNK], sum[EACH] = {}, square = 0.0f;
        widen(*(const uint4 *)((const bf16 *)p.x.p + token * p.x.token + copy * p.x.copy + channel), x);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            square = fmaf(x[i], x[i], square);
#pragma unroll
            for (int e = 0; e < EACH; e++) sum[e] = fmaf(x[i], fn[e][i], sum[e]);
        }
        float *const to = p.sums + (slice * p.tokens + token) * (p.weights + 1);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            sum[e] = sum_of_lanes(sum[e]);
            if (lane == 0 && warp + e * SUM_WARPS < p.weights) to[warp + e * SUM_WARPS] = sum[e];
        }
        if (warp != 0) continue;
        square = sum_of_lanes(square);
        if (lane == 0) to[p.weights] = square;
    }
}

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* Sums over lanes i, i ^ by, i ^ 2 by and i ^ 3 by. */
__device__ __forceinline__ float of_four(float x, int by)
{
    x += __shfl_xor_sync(~0u, x, by);
    return x + __shfl_xor_sync(~0u, x, 2 * by);
}

/* A warp computes the token's weights, pre, post and comb, from its sums, one a lane. */
__device__ __forceinline__ void weigh(const few_params &p, int64_t token, float sum, float *weight)
{
    const int lane = threadIdx.x % 32, j = min(lane, p.weights - 1);
    const float square = __shfl_sync(~0u, sum, p.weights),
                root = 1.0f / sqrtf(square / ((float)COPIES * (float)p.width) + p.rms_eps),
                logit = fmaf(sum * root, p.scale[part_of(COPIES, j)], p.base[j]);
    const float is = lane < COPIES ? sigmoid(logit) + p.eps : 2.0f * sigmoid(logit);
    if (lane < min(p.weights, 2 * COPIES)) weight[lane] = is;
    if (p.head) return;
    float c = __shfl_sync(~0u, logit, 2 * COPIES + lane % (COPIES * COPIES)), most = c;
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    c = expf(c - most);
    c = c / of_four(c, 1) + p.eps;
    c *= __fdividef(1.0f, of_four(c, COPIES) + p.eps);
    for (int step = 1; step < p.iterations; step++) {
        c *= __fdividef(1.0f, of_four(c, 1) + p.eps);
        c *= __fdividef(1.0f, of_four(c, COPIES) + p.eps);
    }
    if (lane < COPIES * COPIES) weight[2 * COPIES + lane] = c;
    if (p.post.p != NULL && lane >= COPIES && lane < 2 * COPIES)
        ((float *)p.post.p)[token * p.post.token + lane - COPIES] = is;
    if (p.comb.p != NULL && lane < COPIES * COPIES)
        ((float *)p.comb.p)[token * p.comb.token + lane / COPIES * p.comb.copy + lane % COPIES] = c;
}

__device__ __forceinline__ uint4 *row_of(const token_rows &r, int64_t token, int copy, int channel)
{
    return (uint4 *)((bf16 *)r.p + token * r.token + copy * r.copy + channel);
}

__global__ void __launch_bounds__(THREADS) hyper_few_apply(const __grid_constant__ few_params p)
{
    __shared__ float parts[WARPS][32], weight[COPIES * (COPIES + 2)];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = p.weights + 1;
    const int64_t token = blockIdx.x;
    uint4 x[TURNS][COPIES], f[TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int channel = (t * THREADS + (int)threadIdx.x) * CHUNK;
        if (channel >= p.width) continue;
#pragma unroll
        for (int i = 0; i < COPIES; i++) x[t][i] = *row_of(p.x, token, i, channel);
        if (p.f.p != NULL) f[t] = *row_of(p.f, token, 0, channel);
    }
    float sum = 0.0f;
    for (int s = warp; s < p.slices && lane < columns; s += WARPS)
        sum += p.sums[(s * p.tokens + token) * columns + lane];
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
        sum = 0.0f;
        for (int i = 0; i < WARPS; i++) sum += parts[i][lane];
        weigh(p, token, sum, weight);
    }
    __syncthreads();
    float h[TURNS][CHUNK], square = 0.0f;
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int channel = (t * THREADS + (int)threadIdx.x) * CHUNK;
        if (channel >= p.width) continue;
        float of[COPIES][CHUNK], made[CHUNK];
#pragma unroll
        for (int i = 0; i < COPIES; i++) widen(x[t][i], of[i]);
#pragma unroll
        for (int c = 0; c < CHUNK; c++) {
            h[t][c] = 0.0f;
#pragma unroll
            for (int i = 0; i < COPIES; i++) h[t][c] = fmaf(weight[i], of[i][c], h[t][c]);
            square = fmaf(h[t][c], h[t][c], square);
        }
        if (p.f.p == NULL) continue;
        float given[CHUNK];
        widen(f[t], given);
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
#pragma unroll
            for (int c = 0; c < CHUNK; c++) {
                made[c] = weight[COPIES + k] * given[c];
#pragma unroll
                for (int i = 0; i < COPIES; i++)
                    made[c] = fmaf(weight[2 * COPIES + i * COPIES + k], of[i][c], made[c]);
            }
            *row_of(p.out, token, k, channel) = narrow(made);
        }
    }
    square = sum_of_lanes(square);
    if (lane == 0) parts[warp][0] = square;
    __syncthreads();
    square = 0.0f;
    for (int i = 0; i < WARPS; i++) square += parts[i][0];
    const float root = 1.0f / sqrtf(square / (float)p.width + p.rms_eps);
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int channel = (t * THREADS + (int)threadIdx.x) * CHUNK;
        if (channel >= p.width) continue;
#pragma unroll
        for (int c = 0; c < CHUNK; c++) h[t][c] *= root * p.norm.at(channel + c);
        *row_of(p.h, token, 0, channel) = narrow(h[t]);
    }
}

static bool supports(const stage_exec *, const hyper_args *args, char *)
{
    const quern_tensor *rows[] = {&args->x, &args->f, &args->h, &args->out, &args->fn};
    bool wide = true;
    for (const quern_tensor *t : rows) wide = wide && (!present(*t) || rows_aligned16(*t));
    return wide && args->x.dtype == QUERN_BF16 && args->x.shape[1] == COPIES && present(args->fn) &&
           !present(args->pre_in) && args->x.shape[0] <= TOKENS_MOST && args->x.shape[2] % CHANNELS == 0 &&
           args->x.shape[2] <= WIDTH_MOST;
}

static few_params params_of(const hyper_args *args)
{
    few_params p = {};
    static_cast<hyper_call &>(p) = hyper_call_of(args);
    p.head = args->head;
    p.weights = args->head ? COPIES : COPIES * (COPIES + 2);
    p.slices = COPIES * (p.width / CHANNELS);
    return p;
}

static size_t workspace(const stage_exec *, const hyper_args *args)
{
    const few_params p = params_of(args);
    if (args->x.shape[1] != COPIES || p.tokens > TOKENS_MOST) return 0;
    return room_for((size_t)(p.slices * p.tokens * (p.weights + 1)) * sizeof(float));
}

static quern_status run(const stage_exec *exec, const hyper_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    few_params p = params_of(args);
    if (p.tokens == 0) return QUERN_OK;
    p.sums = (float *)arena_on(memory).base;
    hyper_few_sums<<<dim3((unsigned)p.slices, (unsigned)((p.tokens + GROUP - 1) / GROUP)), SUM_THREADS, 0,
                     stream>>>(p);
    const quern_status status = LAUNCHED("hyper, sums of few tokens");
    if (status != QUERN_OK) return status;
    hyper_few_apply<<<(unsigned)p.tokens, THREADS, 0, stream>>>(p);
    return LAUNCHED("hyper, few tokens");
}

extern const variant<hyper_args> hyper_forward_few = {"hyper_forward_few", supports, workspace, run};
