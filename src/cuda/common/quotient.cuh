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

#endif
