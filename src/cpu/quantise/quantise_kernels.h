/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * quantise_kernels.h - the tile kernels that turn values into NVFP4 codes and back: one table per CPU level.
 * They get pointers, sizes and strides; they never validate, allocate or start threads. Every level gives the
 * same bits, but SwiGLU, which is within the bounds of kernels.inc.
 */
#ifndef QUERN_CPU_QUANTISE_KERNELS_H
#define QUERN_CPU_QUANTISE_KERNELS_H

#include "cpu/kernels/row_kernels.h"
#include "stages/quantise.h"
#include "stages/swiglu.h"

/* How a tensor is quantised. `global` is G, or R under COMPRESSED_TENSORS. */
typedef struct quantise_rule {
    quantise_profile profile;
    quantise_scales scales;
    float global;
} quantise_rule;

typedef struct quantise_kernels {
    quern_cpu_level level;
    const row_kernels *rows;
    /* A row of n values, blocks along it, the last one padded with zeros: ceil(n / 16) scales and 8 times as
     * many bytes of codes. */
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
    /* Extracts n columns of gate (or up) from column `first` on, out of a row that interleaves both by runs
     * of q. */
    void (*part_row)(const void *x, quern_dtype dtype, int64_t first, bool up, int64_t q, int64_t n,
                     float *out);
    /* Quantises SwiGLU, an f32 h, of n columns of a row that interleaves gate and up by runs of q. Returns
     * bits below 0x7f800000 only if all gates and ups are finite. */
    uint32_t (*swiglu_quantise)(const swiglu_rule *rule, const quantise_rule *to, const void *x,
                                quern_dtype dtype, int64_t q, int64_t n, uint8_t *codes, uint8_t *scales);
    /* Writes h[i] for n gates and ups; h may be gate. */
    void (*swiglu_row)(const swiglu_rule *rule, const float *gate, const float *up, int64_t n, float *h);
    /* Replaces n gates and ups by their gradients; d is the gradient of h. */
    void (*swiglu_backward_row)(const swiglu_rule *rule, const float *d, int64_t n, float *gate, float *up);
} quantise_kernels;

const quantise_kernels *quantise_kernels_for(quern_cpu_level level);
extern const quantise_kernels quantise_kernels_portable, quantise_kernels_avx2, quantise_kernels_avx512;

#endif
