/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * lanes.h - e2m1 and e4m3, one number per lane.
 *
 * Rounding is one addition: magic(y) is the power of two around which f32 numbers have the format's spacing
 * around y. So y + magic rounds y to the format, ties to even, and the sum's low bits count its steps. Every
 * step is one f32 rounding or exact, so every level gives the same bits.
 */
#ifndef QUERN_CPU_FORMATS_LANES_H
#define QUERN_CPU_FORMATS_LANES_H

#include "cpu/kernels/vector.h"

INLINE vfloat magnitude_of(vfloat v)
{
    return (vfloat)((vint)v & 0x7fffffff);
}

/* v, or `than` where v is NaN. */
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

/* The same for any magnitude: larger ones and NaN become the format's largest number. */
INLINE vint saturated_e2m1(vfloat y)
{
    return e2m1_of(v_min(y, v_splat(6.0f)));
}

INLINE vint saturated_e4m3(vfloat s)
{
    return e4m3_of(v_min(s, v_splat(448.0f)));
}

/* The magnitude of a code in [0, 7]. Its bits are those of an f32, shifted, except for 0 and 1, which would
 * be subnormal. */
INLINE vfloat e2m1_value(vint code)
{
    const vint normal = (code << 22) + (126 << 23), small = -code & 0x3f000000; /* 0 or 0.5 */
    return v_select(code > 1, (vfloat)normal, (vfloat)small);
}

/* The value of a code with its sign in bit 3. */
INLINE vfloat signed_e2m1(vint code)
{
    return (vfloat)((vint)e2m1_value(code & 7) | (code & 8) << 28);
}

INLINE vfloat e4m3_value(vint byte)
{
    return (vfloat)(byte << 20) * 0x1p120f;
}

/* The first n bytes, or LANES, one per lane; 0 in the others. */
INLINE vint load_bytes(const uint8_t *p, int64_t n)
{
    uint8_t bytes[LANES] = {0};
    if (n >= LANES) return v_load_bytes(p);
    memcpy(bytes, p, (size_t)n);
    return v_load_bytes(bytes);
}

/* The first n codes of 4 bits, or LANES, one per lane. A byte holds two, the first in the low bits. (A whole
 * load of what was stored in pieces would wait for the stores.) */
INLINE vint load_nibbles(const uint8_t *p, int64_t n)
{
    uint32_t low = 0, high = 0;
    uint16_t half = 0;
    if (n < LANES) {
        uint8_t bytes[8] = {0};
        memcpy(bytes, p, (size_t)(n + 1) / 2);
        memcpy(&low, bytes, sizeof low);
        memcpy(&high, bytes + 4, sizeof high);
    } else if (LANES == 4) {
        memcpy(&half, p, sizeof half);
        low = half;
    } else {
        memcpy(&low, p, sizeof low);
        if (LANES == 16) memcpy(&high, p + 4, sizeof high);
    }
    const vint lane = LANE_NUMBERS;
    const vuint upper = (vuint)(lane > 7),
                words = ((low - (vuint){0}) & ~upper) | ((high - (vuint){0}) & upper);
    return (vint)(words >> (vuint)((lane & 7) * 4)) & 15;
}

#endif
