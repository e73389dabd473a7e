/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - products with e4m3 weights on the f32 cores, of any dtype at any address.
 *
 *   K along rows of W    A warp has 4 rows of W and up to 8 rows of a. A lane reads 16 of each row's 512
 *                        codes at a time, sums their products, and adds that sum times the codes' scale. The
 *                        lanes' sums are added last. Each code is read once for 8 rows of a.
 *   K across rows of W   A lane has four columns of W, a warp every eighth group of four rows. The warps'
 *                        sums are added in order.
 *
 * No sum depends on how many rows a has. Limits: with few rows of a reads of W, with many f32 multiply-adds.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_ANY_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_ANY_KERNEL_CUH

#include "common/fold.cuh"
#include "e4m3_gemm/params.cuh"

enum {
    ALONG_THREADS = 128,
    ALONG_ROWS = 4, /* of W, a warp */
    ALONG_BLOCK = ALONG_THREADS / 32 * ALONG_ROWS,
    EACH_CODES = 16,
    STEP = 32 * EACH_CODES,
    ACROSS_THREADS = 256,
    ACROSS_WARPS = ACROSS_THREADS / 32,
    ACROSS_EACH = 4,
    ACROSS_BLOCK = 32 * ACROSS_EACH
};

/* Four elements of a, `count` of them there. */
__device__ __forceinline__ float4 four_of(const e4m3_params &p, int64_t at, int64_t count)
{
    if (p.wide && p.a_dtype == QUERN_F32) return __ldg((const float4 *)((const float *)p.a + at));
    if (p.wide) {
        const uint2 v = __ldg((const uint2 *)((const uint16_t *)p.a + at));
        const float2 low = p.a_dtype == QUERN_BF16 ? unpack2<bf16>(v.x) : unpack2<f16>(v.x),
                     high = p.a_dtype == QUERN_BF16 ? unpack2<bf16>(v.y) : unpack2<f16>(v.y);
        return make_float4(low.x, low.y, high.x, high.y);
    }
    return make_float4(count > 0 ? value_at(p.a, p.a_dtype, at) : 0.0f,
                       count > 1 ? value_at(p.a, p.a_dtype, at + 1) : 0.0f,
                       count > 2 ? value_at(p.a, p.a_dtype, at + 2) : 0.0f,
                       count > 3 ? value_at(p.a, p.a_dtype, at + 3) : 0.0f);
}

/* Up to four codes in a word, the others 0. */
__device__ __forceinline__ uint32_t codes_of(const uint8_t *from, int64_t count)
{
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) word |= (uint32_t)__ldg(from + i) << 8 * i;
    return word;
}

__device__ __forceinline__ uint4 sixteen_codes(const e4m3_params &p, const uint8_t *from, int64_t count)
{
    if (p.wide) return __ldg((const uint4 *)from);
    return make_uint4(codes_of(from, count), codes_of(from + 4, count - 4), codes_of(from + 8, count - 8),
                      codes_of(from + 12, count - 12));
}

__device__ __forceinline__ void put_sum(const e4m3_params &p, int64_t token, int64_t column, float x)
{
    if (p.bias.p != NULL) x += p.bias.at(column);
    put_at(p.c, p.c_dtype, token * p.c_row + column, x);
}

/* The sums of 16 codes of each of a warp's rows of W, for TOKENS rows of a. */
template <int TOKENS>
__device__ __forceinline__ void add_codes(float (&part)[TOKENS * ALONG_ROWS], const e4m3_params &p,
                                          const uint4 (&codes)[ALONG_ROWS], int64_t token, int64_t at,
                                          int64_t count)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 w[ALONG_ROWS][2];
#pragma unroll
        for (int r = 0; r < ALONG_ROWS; r++) {
            const uint32_t word = i == 0   ? codes[r].x
                                  : i == 1 ? codes[r].y
                                  : i == 2 ? codes[r].z
                                           : codes[r].w;
            w[r][0] = e4m3_floats(word, 0);
            w[r][1] = e4m3_floats(word, 1);
        }
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            const int64_t row = min(token + m, p.tokens - 1);
            const float4 x = four_of(p, row * p.a_row + at + 4 * i, count - 4 * i);
#pragma unroll
            for (int r = 0; r < ALONG_ROWS; r++) {
                float &sum = part[m * ALONG_ROWS + r];
                sum = fmaf(x.x, w[r][0].x, sum);
                sum = fmaf(x.y, w[r][0].y, sum);
                sum = fmaf(x.z, w[r][1].x, sum);
                sum = fmaf(x.w, w[r][1].y, sum);
            }
        }
    }
}

/* 16 codes of each of a warp's rows of W, from column k on. */
__device__ __forceinline__ void load_codes(uint4 (&codes)[ALONG_ROWS], const e4m3_params &p, int64_t first,
                                           int64_t column, int64_t k)
{
#pragma unroll
    for (int r = 0; r < ALONG_ROWS; r++)
        codes[r] =
            sixteen_codes(p, p.codes + (first + min(column + r, p.out - 1)) * p.code_row + k, p.in - k);
}

template <int TOKENS>
__global__ void __launch_bounds__(ALONG_THREADS) e4m3_gemm_along(const __grid_constant__ e4m3_params p)
{
    constexpr bool AHEAD = TOKENS <= 2; /* codes are read a step ahead: few rows have registers for it */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t panels = (p.out + ALONG_BLOCK - 1) / ALONG_BLOCK, tiles = (p.tokens + TOKENS - 1) / TOKENS;
    for (int64_t item = blockIdx.x; item < panels * p.groups * tiles; item += gridDim.x) {
        const int64_t tile = item / (panels * p.groups), panel = item - tile * panels * p.groups,
                      group = panel / panels,
                      column = (panel - group * panels) * ALONG_BLOCK + warp * ALONG_ROWS,
                      token = tile * TOKENS;
        float sum[TOKENS * ALONG_ROWS] = {};
        uint4 codes[ALONG_ROWS], next[ALONG_ROWS];
        if (column >= p.out) continue;
        if (AHEAD && lane * EACH_CODES < p.in) load_codes(next, p, group * p.out, column, lane * EACH_CODES);
        for (int64_t k = lane * EACH_CODES; k < p.in; k += STEP) {
            float part[TOKENS * ALONG_ROWS] = {}, scale[ALONG_ROWS];
#pragma unroll
            for (int r = 0; r < ALONG_ROWS; r++) {
                if (AHEAD) codes[r] = next[r];
                scale[r] = p.scales.at(group * p.out + min(column + r, p.out - 1), k, p.status);
            }
            if (!AHEAD) load_codes(codes, p, group * p.out, column, k);
            else if (k + STEP < p.in) load_codes(next, p, group * p.out, column, k + STEP);
            add_codes<TOKENS>(part, p, codes, token, group * p.in + k, p.in - k);
#pragma unroll
            for (int i = 0; i < TOKENS * ALONG_ROWS; i++)
                sum[i] = fmaf(scale[i % ALONG_ROWS], part[i], sum[i]);
        }
        constexpr int SUMS = TOKENS * ALONG_ROWS, LANES = 32 / SUMS;
        fold_lanes<SUMS, 16>(sum);
        const int64_t m = token + lane / LANES / ALONG_ROWS, c = column + lane / LANES % ALONG_ROWS;
        if (lane % LANES == 0 && m < p.tokens && c < p.out) put_sum(p, m, group * p.out + c, sum[0]);
    }
}

/* Adds four rows of W from `row` on, at the lane's columns. */
template <int TOKENS>
__device__ __forceinline__ void add_rows(float (&sum)[TOKENS][ACROSS_EACH], const e4m3_params &p,
                                         int64_t group, int64_t row, int64_t column, int64_t token)
{
    const int64_t columns = p.out - column, count = p.in - row;
    float w[4][ACROSS_EACH];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int64_t at = group * p.in + row + r;
        const bool there = r < count && columns > 0;
        const uint32_t word = there ? codes_of(p.codes + at * p.code_row + column, columns) : 0;
        const float scale = there ? p.scales.at(at, column, p.status) : 0.0f;
        const float2 low = e4m3_floats(word, 0), high = e4m3_floats(word, 1);
        w[r][0] = low.x * scale, w[r][1] = low.y * scale;
        w[r][2] = high.x * scale, w[r][3] = high.y * scale;
    }
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
        const int64_t from = min(token + m, p.tokens - 1) * p.a_row + group * p.in + row;
        const float4 x = four_of(p, from, count);
#pragma unroll
        for (int i = 0; i < ACROSS_EACH; i++) {
            sum[m][i] = fmaf(x.x, w[0][i], sum[m][i]);
            sum[m][i] = fmaf(x.y, w[1][i], sum[m][i]);
            sum[m][i] = fmaf(x.z, w[2][i], sum[m][i]);
            sum[m][i] = fmaf(x.w, w[3][i], sum[m][i]);
        }
    }
}

template <int TOKENS>
__global__ void __launch_bounds__(ACROSS_THREADS) e4m3_gemm_across(const __grid_constant__ e4m3_params p)
{
    __shared__ float shares[ACROSS_WARPS][TOKENS][ACROSS_BLOCK];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t panels = (p.out + ACROSS_BLOCK - 1) / ACROSS_BLOCK,
                  tiles = (p.tokens + TOKENS - 1) / TOKENS;
    for (int64_t item = blockIdx.x; item < panels * p.groups * tiles; item += gridDim.x) {
        const int64_t tile = item / (panels * p.groups), panel = item - tile * panels * p.groups,
                      group = panel / panels, first = (panel - group * panels) * ACROSS_BLOCK,
                      token = tile * TOKENS;
        float sum[TOKENS][ACROSS_EACH] = {};
        for (int64_t row = warp * 4; row < p.in; row += ACROSS_WARPS * 4)
            add_rows<TOKENS>(sum, p, group, row, first + lane * ACROSS_EACH, token);
#pragma unroll
        for (int m = 0; m < TOKENS; m++)
#pragma unroll
            for (int i = 0; i < ACROSS_EACH; i++) shares[warp][m][lane * ACROSS_EACH + i] = sum[m][i];
        __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * ACROSS_BLOCK; i += ACROSS_THREADS) {
            const int m = i / ACROSS_BLOCK, c = i % ACROSS_BLOCK;
            float all = 0.0f;
            for (int w = 0; w < ACROSS_WARPS; w++) all += shares[w][m][c];
            if (token + m < p.tokens && first + c < p.out)
                put_sum(p, token + m, group * p.out + first + c, all);
        }
        __syncthreads();
    }
}

#endif
