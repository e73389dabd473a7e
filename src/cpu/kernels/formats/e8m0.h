/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* e8m0.h - powers of two in a byte: 2^(byte - 127), 255 is NaN. */
#ifndef QUERN_CPU_E8M0_H
#define QUERN_CPU_E8M0_H

#include "core/half.h"

enum { E8M0_NAN = 255 };

static inline float e8m0_value(uint8_t byte)
{
    const uint32_t subnormal = 0x00400000u, nan = 0x7fc00000u;
    return float_from_bits(byte == 0 ? subnormal : byte == E8M0_NAN ? nan : (uint32_t)byte << 23);
}

/* The byte of a power of two, a normal number. */
static inline uint8_t e8m0_of(float power)
{
    return (uint8_t)(bits_from_float(power) >> 23);
}

/* The least power of two that is not below x, a normal number. */
static inline float power_above(float x)
{
    return float_from_bits((bits_from_float(x) + 0x7fffffu) & 0x7f800000u);
}

#endif
