/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * formats.h - e2m1 and e4m3, a lane a number.
 *
 * Rounding is one addition: magic(y) is the power of two whose f32 neighbours stand as far apart as the format's
 * around y, so y + magic rounds y to the format, ties to even, and the sum's low bits count its steps. Every step is
 * one f32 rounding or exact, so every level gives the same bits.
 */
#ifndef QUERN_CPU_FORMATS_H
#define QUERN_CPU_FORMATS_H

#include "cpu/kernels/vector.h"

INLINE vfloat magnitude_of(vfloat v)
{
    return (vfloat)((vint)v & 0x7fffffff);
}

/* Where v is NaN: `than`. */
INLINE vfloat v_min(vfloat v, vfloat than)
{
#if defined(__AVX512F__)
    return _mm512_min_ps(v, than);
#elif defined(__FMA__)
    return _mm256_min_ps(v, than);
#else
    return v_select(v < than, v, than);
#endif
}

/* The code of magnitudes in [0, 6]. */
INLINE vint e2m1_of(vfloat y)
{
    vint power = (vint)y & 0x7f800000;
    power = (vint)v_max((vfloat)power, v_splat(1.0f));
    const vint magic = power + (22 << 23);
    return (vint)(y + (vfloat)magic) - magic + ((power - (127 << 23)) >> 22);
}

/* The byte of numbers in [0, 448]. */
INLINE vint e4m3_of(vfloat s)
{
    vint power = (vint)s & 0x7f800000;
    power = (vint)v_max((vfloat)power, v_splat(0x1p-6f));
    const vint magic = power + (20 << 23);
    return (vint)(s + (vfloat)magic) - magic + ((power - (121 << 23)) >> 20);
}

/* The same of any magnitude: beyond the largest number of the format, and for NaN, that number. */
INLINE vint saturated_e2m1(vfloat y)
{
    return e2m1_of(v_min(y, v_splat(6.0f)));
}

INLINE vint saturated_e4m3(vfloat s)
{
    return e4m3_of(v_min(s, v_splat(448.0f)));
}

INLINE vfloat e2m1_value(vint code)
{
    return (vfloat)(code << 22) * 0x1p126f;
}

INLINE vfloat e4m3_value(vint byte)
{
    return (vfloat)(byte << 20) * 0x1p120f;
}

#endif
