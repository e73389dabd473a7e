/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4_rows.h - NVFP4's tile kernels, written once over the level's vectors and compiled by each
 * level's file under its own flags.
 *
 * A row's blocks stand one after the other, and the arithmetic (nvfp4_blocks.h) wants them side by side, a
 * lane a block: LANES blocks are loaded, transposed in registers, quantised, and their codes zipped back. A
 * matrix with blocks along its rows has its columns side by side as it stands. Limit: the two divisions a
 * value; from memory, one read of x and one write of 9/16 byte a value, after the read that found the largest
 * magnitude.
 */
#ifndef QUERN_CPU_NVFP4_ROWS_H
#define QUERN_CPU_NVFP4_ROWS_H

#include "cpu/kernels/formats/nvfp4_blocks.h"
#if defined(__AVX512BW__)
#include "cpu/kernels/formats/nvfp4_words.h"
#endif

enum { GROUP = LANES * BLOCK }; /* values of the blocks quantised at once */

/* x[i], lane b = value i of block b, from `n` values of a row that starts at element `at`; zeros past the
 * end. */
INLINE void load_blocks(const void *row, const quern_dtype dtype, int64_t at, int64_t n, vfloat x[BLOCK])
{
    for (int part = 0; part < BLOCK / LANES; part++) {
        vfloat *v = x + part * LANES;
#pragma GCC unroll 16
        for (int b = 0; b < LANES; b++) {
            const int64_t c = at + b * BLOCK + part * LANES;
            v[b] = c + LANES <= n ? load_as(row, dtype, c)
                   : c < n        ? load_tail(row, dtype, c, n)
                                  : (vfloat){0};
        }
        v_transpose(v);
    }
}

/* The 8 bytes of codes of each lane's block, block after block. */
INLINE void store_codes(const vint code[BLOCK], int64_t bytes, uint8_t *to)
{
    vint word[2];
    for (int w = 0; w < 2; w++) {
        const vint *c = code + 8 * w;
        const vint low = c[0] | c[1] << 4 | c[2] << 8 | c[3] << 12;
        word[w] = low | c[4] << 16 | c[5] << 20 | c[6] << 24 | (vint)((vuint)c[7] << 28);
    }
    const vint zipped[2] = {__builtin_shufflevector(word[0], word[1], ZIP_LOW),
                            __builtin_shufflevector(word[0], word[1], ZIP_HIGH)};
    if (bytes >= (int64_t)sizeof zipped) memcpy(to, zipped, sizeof zipped);
    else memcpy(to, zipped, (size_t)bytes);
}

INLINE void store_bytes(vint v, int64_t n, uint8_t *to)
{
    uint8_t bytes[LANES];
    if (n >= LANES) {
        v_store_bytes(to, v);
    } else {
        v_store_bytes(bytes, v);
        memcpy(to, bytes, (size_t)n);
    }
}

INLINE void quantise_row_as(const quantise_rule *rule, const void *row, const quern_dtype dtype, int64_t n,
                            uint8_t *codes, uint8_t *scales)
{
    block_function *quantise = block_function_of(rule);
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    for (int64_t b = 0; b < blocks; b += LANES) {
        vfloat x[BLOCK];
        vint code[BLOCK], scale;
        load_blocks(row, dtype, b * BLOCK, n, x);
        quantise(rule, x, code, &scale);
        store_codes(code, 8 * (blocks - b), codes + 8 * b);
        store_bytes(scale, blocks - b, scales + b);
    }
}

#if defined(__AVX512BW__)
/* Some groups of 16 blocks. */
INLINE void quantise_groups(const quantise_rule *rule, const uint16_t *x, const int groups, uint8_t *codes,
                            uint8_t *scales)
{
    word_group group[WORD_GROUPS];
    for (int g = 0; g < groups; g++)
        scale_group(rule, x + g * WORD_GROUP, &group[g], scales + g * WORD_GROUP / BLOCK);
    for (int g = 0; g < groups; g++) invert_group(&group[g]);
    for (int g = 0; g < groups; g++, x += WORD_GROUP, codes += WORD_GROUP / 2, scales += WORD_GROUP / BLOCK) {
        if (groups == WORD_GROUPS) request_words(x + WORD_GROUPS * WORD_GROUP, WORD_GROUP);
        if (group[g].within_table) code_group(&group[g], x, codes);
        else quantise_row_as(rule, x, QUERN_BF16, WORD_GROUP, codes, scales);
    }
}

/* The last group comes from a copy that zeros pad. */
static void quantise_row_words(const quantise_rule *rule, const uint16_t *x, int64_t n, uint8_t *codes,
                               uint8_t *scales)
{
    uint16_t copy[WORD_GROUP];
    uint8_t last[WORD_GROUP / 2], last_scales[WORD_GROUP / BLOCK];
    while (n >= WORD_GROUP) {
        const int64_t whole = n / WORD_GROUP, groups = whole < WORD_GROUPS ? whole : WORD_GROUPS;
        quantise_groups(rule, x, (int)groups, codes, scales);
        n -= groups * WORD_GROUP;
        x += groups * WORD_GROUP;
        codes += groups * WORD_GROUP / 2;
        scales += groups * WORD_GROUP / BLOCK;
    }
    if (n == 0) return;
    const size_t blocks = (size_t)(n + BLOCK - 1) / BLOCK;
    memset(copy, 0, sizeof copy);
    memcpy(copy, x, (size_t)n * sizeof *copy);
    quantise_groups(rule, copy, 1, last, last_scales);
    memcpy(codes, last, 8 * blocks);
    memcpy(scales, last_scales, blocks);
}
#endif

static void quantise_row(const quantise_rule *rule, const void *x, quern_dtype dtype, int64_t n,
                         uint8_t *codes, uint8_t *scales)
{
#if defined(__AVX512BW__)
    if (dtype == QUERN_BF16 && has_words(rule)) {
        quantise_row_words(rule, x, n, codes, scales);
        return;
    }
#endif
    if (dtype == QUERN_F32) quantise_row_as(rule, x, QUERN_F32, n, codes, scales);
    else if (dtype == QUERN_BF16) quantise_row_as(rule, x, QUERN_BF16, n, codes, scales);
    else quantise_row_as(rule, x, QUERN_F16, n, codes, scales);
}

INLINE void quantise_columns_as(const quantise_rule *rule, const char *x, const quern_dtype dtype,
                                int64_t stride, int64_t n, uint8_t *codes, int64_t codes_stride,
                                uint8_t *scales)
{
    block_function *quantise = block_function_of(rule);
    for (int64_t c = 0; c < n; c += LANES) {
        vfloat v[BLOCK];
        vint code[BLOCK], scale;
#pragma GCC unroll 16
        for (int i = 0; i < BLOCK; i++) v[i] = load_some(x + i * stride * dtype_bytes(dtype), dtype, c, n);
        quantise(rule, v, code, &scale);
        for (int i = 0; i < BLOCK / 2; i++)
            store_bytes(code[2 * i] | code[2 * i + 1] << 4, n - c, codes + i * codes_stride + c);
        store_bytes(scale, n - c, scales + c);
    }
}

static void quantise_columns(const quantise_rule *rule, const void *x, quern_dtype dtype, int64_t stride,
                             int64_t n, uint8_t *codes, int64_t codes_stride, uint8_t *scales)
{
    if (dtype == QUERN_F32) quantise_columns_as(rule, x, QUERN_F32, stride, n, codes, codes_stride, scales);
    else if (dtype == QUERN_BF16)
        quantise_columns_as(rule, x, QUERN_BF16, stride, n, codes, codes_stride, scales);
    else quantise_columns_as(rule, x, QUERN_F16, stride, n, codes, codes_stride, scales);
}

/* The values of codes with the given scale bytes, lane by lane. */
INLINE vfloat value_of(const quantise_rule *rule, vint code, vint scale)
{
    const vfloat value = signed_e2m1(code), s = e4m3_value(scale);
    if (rule->profile == QUANTISE_PROFILE_COMPRESSED_TENSORS) return value * (s / rule->global);
    return (value * s) * rule->global;
}

INLINE void dequantise_row_as(const quantise_rule *rule, const uint8_t *codes, const uint8_t *scales,
                              int64_t n, void *out, const quern_dtype dtype)
{
    for (int64_t b = 0; b * BLOCK < n; b++)
        for (int i = 0; i < BLOCK && b * BLOCK + i < n; i += LANES) {
            const vfloat v =
                value_of(rule, load_nibbles(codes + 8 * b + i / 2, LANES), scales[b] - (vint){0});
            store_some(out, dtype, b * BLOCK + i, n, v);
        }
}

static void dequantise_row(const quantise_rule *rule, const uint8_t *codes, const uint8_t *scales, int64_t n,
                           void *out, quern_dtype dtype)
{
    if (dtype == QUERN_F32) dequantise_row_as(rule, codes, scales, n, out, QUERN_F32);
    else if (dtype == QUERN_BF16) dequantise_row_as(rule, codes, scales, n, out, QUERN_BF16);
    else dequantise_row_as(rule, codes, scales, n, out, QUERN_F16);
}

INLINE void dequantise_columns_as(const quantise_rule *rule, const uint8_t *codes, int64_t codes_stride,
                                  const uint8_t *scales, int64_t n, char *out, const quern_dtype dtype,
                                  int64_t stride)
{
    for (int64_t c = 0; c < n; c += LANES) {
        const vint scale = load_bytes(scales + c, n - c);
        for (int i = 0; i < BLOCK; i++) {
            const vint code = load_bytes(codes + i / 2 * codes_stride + c, n - c) >> 4 * (i % 2) & 15;
            store_some(out + i * stride * dtype_bytes(dtype), dtype, c, n, value_of(rule, code, scale));
        }
    }
}

static void dequantise_columns(const quantise_rule *rule, const uint8_t *codes, int64_t codes_stride,
                               const uint8_t *scales, int64_t n, void *out, quern_dtype dtype, int64_t stride)
{
    if (dtype == QUERN_F32)
        dequantise_columns_as(rule, codes, codes_stride, scales, n, out, QUERN_F32, stride);
    else if (dtype == QUERN_BF16)
        dequantise_columns_as(rule, codes, codes_stride, scales, n, out, QUERN_BF16, stride);
    else dequantise_columns_as(rule, codes, codes_stride, scales, n, out, QUERN_F16, stride);
}

#define NVFP4_ROW_KERNELS                                                                                    \
    .quantise_row = quantise_row, .quantise_columns = quantise_columns, .dequantise_row = dequantise_row,    \
    .dequantise_columns = dequantise_columns

#endif
