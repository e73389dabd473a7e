/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* round.cu - rows rounded to e4m3, a warp a run of 128: s = amax / 448, or 1 where that is 0, and x becomes
 * s e4m3(x / s), or the two factors. Limit: copy rate. */
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

quern_status e4m3_round_rows(const e4m3_round_params &p, cudaStream_t stream)
{
    const int64_t all = p.tokens * p.groups * ((p.k + E4M3_GROUP - 1) / E4M3_GROUP),
                  blocks = (all + WARPS - 1) / WARPS;
    if (blocks == 0) return QUERN_OK;
    e4m3_round<<<(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX), THREADS, 0, stream>>>(p);
    return LAUNCHED("e4m3_gemm, rows rounded");
}
