/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quotient.cuh - numbers over a scale that brings them into e4m3's range. */
#ifndef QUERN_CUDA_QUOTIENT_CUH
#define QUERN_CUDA_QUOTIENT_CUH

/* Each value over the scale, rounded once. With the rounded reciprocal a quotient within a step of the true
 * one becomes, by its remainder, the rounded one: the first remainder brings it there, the second ends it. A
 * remainder is exact unless the quotient is below 2^-40, which is 0 in e4m3, or the scale is tiny: then both
 * sides take a power of two. (A loop of divisions there would keep x in local memory in all cases.) */
template <int EACH> __device__ __forceinline__ void divide_all(float (&x)[EACH], float scale)
{
    if (scale < 0x1p-60f) {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] *= 0x1p100f;
        scale *= 0x1p100f;
    }
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float q = __fmul_rn(x[i], reciprocal);
        q = __fmaf_rn(__fmaf_rn(-q, scale, x[i]), reciprocal, q);
        x[i] = __fmaf_rn(__fmaf_rn(-q, scale, x[i]), reciprocal, q);
    }
}

/* Each value over the largest magnitude of all over 448, each rounded once; that scale, 1 where it is 0. */
template <int EACH> __device__ __forceinline__ float divide_by_largest(float (&x)[EACH], float most)
{
    float scale = __fdiv_rn(most, 448.0f);
    if (scale == 0.0f) scale = 1.0f;
    divide_all(x, scale);
    return scale;
}

/* The same of values of 16 bits: with the reciprocal to 47 bits a multiplication and an addition round to the
 * same float, which was tried for all pairs of mantissas of 8 and of 11 bits. Where the scale is far from 1,
 * both sides take a power of two. */
template <int EACH> __device__ __forceinline__ float divide_16_bits(float (&x)[EACH], float most)
{
    constexpr float part = 1.0f / 448.0f;
    float scale, by;
    if (most > 0x1p-60f && most < 0x1p60f) {
        by = __fmul_rn(most, part);
        scale = by = __fmaf_rn(__fmaf_rn(-by, 448.0f, most), part, by);
    } else {
        const float power = most < 1.0f ? 0x1p100f : 0x1p-100f;
        scale = __fdiv_rn(most, 448.0f);
        if (scale == 0.0f) scale = 1.0f;
        by = scale * power;
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] *= power;
    }
    float high;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(high) : "f"(by));
    const float low = __fmul_rn(__fmaf_rn(-by, high, 1.0f), high);
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = __fmaf_rn(x[i], high, __fmul_rn(x[i], low));
    return scale;
}

#endif
