/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dots.cu - the sums over the channels of a token's copies: products with the rows of fn, and squares.
 *
 * bf16, up to 24 weights: on the tensor cores, fn as the sum of two bf16, which keeps 16 of its bits. A warp
 * has 32 tokens, which are rows of A. A lane reads 8 channels of a row at once; as the order of a sum is
 * free, they count as the lane's places in two steps of 16, and fn stands in the same order, so no operand
 * goes through shared memory. Limit: x read once.
 *
 * Else: 32 tokens a block on the f32 cores, 32 channels of both at a time in shared memory.
 */
#include "hyper/params.cuh"

enum { TOKENS = 128, THREADS = TOKENS, DEPTH = 32, HALVES = 2, TILES = 3 /* of eight weights */, AHEAD = 4 };

/* fn's row j, channels 32 i + 8 (lane % 4) ... of all copies: eight bf16 of the number, or of the rest. */
__global__ void __launch_bounds__(256) pack_fn(const __grid_constant__ hyper_params p)
{
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x,
                  all = (int64_t)p.copies * p.width / DEPTH * HALVES * TILES * 32;
    const int lane = (int)(i % 32), tile = (int)(i / 32 % (HALVES * TILES)), j = tile % TILES * 8 + lane / 4;
    if (i >= all) return;
    const float *from = p.fn + j * p.fn_row + i / (32 * HALVES * TILES) * DEPTH + lane % 4 * 8;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        float x[2];
        for (int e = 0; e < 2; e++) {
            x[e] = j < p.weights ? from[w * 2 + e] : 0.0f;
            if (tile >= TILES) x[e] -= to_float(from_float<bf16>(x[e]));
        }
        words[w] = pack2<bf16>(x[0], x[1]);
    }
    p.packed[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float squares_of(const uint4 &x, float sum)
{
    const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 both = unpack2<bf16>(words[i]);
        sum = fmaf(both.x, both.x, sum);
        sum = fmaf(both.y, both.y, sum);
    }
    return sum;
}

/* 32 channels of 32 rows: rows g + 8 r in x[r]. */
__device__ __forceinline__ void multiply(float (&sum)[2][TILES][4], float (&square)[4], const uint4 (&x)[4],
                                         const uint4 *fn)
{
    uint4 b[HALVES * TILES];
#pragma unroll
    for (int t = 0; t < HALVES * TILES; t++) b[t] = __ldg(fn + t * 32);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint4 &low = x[2 * m], &high = x[2 * m + 1];
        const uint32_t first[] = {low.x, high.x, low.y, high.y}, second[] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int t = 0; t < HALVES * TILES; t++) {
            mma16816<bf16>(sum[m][t % TILES], first, b[t].x, b[t].y);
            mma16816<bf16>(sum[m][t % TILES], second, b[t].z, b[t].w);
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) square[r] = squares_of(x[r], square[r]);
}

__device__ __forceinline__ void store_sums(const hyper_params &p, int slice, int64_t token0,
                                           const float (&sum)[2][TILES][4], float (&square)[4])
{
    const int lane = threadIdx.x % 32, columns = p.weights + 1;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int64_t token = token0 + r * 8 + lane / 4;
        square[r] += __shfl_xor_sync(~0u, square[r], 1);
        square[r] += __shfl_xor_sync(~0u, square[r], 2);
        if (token >= p.tokens) continue;
        float *const to = p.sums + (slice * p.tokens + token) * columns;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int j = t * 8 + lane % 4 * 2 + e;
                if (j < p.weights) to[j] = sum[r / 2][t][r % 2 * 2 + e];
            }
        if (lane % 4 == 0) to[p.weights] = square[r];
    }
}

__global__ void __launch_bounds__(THREADS) hyper_dots_mma(const __grid_constant__ hyper_params p)
{
    const int lane = threadIdx.x % 32, slice = blockIdx.x % (p.copies * p.slices), copy = slice / p.slices,
              channel0 = slice % p.slices * SLICE, end = min(p.width, channel0 + SLICE);
    const int64_t token0 = (int64_t)(blockIdx.x / (p.copies * p.slices)) * TOKENS + threadIdx.x / 32 * 32;
    const bf16 *rows[4];
    float sum[2][TILES][4] = {}, square[4] = {};
    if (token0 >= p.tokens) return;
#pragma unroll
    for (int r = 0; r < 4; r++)
        rows[r] = (const bf16 *)p.x.p + min(token0 + r * 8 + lane / 4, p.tokens - 1) * p.x.token +
                  copy * p.x.copy + lane % 4 * 8;
    const uint4 *fn = p.packed + ((int64_t)copy * p.width + channel0) / DEPTH * (HALVES * TILES * 32) + lane;
    uint4 x[AHEAD][4];
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (channel0 + a * DEPTH < end) x[a][r] = load_once(rows[r] + channel0 + a * DEPTH);
    for (int channel = channel0; channel < end; channel += AHEAD * DEPTH)
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int here = channel + a * DEPTH, next = here + AHEAD * DEPTH;
            if (here >= end) break;
            multiply(sum, square, x[a], fn);
            fn += HALVES * TILES * 32;
#pragma unroll
            for (int r = 0; r < 4; r++)
                if (next < end) x[a][r] = load_once(rows[r] + next);
        }
    store_sums(p, slice, token0, sum, square);
}

enum { ANY_TOKENS = 32, ANY_THREADS = 256, ANY_EACH = WEIGHTS_MOST / 8 };

__global__ void __launch_bounds__(ANY_THREADS) hyper_dots_any(const __grid_constant__ hyper_params p)
{
    __shared__ float x[DEPTH][ANY_TOKENS + 1], fn[DEPTH][WEIGHTS_MOST + 1];
    const int token = threadIdx.x % ANY_TOKENS, group = threadIdx.x / ANY_TOKENS,
              slice = blockIdx.x % (p.copies * p.slices), copy = slice / p.slices,
              channel0 = slice % p.slices * SLICE, end = min(p.width, channel0 + SLICE);
    const int64_t token0 = (int64_t)(blockIdx.x / (p.copies * p.slices)) * ANY_TOKENS;
    float sum[ANY_EACH] = {}, square = 0.0f;
    for (int channel = channel0; channel < end; channel += DEPTH) {
        for (int i = threadIdx.x; i < DEPTH * ANY_TOKENS; i += ANY_THREADS) {
            const int c = i % DEPTH, t = i / DEPTH;
            x[c][t] = token0 + t < p.tokens && channel + c < end
                          ? value_at(p.x.p, p.dtype, (token0 + t) * p.x.token + copy * p.x.copy + channel + c)
                          : 0.0f;
        }
        for (int i = threadIdx.x; i < DEPTH * p.weights; i += ANY_THREADS) {
            const int c = i % DEPTH, j = i / DEPTH;
            fn[c][j] = channel + c < end ? p.fn[j * p.fn_row + (int64_t)copy * p.width + channel + c] : 0.0f;
        }
        __syncthreads();
        for (int c = 0; c < DEPTH; c++) {
            const float here = x[c][token];
            square = fmaf(here, here, square);
#pragma unroll
            for (int e = 0; e < ANY_EACH; e++)
                if (group + e * 8 < p.weights) sum[e] = fmaf(here, fn[c][group + e * 8], sum[e]);
        }
        __syncthreads();
    }
    if (token0 + token >= p.tokens) return;
    float *const to = p.sums + (slice * p.tokens + token0 + token) * (p.weights + 1);
#pragma unroll
    for (int e = 0; e < ANY_EACH; e++)
        if (group + e * 8 < p.weights) to[group + e * 8] = sum[e];
    if (group == 0) to[p.weights] = square;
}

quern_status hyper_dots(const hyper_params &p, cudaStream_t stream)
{
    const int64_t width = p.packed != NULL ? (int64_t)TOKENS : (int64_t)ANY_TOKENS,
                  blocks = (p.tokens + width - 1) / width * p.copies * p.slices;
    if (p.packed == NULL) {
        hyper_dots_any<<<(unsigned)blocks, ANY_THREADS, 0, stream>>>(p);
        return LAUNCHED("hyper, sums");
    }
    pack_fn<<<blocks_for((int64_t)p.copies * p.width / DEPTH * HALVES * TILES * 32, 256), 256, 0, stream>>>(
        p);
    const quern_status status = LAUNCHED("hyper, fn in two parts");
    if (status != QUERN_OK) return status;
    hyper_dots_mma<<<(unsigned)blocks, THREADS, 0, stream>>>(p);
    return LAUNCHED("hyper, sums");
}
