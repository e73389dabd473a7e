/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.cuh - codes of eight bits or four widened to bf16 in registers. They are exact there, and so is a
 * product with a power of two that keeps them in bf16's range. */
#ifndef QUERN_CUDA_DECODE_CUH
#define QUERN_CUDA_DECODE_CUH

#include "common/device.cuh"

__device__ __forceinline__ uint32_t times_bf16x2(uint32_t x, uint32_t y)
{
    const __nv_bfloat162 product = __hmul2(*(const __nv_bfloat162 *)&x, *(const __nv_bfloat162 *)&y);
    return *(const uint32_t *)&product;
}

/* 2^(byte - 127) as bf16, twice, byte <= 255, also negative; 255 is NaN. */
__device__ __forceinline__ uint32_t e8m0_bf16x2(int byte)
{
    const uint32_t one = byte > 0 ? (byte == 255 ? 0x7fc0 : byte << 7) : byte > -8 ? 0x40 >> -byte : 0;
    return one | one << 16;
}

/* Codes 2 i and 2 i + 1 of a word of four e4m3. As bf16 a code's bits are its value over 2^120. */
__device__ __forceinline__ uint32_t e4m3_bf16x2(uint32_t word, int i)
{
    const uint32_t high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424), size = high & 0x7f007f00,
                   value = times_bf16x2((high & 0x80008000) | size >> 4, 0x7b807b80);
    const uint32_t nan = ((size & 0x7f00) == 0x7f00 ? 0x7fff : 0) | (size >= 0x7f000000 ? 0x7fff0000 : 0);
    return value | nan;
}

/* Codes 2 i and 2 i + 1 of a word of four e4m3 as f16: exact, NaN stays. */
__device__ __forceinline__ uint32_t e4m3_f16x2(uint32_t word, int i)
{
    uint32_t halves;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)(word >> i * 16)));
#else
    const uint32_t both = e4m3_bf16x2(word, i);
    const __half2 x = __floats2half2_rn(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000));
    halves = *(const uint32_t *)&x;
#endif
    return halves;
}

/* Codes 2 i and 2 i + 1 of a word of four e4m3 as floats. */
__device__ __forceinline__ float2 e4m3_floats(uint32_t word, int i)
{
    const uint32_t halves = e4m3_f16x2(word, i);
    return __half22float2(*(const __half2 *)&halves);
}

/* Codes 2 i and 2 i + 1 of a word of eight e2m1. As bf16 a code's bits are its value over 2^126. */
__device__ __forceinline__ uint32_t e2m1_bf16x2(uint32_t word, int i)
{
    const uint32_t pair = word >> i * 8, high = (pair & 0xf) | (pair & 0xf0) << 12;
    return times_bf16x2((high & 0x00080008) << 12 | (high & 0x00070007) << 6, 0x7e807e80);
}

/* Eight e4m3 times a scale, as eight bf16. */
__device__ __forceinline__ uint4 e4m3_bf16x8(uint2 codes, uint32_t scale)
{
    return make_uint4(
        times_bf16x2(e4m3_bf16x2(codes.x, 0), scale), times_bf16x2(e4m3_bf16x2(codes.x, 1), scale),
        times_bf16x2(e4m3_bf16x2(codes.y, 0), scale), times_bf16x2(e4m3_bf16x2(codes.y, 1), scale));
}

/* Eight e2m1 times a scale, as eight bf16. */
__device__ __forceinline__ uint4 e2m1_bf16x8(uint32_t codes, uint32_t scale)
{
    return make_uint4(times_bf16x2(e2m1_bf16x2(codes, 0), scale), times_bf16x2(e2m1_bf16x2(codes, 1), scale),
                      times_bf16x2(e2m1_bf16x2(codes, 2), scale), times_bf16x2(e2m1_bf16x2(codes, 3), scale));
}

/* Codes 2 i and 2 i + 1 of a word of four e4m3, no NaN, as bf16 over 2^120. */
__device__ __forceinline__ uint32_t e4m3_spread(uint32_t word, int i)
{
    uint32_t wide; /* both with their sign in all bits above */
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(word), "r"(i == 0 ? 0x9180 : 0xb3a2));
    return wide << 4 & 0x87f087f0;
}

/* Eight e4m3, no NaN, times a power of two over 2^-120, twice, as eight bf16: one product each. */
__device__ __forceinline__ uint4 e4m3_finite_bf16x8(uint32_t low, uint32_t high, uint32_t times)
{
    return make_uint4(times_bf16x2(e4m3_spread(low, 0), times), times_bf16x2(e4m3_spread(low, 1), times),
                      times_bf16x2(e4m3_spread(high, 0), times), times_bf16x2(e4m3_spread(high, 1), times));
}

/* 2^(byte - 127) over 2^-120, twice, of byte i < 128 of a word. */
__device__ __forceinline__ uint32_t e8m0_for_finite(uint32_t word, int i)
{
    return __byte_perm(word, 0, 0x4040 | i * 0x0101) * 128 + 0x3c003c00;
}

/* Bits 0x80808080 of the sum of such numbers are set where a byte of four e4m3 is NaN: then one more changes
 * its sign bit, and otherwise none without a NaN. */
__device__ __forceinline__ uint32_t e4m3_nan_bits(uint32_t codes)
{
    return (codes + 0x01010101) ^ codes;
}

#endif
