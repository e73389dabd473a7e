/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* widen.cuh - codes of W in shared memory widened in registers into the first operand of products in 16
 * bits. The conversion of sm_89 gives f16, NaN included; every e4m3 is a bf16 too. */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_WIDEN_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_WIDEN_CUH

#include "e4m3_gemm/sm90/tiles.cuh"

namespace sm90_e4m3
{

enum { STEPS = RUN / 16 };

__device__ __forceinline__ uint16_t two_codes(uint32_t address)
{
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
    return x;
}

template <typename T> __device__ __forceinline__ uint32_t widen(uint16_t codes)
{
    uint32_t halves = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
#endif
    if constexpr (__is_same(T, bf16)) {
        const float2 wide = __half22float2(*(const __half2 *)&halves);
        const __nv_bfloat162 both = __floats2bfloat162_rn(wide.x, wide.y);
        return *(const uint32_t *)&both;
    }
    return halves;
}

/* COUNT steps of a run of a thread's rows, as the products of 64 rows take them: `rows` are the warp's 16. */
template <typename T, int FIRST, int COUNT>
__device__ __forceinline__ void load_steps(uint32_t (&a)[COUNT][4], const char *rows)
{
    const int lane = threadIdx.x % 32, row = lane / 4;
    const uint32_t from = smem_address(rows) + row * 128 + (row << 4) + lane % 4 * 2;
    uint16_t x[COUNT][4];
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
        const uint32_t at = from ^ (FIRST + s) << 4;
        x[s][0] = two_codes(at);
        x[s][1] = two_codes(at + 8 * 128);
        x[s][2] = two_codes(at + 8);
        x[s][3] = two_codes(at + 8 * 128 + 8);
    }
#pragma unroll
    for (int s = 0; s < COUNT; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[s][i] = widen<T>(x[s][i]);
}

} // namespace sm90_e4m3

#endif
