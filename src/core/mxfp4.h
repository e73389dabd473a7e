/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mxfp4.h - blocks of MXFP4 (32 E2M1 codes and a power of two) on their way to NVFP4, whose largest scale is
 * then 2^8 and whose least 2^-9.
 */
#ifndef QUERN_CORE_MXFP4_H
#define QUERN_CORE_MXFP4_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MX_BLOCK = 32, MX_BYTES = MX_BLOCK / 2, MX_BIAS = 127, MX_LARGEST_POWER = 8, MX_LEAST_POWER = -9 };

static inline bool mx_is_zero(const uint8_t *codes)
{
    uint64_t half[2];
    memcpy(half, codes, sizeof half);
    return ((half[0] | half[1]) & 0x7777777777777777u) == 0;
}

/* The largest exponent byte that the codes allow. Byte 0xFF is NaN. Values of 2^128 and more are beyond f32:
 * 4 and 6 (codes 6 and 7) with 0xFD, 2^126, and 2 to 6 (codes 4 to 7) with 0xFE, 2^127. */
static inline uint8_t mx_most_exponent(const uint8_t *codes)
{
    int most = 0;
    for (int i = 0; i < MX_BYTES; i++) {
        most = (codes[i] & 7) > most ? codes[i] & 7 : most;
        most = (codes[i] >> 4 & 7) > most ? codes[i] >> 4 & 7 : most;
    }
    return most < 4 ? 0xFE : most < 6 ? 0xFD : 0xFC;
}

static inline bool mx_is_bad(const uint8_t *codes, uint8_t exponent)
{
    return exponent >= 0xFD && exponent > mx_most_exponent(codes);
}

/* The code that magnitude m * 2^-down rounds to, ties to even; down > 0. */
static inline uint8_t mx_lowered(uint8_t code, int down)
{
    static const uint8_t table[5][8] = {{0, 0, 1, 2, 2, 3, 4, 5},
                                        {0, 0, 0, 1, 1, 2, 2, 3},
                                        {0, 0, 0, 0, 0, 1, 1, 2},
                                        {0, 0, 0, 0, 0, 0, 0, 1},
                                        {0}};
    return (uint8_t)(table[down < 5 ? down - 1 : 4][code & 7] | (code & 8));
}

static inline void mx_lower_block(uint8_t *codes, int down)
{
    for (int i = 0; i < MX_BYTES; i++)
        codes[i] = (uint8_t)(mx_lowered(codes[i] & 15, down) | mx_lowered(codes[i] >> 4, down) << 4);
}

/* The E4M3 byte of 2^power. */
static inline uint8_t mx_scale_of(int power)
{
    return (uint8_t)(power >= -6 ? (power + 7) * 8 : 1 << (power + 9));
}

/* G for the largest exponent byte of a block that is not zero; -1: there is none. */
static inline float mx_global(int largest)
{
    return largest < 0 ? 1.0f : ldexpf(1.0f, largest - MX_BIAS - MX_LARGEST_POWER);
}

#endif
