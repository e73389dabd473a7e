/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4_integers.h - one row of bf16 values times a panel, by integers where they are exact.
 *
 * A bf16 value has 8 significant bits. So in 9 of 10 blocks of 16 normal values each is a multiple q of one
 * power of two, |q| < 2^15, which two signed bytes hold: q = 256 high + low. A product of bytes takes 32
 * weights at AVX2; one of floats takes 8, and codes converted. The sum of a block's q times doubled codes is
 * exact and below 2^23 (16 * 2^15 * 12), so every partial sum of the product in floats is exact as well, and
 * both have the same bits. The other blocks take that product. (A third byte for two bits more would leave 3
 * blocks of 100 to it, and is no faster: what counts then are wrongly predicted branches.)
 *
 * At AVX2 128 weights (8 columns) take 34 instructions on four pipes: a look-up of 32 codes 2 or 3, its two
 * products 2, their sums 1.5, and the block 12. That is 2.1 cycles for 32 weights; in L2 2.4 were measured,
 * 2.6 with one block of 10 in floats, which take 4.4. From memory 32 weights arrive in 1.9.
 */
#ifndef QUERN_CPU_GEMM4_INTEGERS_H
#define QUERN_CPU_GEMM4_INTEGERS_H

#include "cpu/gemm4/gemm4_rows.h"

enum {
    LEAST_EXPONENT = 25,   /* biased: the powers of two that bring sums back are normal */
    LARGEST_EXPONENT = 254 /* of finite values */
};

enum { BLOCK_VECTORS = 16 / LANES };

/* The exponent of the largest magnitude, biased, or LEAST_EXPONENT. */
INLINE int block_exponent(const float a[16])
{
    uint32_t most = 0;
    for (int i = 0; i < 16; i++) {
        uint32_t bits;
        memcpy(&bits, a + i, sizeof bits);
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    return most >> 23 > LEAST_EXPONENT ? (int)(most >> 23) : LEAST_EXPONENT;
}

/* Bytes in the order of decode_i8. */
INLINE void store_in_order(const uint8_t bytes[16], int8_t to[16])
{
    typedef uint8_t bytes16 __attribute__((vector_size(16)));
    bytes16 v;
    memcpy(&v, bytes, sizeof v);
    v = __builtin_shufflevector(v, v, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    memcpy(to, &v, sizeof v);
}

/* Values of a block as multiples of 2^(exponent - 14). Returns whether two bytes hold them exactly; else what
 * it wrote is worth nothing. */
INLINE bool to_bytes(const float a[16], int exponent, gemm4_a_block *out)
{
    const vfloat scale = (vfloat)(((2 * 127 + 14 - exponent) << 23) - (vint){0});
    uint8_t low[16], high[16];
    vfloat sum = {0};
    vint wrong = {0};
#pragma GCC unroll 4
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        const vfloat x = v_load(a + v * LANES) * scale, near = x + 0x1.8p23f; /* its low bits: the integer */
        const vint whole = (vint)near - 0x4b400000;
        wrong |= ~(near - 0x1.8p23f == x) | (whole > 127 * 256 + 127);
        v_store_bytes(low + v * LANES, whole & 255);
        v_store_bytes(high + v * LANES, ((whole + 128) >> 8) & 255);
        sum += x;
    }
    if (v_any(wrong)) return false;
    store_in_order(low, out->low);
    store_in_order(high, out->high);
    out->start = -12 * (int32_t)sum_of(sum);
    return true;
}

static void integer_blocks(const float *a, int64_t blocks, gemm4_a_block *out)
{
    for (int64_t b = 0; b < blocks; b++, a += 16, out++) {
        const int exponent = block_exponent(a);
        const bool integers = exponent <= LARGEST_EXPONENT && to_bytes(a, exponent, out);
        out->power = integers ? exponent - (127 + 14) - 1 : GEMM4_NOT_INTEGERS;
    }
}

/* The same for every block. */
typedef struct integer_constants {
    vint nibbles; /* the low nibble of each byte */
    vshort high_factor, low_factor;
} integer_constants;

/* A block's words, each in every lane. */
typedef struct block_words {
    vint high[4], low[4], start, exponent;
} block_words;

INLINE vint word_of_bytes(const int8_t bytes[16], int w)
{
    int32_t word;
    memcpy(&word, bytes + 4 * w, sizeof word);
    return word - (vint){0};
}

INLINE block_words words_of(const gemm4_a_block *a)
{
    block_words words;
    words.start = a->start - (vint){0};
    words.exponent = (136 + a->power) * (1 << 23) - (vint){0};
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++) {
        words.high[w] = word_of_bytes(a->high, w);
        words.low[w] = word_of_bytes(a->low, w);
    }
    return words;
}

INLINE vshort four_pair_sums(const vint b[4], const vint a[4])
{
    return (pair_sums(b[0], a[0]) + pair_sums(b[1], a[1])) + (pair_sums(b[2], a[2]) + pair_sums(b[3], a[3]));
}

/* The sums of a block of integers for LANES columns, whose codes stand in two lines. */
INLINE vint integer_sums(const integer_constants *o, const block_words *a, const uint8_t *codes)
{
    const vint first = load_words(codes), second = load_words(codes + 64);
    const vint b[4] = {doubled_plus_12(first & o->nibbles), doubled_plus_12((first >> 4) & o->nibbles),
                       doubled_plus_12(second & o->nibbles), doubled_plus_12((second >> 4) & o->nibbles)};
    return add_pairs(four_pair_sums(b, a->high), o->high_factor) + a->start +
           add_pairs(four_pair_sums(b, a->low), o->low_factor);
}

/* c[64] += a block's products. */
INLINE void integer_block(const integer_constants *o, const gemm4_a_block *a, const uint8_t *unit, int at,
                          float *c)
{
    const block_words words = words_of(a);
#pragma GCC unroll 16
    for (int v = 0; v < ROW_VECTORS; v++) {
        const uint8_t *strip = unit + v / VECTORS_A_STRIP * GEMM4_STRIP_BYTES;
        const int column = v % VECTORS_A_STRIP * LANES;
        const vint sums = integer_sums(o, &words, strip + 64 + 128 * at + 4 * column);
        const vfloat scales = scaled_by(strip + at * GEMM4_STRIP + column, words.exponent);
        v_store(c + v * LANES, v_fma(__builtin_convertvector(sums, vfloat), scales, v_load(c + v * LANES)));
    }
}

static void row_blocks(const uint8_t *panel, int64_t units, const float *a, const gemm4_a_block *blocks,
                       float *c, bool accumulate)
{
    integer_constants o = {0x0f0f0f0f - (vint){0}, 256 - (vshort){0}, 1 - (vshort){0}};
    __asm__("" : "+m"(o)); /* else the compiler makes them anew for every vector */
    if (!accumulate) memset(c, 0, GEMM4_PANEL * sizeof *c);
    for (int64_t block = 0; block < units * GEMM4_BLOCKS; block++, a += 16, blocks++) {
        const uint8_t *unit = panel + block / GEMM4_BLOCKS * GEMM4_UNIT_BYTES;
        const int at = (int)(block % GEMM4_BLOCKS);
        request_ahead(unit, at, GEMM4_STRIPS);
        if (blocks->power == GEMM4_NOT_INTEGERS) float_block(a, unit, at, c);
        else integer_block(&o, blocks, unit, at, c);
    }
}

#endif
