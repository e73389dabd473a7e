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
 * take 30 to 48 us on an H200, a token's matrix in shared memory 18. So each kernel starts before the one in
 * front has ended, and loads what that one does not write. Limit: two trips to memory.
 */
#include "common/launch.cuh"
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
    AT_ONCE = 4, /* tokens of a group, or slices, that are loaded before they are used */
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

/* Sums of N numbers a lane over all lanes, half of the numbers fewer with each step. The result is that of
 * number lane * N / 32, in the order of sum_of_lanes(). */
template <int N> __device__ __forceinline__ float sums_of_lanes(float (&x)[N])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = N / 2, by = 16; half > 0; half /= 2, by /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) {
            const bool late = (lane & by) != 0;
            x[i] = (late ? x[i + half] : x[i]) + __shfl_xor_sync(~0u, late ? x[i] : x[i + half], by);
        }
#pragma unroll
    for (int by = 16 / N; by > 0; by /= 2) x[0] += __shfl_xor_sync(~0u, x[0], by);
    return x[0];
}

/* A warp's products with a token's channels, and the channels' square. */
__device__ __forceinline__ void multiply(float *to, const float (&fn)[EACH][CHUNK], const uint4 &given)
{
    float x[CHUNK];
    widen(given, x);
#pragma unroll
    for (int e = 0; e <= EACH; e++) to[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        to[EACH] = fmaf(x[i], x[i], to[EACH]);
#pragma unroll
        for (int e = 0; e < EACH; e++) to[e] = fmaf(x[i], fn[e][i], to[e]);
    }
}

/* Starts before the kernel in front has ended, as fn are weights, and lets the next start once that has: what
 * that one reads but the sums is there. */
__global__ void __launch_bounds__(SUM_THREADS, 3) hyper_few_sums(const __grid_constant__ few_params p)
{
    enum { SUMS = AT_ONCE * (EACH + 1) };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x, each = p.width / CHANNELS,
              copy = slice / each, channel = slice % each * CHANNELS + lane * CHUNK;
    const int64_t first = (int64_t)blockIdx.y * GROUP, end = min(first + GROUP, p.tokens);
    const bf16 *const x = (const bf16 *)p.x.p + copy * p.x.copy + channel;
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
    wait_for_before();
    let_next_start();
    for (int64_t some = first; some < end; some += AT_ONCE) {
        uint4 rows[AT_ONCE];
        float sum[SUMS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) rows[i] = *(const uint4 *)(x + min(some + i, end - 1) * p.x.token);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) multiply(sum + i * (EACH + 1), fn, rows[i]);
        const float own = sums_of_lanes(sum);
        const int at = lane * SUMS / 32, e = at % (EACH + 1), j = e < EACH ? warp + e * SUM_WARPS : p.weights;
        const int64_t token = some + at / (EACH + 1);
        const bool here = e < EACH ? j < p.weights : warp == 0;
        if (here && token < end && lane * SUMS % 32 == 0)
            p.sums[(slice * p.tokens + token) * (p.weights + 1) + j] = own;
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

/* A warp computes the token's weights pre and post from its sums, one a lane; its logit. */
__device__ __forceinline__ float weigh(const few_params &p, int64_t token, float sum, float scale, float base,
                                       float *weight)
{
    const int lane = threadIdx.x % 32;
    const float square = __shfl_sync(~0u, sum, p.weights),
                root = 1.0f / sqrtf(square / ((float)COPIES * (float)p.width) + p.rms_eps),
                logit = fmaf(sum * root, scale, base);
    const float is = lane < COPIES ? sigmoid(logit) + p.eps : 2.0f * sigmoid(logit);
    if (lane < min(p.weights, 2 * COPIES)) weight[lane] = is;
    if (p.post.p != NULL && lane >= COPIES && lane < 2 * COPIES)
        ((float *)p.post.p)[token * p.post.token + lane - COPIES] = is;
    return logit;
}

/* A warp computes the token's comb. */
__device__ __forceinline__ void normalise(const few_params &p, int64_t token, float logit, float *weight)
{
    const int lane = threadIdx.x % 32;
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
    if (p.comb.p != NULL && lane < COPIES * COPIES)
        ((float *)p.comb.p)[token * p.comb.token + lane / COPIES * p.comb.copy + lane % COPIES] = c;
}

__device__ __forceinline__ uint4 *row_of(const token_rows &r, int64_t token, int copy, int channel)
{
    return (uint4 *)((bf16 *)r.p + token * r.token + copy * r.copy + channel);
}

/* Eight of the norm's weights as they stand; they are widened once they are used, so that nothing waits for
 * them before. */
struct norm_chunk {
    uint4 low, high; /* high: of f32 */

    __device__ __forceinline__ void load(const any_floats &norm, int channel)
    {
        const bool f32 = norm.dtype == QUERN_F32;
        const uint4 *const from = (const uint4 *)((const char *)norm.p + channel * (f32 ? 4 : 2));
        low = __ldg(from);
        if (f32) high = __ldg(from + 1);
    }
    __device__ __forceinline__ void widened(const any_floats &norm, float (&to)[CHUNK]) const
    {
        if (norm.dtype != QUERN_F32) {
            widen(low, to);
            return;
        }
        const uint32_t words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < CHUNK; i++) to[i] = __uint_as_float(words[i]);
    }
};

/* The first 8 channels of a thread's turn. */
__device__ __forceinline__ int channel_of(int turn)
{
    return (turn * THREADS + (int)threadIdx.x) * CHUNK;
}

/* A thread's channels of the input before it is normalised; the sum of their squares. */
__device__ __forceinline__ float mix(const few_params &p, const uint4 (&x)[TURNS][COPIES],
                                     const float *weight, float (&h)[TURNS][CHUNK])
{
    float square = 0.0f;
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        if (channel_of(t) >= p.width) continue;
        float of[COPIES][CHUNK];
#pragma unroll
        for (int i = 0; i < COPIES; i++) widen(x[t][i], of[i]);
#pragma unroll
        for (int c = 0; c < CHUNK; c++) {
            h[t][c] = 0.0f;
#pragma unroll
            for (int i = 0; i < COPIES; i++) h[t][c] = fmaf(weight[i], of[i][c], h[t][c]);
            square = fmaf(h[t][c], h[t][c], square);
        }
    }
    return square;
}

/* A thread's channels of the new copies. */
__device__ __forceinline__ void make_copies(const few_params &p, int64_t token,
                                            const uint4 (&x)[TURNS][COPIES], const uint4 (&f)[TURNS],
                                            const float *weight)
{
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        if (channel_of(t) >= p.width) continue;
        float of[COPIES][CHUNK], given[CHUNK], made[CHUNK];
#pragma unroll
        for (int i = 0; i < COPIES; i++) widen(x[t][i], of[i]);
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
            *row_of(p.out, token, k, channel_of(t)) = narrow(made);
        }
    }
}

/* Loads all but the sums while they are made. The first warp normalises comb while the others mix. */
__global__ void __launch_bounds__(THREADS) hyper_few_apply(const __grid_constant__ few_params p)
{
    __shared__ float parts[WARPS][32], weight[COPIES * (COPIES + 2)];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = p.weights + 1,
              j = min(lane, p.weights - 1);
    const int64_t token = blockIdx.x;
    const float scale = p.scale[part_of(COPIES, j)], base = p.base[j];
    uint4 x[TURNS][COPIES], f[TURNS];
    norm_chunk norm[TURNS] = {};
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int channel = channel_of(t);
        if (channel >= p.width) continue;
#pragma unroll
        for (int i = 0; i < COPIES; i++) x[t][i] = *row_of(p.x, token, i, channel);
        norm[t].load(p.norm, channel);
        if (p.f.p != NULL) f[t] = *row_of(p.f, token, 0, channel);
    }
    wait_for_before();
    let_next_start();
    float sum = 0.0f;
    const float *const sums = p.sums + token * columns + min(lane, columns - 1);
    for (int first = warp; first < p.slices; first += AT_ONCE * WARPS) {
        float of[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            of[i] = sums[min(first + i * WARPS, p.slices - 1) * p.tokens * columns];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) sum += first + i * WARPS < p.slices ? of[i] : 0.0f;
    }
    parts[warp][lane] = sum;
    __syncthreads();
    float logit = 0.0f, h[TURNS][CHUNK];
    if (warp == 0) {
        sum = 0.0f;
        for (int i = 0; i < WARPS; i++) sum += parts[i][lane];
        logit = weigh(p, token, sum, scale, base, weight);
    }
    __syncthreads();
    if (warp == 0 && (p.f.p != NULL || p.comb.p != NULL)) normalise(p, token, logit, weight);
    float square = sum_of_lanes(mix(p, x, weight, h));
    if (lane == 0) parts[warp][0] = square;
    __syncthreads();
    square = 0.0f;
    for (int i = 0; i < WARPS; i++) square += parts[i][0];
    const float root = 1.0f / sqrtf(square / (float)p.width + p.rms_eps);
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int channel = channel_of(t);
        if (channel >= p.width) continue;
        float weights[CHUNK];
        norm[t].widened(p.norm, weights);
#pragma unroll
        for (int c = 0; c < CHUNK; c++) h[t][c] *= root * weights[c];
        *row_of(p.h, token, 0, channel) = narrow(h[t]);
    }
    if (p.f.p != NULL) make_copies(p, token, x, f, weight);
}

static bool supports(const stage_exec *, const hyper_args *args, char *)
{
    const quern_tensor *rows[] = {&args->x, &args->f, &args->h, &args->out, &args->fn};
    bool wide = (uintptr_t)args->weight.data % 16 == 0;
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
    const quern_status status = launch_behind(
        stream, hyper_few_sums, dim3((unsigned)p.slices, (unsigned)((p.tokens + GROUP - 1) / GROUP)),
        SUM_THREADS, 0, "hyper, sums of few tokens", p);
    if (status != QUERN_OK) return status;
    return launch_behind(stream, hyper_few_apply, dim3((unsigned)p.tokens), THREADS, 0, "hyper, few tokens",
                         p);
}

extern const variant<hyper_args> hyper_forward_few = {"hyper_forward_few", supports, workspace, run};
