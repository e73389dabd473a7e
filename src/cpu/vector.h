/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * vector.h - 16 floats as one value, by the compiler's vector extension: one zmm register, two ymm, four xmm
 * or plain scalars, as the including file's flags have it. Everything is static, so each level's object
 * files hold their own copy.
 */
#ifndef QUERN_CPU_VECTOR_H
#define QUERN_CPU_VECTOR_H

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

INLINE f32x16 load16(const float *p)
{
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store16(float *p, f32x16 v)
{
    memcpy(p, &v, sizeof v);
}

INLINE f32x16 splat16(float x)
{
    return x - (f32x16){0};
}

INLINE f32x16 select16(i32x16 mask, f32x16 yes, f32x16 no)
{
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}

/* Lanes [lo, hi) of a 16-lane group whose first column is `at`. */
INLINE i32x16 lanes_in(int32_t at, int32_t lo, int32_t hi)
{
    const i32x16 lane = (i32x16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + at;
    return (lane >= lo) & (lane < hi);
}

/* a b + c in one rounding where the level has FMA, whatever -ffp-contract says. */
INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c)
{
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    union { f32x16 all; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.all;
#else
    return a * b + c;
#endif
}

/* The larger of each lane; where either is NaN, that of `than`. */
INLINE f32x16 max16(f32x16 v, f32x16 than)
{
#if defined(__AVX512F__)
    return _mm512_max_ps(v, than);
#else
    return select16(v > than, v, than);
#endif
}

/* Fixed trees, so that a row's result depends on nothing but the row. */
INLINE float max_of(f32x16 v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] = x[i + w] > x[i] ? x[i + w] : x[i];
    return x[0];
#endif
}

INLINE float sum_of(f32x16 v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
#endif
}

/*
 * 2^x for x <= 127, within 2.4e-7 relative; NaN stays NaN, -inf gives 0. x = n + f with n the nearest integer, 2^f
 * by a minimax polynomial of degree 5 on [-0.5, 0.5] (error 7.5e-8). AVX-512 scales by 2^n in one instruction
 * (half rate, but it takes the place of three); else n is added to the exponent bits, and 0 stands below -126.
 */
INLINE f32x16 exp2_16(f32x16 x)
{
#if defined(__AVX512F__)
    const f32x16 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - n;
#else
    const i32x16 tiny = x < -126.0f;
    const f32x16 clamped = select16(tiny, splat16(-126.0f), x);
    const f32x16 shifted = clamped + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    const f32x16 f = clamped - (shifted - 12582912.0f);
#endif
    f32x16 p = fma16(f, splat16(0x1.5c08e4p-10f), splat16(0x1.3d0c54p-7f));
    p = fma16(p, f, splat16(0x1.c6b6e4p-5f));
    p = fma16(p, f, splat16(0x1.ebf918p-3f));
    p = fma16(p, f, splat16(0x1.62e428p-1f));
    p = fma16(p, f, splat16(0x1.000002p+0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n); /* f is NaN where n is -inf: that gives 0 all the same */
#else
    f32x16 y = (f32x16)((i32x16)p + ((i32x16)shifted << 23));
    y = select16(tiny, (f32x16){0}, y);
    return select16(x == x, y, x);
#endif
}

/* Round to nearest even; NaN stays NaN. */
INLINE u16x16 narrow16(f32x16 v)
{
#if defined(__AVX512BF16__)
    return (u16x16)__builtin_ia32_cvtneps2bf16_v16sf(v);
#else
    const u32x16 u = (u32x16)v;
    const u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const u32x16 quiet = (u >> 16) | 0x40u;
    const u32x16 nan = (u32x16)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (quiet & nan), u16x16);
#endif
}

#endif
