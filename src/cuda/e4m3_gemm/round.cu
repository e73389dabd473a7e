/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* round.cu - rows rounded to e4m3, a warp a run of 128: s = amax / 448, or 1 where that is 0, and x becomes
 * s e4m3(x / s), or the code and s. Aligned rows of 16 bits that become codes take loads of sixteen values:
 * eight lanes a run, each with runs of two rows. Limit: copy rate. */
#include "common/quotient.cuh"
#include "e4m3_gemm/params.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, EACH = 4 };

__device__ __forceinline__ void load_four(float (&x)[EACH], const e4m3_round_params &p, int64_t at, int count)
{
    if (p.wide && count >= EACH && p.dtype == QUERN_F32) {
        const float4 v = __ldcs((const float4 *)((const float *)p.x + at));
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        return;
    }
    if (p.wide && count >= EACH) {
        const uint2 v = __ldcs((const uint2 *)((const uint16_t *)p.x + at));
        const float2 low = p.dtype == QUERN_BF16 ? unpack2<bf16>(v.x) : unpack2<f16>(v.x),
                     high = p.dtype == QUERN_BF16 ? unpack2<bf16>(v.y) : unpack2<f16>(v.y);
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
        return;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = i < count ? value_at(p.x, p.dtype, at + i) : 0.0f;
}

__device__ __forceinline__ uint32_t e4m3_word(const float (&x)[EACH], float scale)
{
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const float y = __fdiv_rn(x[j], scale);
        word |= ((uint32_t)saturated_e4m3(fabsf(y)) | (__float_as_uint(y) >> 24 & 0x80)) << 8 * j;
    }
    return word;
}

__global__ void __launch_bounds__(THREADS) e4m3_round(const __grid_constant__ e4m3_round_params p)
{
    const int lane = threadIdx.x % 32;
    const int64_t runs = (p.k + E4M3_GROUP - 1) / E4M3_GROUP, all = p.tokens * p.groups * runs;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; i < all;
         i += (int64_t)gridDim.x * WARPS) {
        const int64_t row = i / (p.groups * runs), rest = i - row * p.groups * runs, group = rest / runs,
                      k = (rest - group * runs) * E4M3_GROUP + lane * EACH;
        const int count = (int)min(max(p.k - k, (int64_t)0), (int64_t)EACH);
        float x[EACH];
        uint32_t most = 0;
        bool bad = false;
        load_four(x, p, row * p.x_row + group * p.k + k, count);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            bad = bad || !isfinite(x[j]);
            x[j] = isfinite(x[j]) ? x[j] : 0.0f;
            most = max(most, __float_as_uint(fabsf(x[j])));
        }
        most = __reduce_max_sync(~0u, most);
        if (bad) raise_status(p.status, QUERN_STATUS_NOT_FINITE);
        float scale = __fdiv_rn(__uint_as_float(most), 448.0f);
        if (scale == 0.0f) scale = 1.0f;
        if (p.scale != NULL) {
            uint8_t *const to = (uint8_t *)p.out + row * p.out_row + rest * E4M3_GROUP + lane * EACH;
            *(uint32_t *)to = e4m3_word(x, scale);
            if (lane == 0) p.scale[rest * p.scale_row + row] = scale;
            continue;
        }
        float *const to = (float *)p.out + row * p.out_row + group * p.k + k;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const float y = __fdiv_rn(x[j], scale);
            if (j < count) to[j] = copysignf(e4m3_value(saturated_e4m3(fabsf(y))), y) * scale;
        }
    }
}

/* ---- rows of 16 bits to codes ---- */

enum {
    MANY = 16,                 /* values of a lane */
    LANES = E4M3_GROUP / MANY, /* of a run */
    RUNS_AT_ONCE = THREADS / LANES,
    ROWS_AT_ONCE = 2
};

/* The bits of a run's largest magnitude, two halves of a word at a time. */
__device__ __forceinline__ uint32_t largest_magnitude(const uint32_t (&word)[MANY / 2])
{
    uint32_t most = word[0] & 0x7fff7fff;
#pragma unroll
    for (int i = 1; i < MANY / 2; i++) most = __vmaxu2(most, word[i] & 0x7fff7fff);
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, mask));
    return max(most & 0xffff, most >> 16);
}

/* The same; what is not finite becomes 0. */
template <typename T>
__device__ __forceinline__ uint32_t largest_of(uint32_t (&word)[MANY / 2], int32_t *status)
{
    const uint32_t infinite = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
    const uint32_t most = largest_magnitude(word);
    if (!__any_sync(~0u, most >= infinite)) return most;
    if (most >= infinite) raise_status(status, QUERN_STATUS_NOT_FINITE);
#pragma unroll
    for (int i = 0; i < MANY / 2; i++) {
        if ((word[i] & 0x7fff) >= infinite) word[i] &= 0xffff0000;
        if ((word[i] >> 16 & 0x7fff) >= infinite) word[i] &= 0xffff;
    }
    return largest_magnitude(word);
}

template <typename T>
__device__ __forceinline__ void round_run(const e4m3_round_params &p, uint32_t (&word)[MANY / 2], int64_t row,
                                          int run, int lane)
{
    const uint32_t most = largest_of<T>(word, p.status);
    float scale = __fdiv_rn(unpack2<T>(most).x, 448.0f), x[MANY];
    uint32_t codes[MANY / 4];
    if (scale == 0.0f) scale = 1.0f;
#pragma unroll
    for (int i = 0; i < MANY / 2; i++) {
        const float2 two = unpack2<T>(word[i]);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
    divide_all(x, scale);
#pragma unroll
    for (int i = 0; i < MANY / 4; i++)
        codes[i] = two_e4m3(x[4 * i], x[4 * i + 1]) | (uint32_t)two_e4m3(x[4 * i + 2], x[4 * i + 3]) << 16;
    uint8_t *const to = (uint8_t *)p.out + row * p.out_row + (int64_t)run * E4M3_GROUP + lane * MANY;
    *(uint4 *)to = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    if (lane == 0) p.scale[run * p.scale_row + row] = scale;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) e4m3_round_codes(const __grid_constant__ e4m3_round_params p)
{
    const int runs = (int)((p.k + E4M3_GROUP - 1) / E4M3_GROUP), all = (int)p.groups * runs,
              parts = (all + RUNS_AT_ONCE - 1) / RUNS_AT_ONCE, block = blockIdx.x, lane = threadIdx.x % LANES,
              own = block % parts * RUNS_AT_ONCE + threadIdx.x / LANES, run = min(own, all - 1),
              group = run / runs, k = (run - group * runs) * E4M3_GROUP + lane * MANY;
    const int64_t row0 = (int64_t)(block / parts) * ROWS_AT_ONCE;
    uint4 words[ROWS_AT_ONCE][2] = {};
    let_next_start();
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        const uint16_t *const from =
            (const uint16_t *)p.x + min(row0 + r, p.tokens - 1) * p.x_row + group * p.k + k;
        if (k >= p.k) continue;
        words[r][0] = __ldcs((const uint4 *)from);
        words[r][1] = __ldcs((const uint4 *)from + 1);
    }
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        uint32_t word[MANY / 2] = {words[r][0].x, words[r][0].y, words[r][0].z, words[r][0].w,
                                   words[r][1].x, words[r][1].y, words[r][1].z, words[r][1].w};
        /* A run or row that is not there is another's, which gives the same. */
        round_run<T>(p, word, min(row0 + r, p.tokens - 1), run, lane);
    }
}

static bool launch_codes(const e4m3_round_params &p, cudaStream_t stream)
{
    const int64_t all = p.groups * ((p.k + E4M3_GROUP - 1) / E4M3_GROUP),
                  parts = (all + RUNS_AT_ONCE - 1) / RUNS_AT_ONCE,
                  blocks = (p.tokens + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * parts;
    if (p.scale == NULL || p.dtype == QUERN_F32 || !p.very_wide || blocks > INT32_MAX) return false;
    if (p.dtype == QUERN_BF16) e4m3_round_codes<bf16><<<(unsigned)blocks, THREADS, 0, stream>>>(p);
    else e4m3_round_codes<f16><<<(unsigned)blocks, THREADS, 0, stream>>>(p);
    return true;
}

quern_status e4m3_round_rows(const e4m3_round_params &p, cudaStream_t stream)
{
    const int64_t all = p.tokens * p.groups * ((p.k + E4M3_GROUP - 1) / E4M3_GROUP),
                  blocks = (all + WARPS - 1) / WARPS;
    if (blocks == 0) return QUERN_OK;
    if (launch_codes(p, stream)) return LAUNCHED("e4m3_gemm, rows rounded");
    e4m3_round<<<(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX), THREADS, 0, stream>>>(p);
    return LAUNCHED("e4m3_gemm, rows rounded");
}
