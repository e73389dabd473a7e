/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4.h - the 4-bit float format, its quantisers and layouts, by their definitions: one value at a time,
 * tables and comparisons instead of arithmetic on bits. Every step of a quantiser is one f32 operation, so
 * results are exact.
 */
#ifndef QUERN_ORACLE_NVFP4_H
#define QUERN_ORACLE_NVFP4_H

#include <stdbool.h>
#include <stdint.h>

typedef enum oracle_profile {
    ORACLE_RNE,
    ORACLE_HALFSTEP,
    ORACLE_MODELOPT,
    ORACLE_COMPRESSED,
    ORACLE_PROFILES
} oracle_profile;
typedef enum oracle_scales {
    ORACLE_SCALES_RNE,
    ORACLE_SCALES_FOUR_OVER_SIX,
    ORACLE_SCALES_SEARCH,
    ORACLE_SCALES
} oracle_scales;

/* The value of a code (0 ... 15) and of a scale byte (0 ... 126). */
float oracle_e2m1(int code);
float oracle_e4m3(int byte);
/* The nearest code of a magnitude, ties to even, and the nearest scale byte, ties to even, saturating. */
int oracle_e2m1_nearest(float magnitude);
int oracle_e4m3_nearest(float x);

/* The global that a profile takes from the largest magnitude; the reciprocal R under ORACLE_COMPRESSED. */
float oracle_nvfp4_global(oracle_profile profile, float amax);
/* The codes of 16 values and their scale byte, which the function returns. */
int oracle_nvfp4_block(oracle_profile profile, oracle_scales scales, float global, const float x[16],
                       uint8_t codes[16]);
/* The value of a code in f32. */
float oracle_nvfp4_value(oracle_profile profile, float global, int scale, int code);

/* MXFP4 (E8M0 exponents per 32) to NVFP4. codes [blocks][32] are replaced, scales [blocks][2] written;
 * returns the number of blocks that were rounded. */
int64_t oracle_nvfp4_from_mxfp4(uint8_t *codes, const uint8_t *exponents, int64_t blocks, uint8_t *scales,
                                float *global);

/* Where scale (row, column) of a matrix of `columns` columns stands once swizzled. */
int64_t oracle_swizzled_at(int64_t row, int64_t column, int64_t columns);
/* Where column i of gate (or up) of width I stands in the interleaved matrix. */
int64_t oracle_interleaved_at(int64_t i, bool up, int64_t granularity);

#endif
