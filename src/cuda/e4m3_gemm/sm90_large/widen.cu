/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* widen.cu - e4m3 codes to bf16 or f16, exactly, 16 a thread. Limit: copy rate. */
#include "e4m3_gemm/sm90_large/widen.cuh"

#include "common/decode.cuh"
#include "common/mma.cuh"

#include <algorithm>

enum { THREADS = 256 };

template <typename T> __device__ __forceinline__ uint32_t two_of(uint32_t word, int i)
{
    if constexpr (__is_same(T, bf16)) return e4m3_bf16x2(word, i);
    const float2 x = e4m3_floats(word, i);
    return pack2<T>(x.x, x.y);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) e4m3_widen(const __grid_constant__ widen_params p)
{
    const int64_t chunks = p.out_row / WIDEN_EACH;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.rows * chunks;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t row = i / chunks, k = (i - row * chunks) * WIDEN_EACH;
        const uint8_t *const from = p.codes + row * p.code_row + k;
        alignas(16) uint32_t codes[4] = {};
        if (k + WIDEN_EACH <= p.k) *(uint4 *)codes = __ldcs((const uint4 *)from);
        else
#pragma unroll
            for (int j = 0; j < WIDEN_EACH; j++)
                if (k + j < p.k) codes[j / 4] |= (uint32_t)from[j] << j % 4 * 8;
        uint4 *const to = (uint4 *)((T *)p.out + row * p.out_row + k);
#pragma unroll
        for (int j = 0; j < 2; j++)
            to[j] = make_uint4(two_of<T>(codes[2 * j], 0), two_of<T>(codes[2 * j], 1),
                               two_of<T>(codes[2 * j + 1], 0), two_of<T>(codes[2 * j + 1], 1));
    }
}

quern_status e4m3_widen_rows(const widen_params &p, quern_dtype dtype, cudaStream_t stream)
{
    const int64_t blocks = (p.rows * (p.out_row / WIDEN_EACH) + THREADS - 1) / THREADS;
    const unsigned grid = (unsigned)std::min(blocks, (int64_t)INT32_MAX);
    if (grid == 0) return QUERN_OK;
    if (dtype == QUERN_BF16) e4m3_widen<bf16><<<grid, THREADS, 0, stream>>>(p);
    else e4m3_widen<f16><<<grid, THREADS, 0, stream>>>(p);
    return LAUNCHED("e4m3_gemm, W widened");
}
