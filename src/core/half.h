/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* half.h - f16 and bf16 in portable C: widening is exact, narrowing rounds to nearest even, NaN stays
 * NaN. */
#ifndef QUERN_CORE_HALF_H
#define QUERN_CORE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t bits_from_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float float_from_bf16(uint16_t h)
{
    return float_from_bits((uint32_t)h << 16);
}

static inline uint16_t bf16_from_float(float f)
{
    uint32_t u = bits_from_float(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

static inline float float_from_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 0x3ffu;
    if (e == 31) return float_from_bits(sign | 0x7f800000u | m << 13);
    if (e == 0) { /* zero or subnormal: m * 2^-24, exact in f32 */
        const float f = (float)m * 0x1p-24f;
        return sign ? -f : f;
    }
    return float_from_bits(sign | (e + 112) << 23 | m << 13);
}

static inline uint16_t f16_from_float(float f)
{
    const uint32_t u = bits_from_float(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x3ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (a < 0x38800000u) { /* below 2^-14: adding 0.5 rounds at the subnormal's last bit */
        const float shifted = float_from_bits(a) + 0.5f;
        return (uint16_t)(sign | (bits_from_float(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a + 0xfffu + (a >> 13 & 1)) - 0x38000000u) >> 13);
}

#endif
