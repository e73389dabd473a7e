/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * format_kernels.h - the tile kernels that turn values into codes of a format and back: NVFP4, and e4m3 and
 * e2m1 under scales that the caller chooses. They get pointers, sizes and strides; they never validate,
 * allocate or start threads. Every level gives the same bits.
 */
#ifndef QUERN_CPU_FORMAT_KERNELS_H
#define QUERN_CPU_FORMAT_KERNELS_H

#include "stages/quantise.h"

/* How a tensor is quantised to NVFP4. `global` is G, or R under COMPRESSED_TENSORS. */
typedef struct quantise_rule {
    quantise_profile profile;
    quantise_scales scales;
    float global;
} quantise_rule;

typedef struct format_kernels {
    quern_cpu_level level;
    /* NVFP4: a row of n values, blocks along it, the last one padded with zeros: ceil(n / 16) scales and 8
     * times as many bytes of codes. */
    void (*quantise_row)(const quantise_rule *rule, const void *x, quern_dtype dtype, int64_t n,
                         uint8_t *codes, uint8_t *scales);
    /* 16 rows of n values, `stride` elements apart, one block a column: 8 rows of codes, codes_stride bytes
     * apart, and n scales. */
    void (*quantise_columns)(const quantise_rule *rule, const void *x, quern_dtype dtype, int64_t stride,
                             int64_t n, uint8_t *codes, int64_t codes_stride, uint8_t *scales);
    /* The inverse of each. */
    void (*dequantise_row)(const quantise_rule *rule, const uint8_t *codes, const uint8_t *scales, int64_t n,
                           void *out, quern_dtype dtype);
    void (*dequantise_columns)(const quantise_rule *rule, const uint8_t *codes, int64_t codes_stride,
                               const uint8_t *scales, int64_t n, void *out, quern_dtype dtype,
                               int64_t stride);
    /* codes[i] = row[i] / scale to the nearest e4m3, ties to even, at most 448. */
    void (*quantise_e4m3)(const float *row, float scale, int64_t n, uint8_t *codes);
    /* The same to e2m1, at most 6, two to a byte, the first in the low bits; a value below 0 keeps its sign.
     * n is even. */
    void (*quantise_e2m1)(const float *row, float scale, int64_t n, uint8_t *codes);
    /* Codes as f32; e2m1 two to a byte, the first in the low bits, times the scale of their 32. */
    void (*widen_e4m3)(const uint8_t *codes, int64_t n, float *out);
    void (*widen_e2m1)(const uint8_t *codes, const float *scales, int64_t n, float *out);
} format_kernels;

#endif
