/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4_kernels.h - the tile kernels of products with NVFP4 weights. They get
 * pointers and sizes; they never validate, allocate or start threads.
 *
 * Repacked weights, version 3. A panel is 64 columns of one expert's matrix; its K is cut into units of 64. A
 * unit is 2304 bytes, four strips of 16 columns one after the other. A strip is a line of scales, byte 16 b +
 * n that of block b (16 of K) and column n, and eight lines of codes. Line l is 16 words of 32 bits, word n
 * the codes of column n at k = 8 l ... 8 l + 7 as eight nibbles from the lowest up: k 0, 2, 4, 6, then 1, 3,
 * 5, 7. So one shift of a word brings the codes of the pair 2 p, 2 p + 1 to the lowest bits of both halves.
 *
 * The byte of a scale 2^(e - 9) (1 + m / 8) is 144 - 8 e - m, normalised where E4M3 is subnormal, so e is 0
 * ... 17; a scale of 0 is the byte 0. Codes of columns past N and rows past K are 0.
 */
#ifndef QUERN_CPU_GEMM4_KERNELS_H
#define QUERN_CPU_GEMM4_KERNELS_H

#include <quern/quern.h>

enum {
    GEMM4_PANEL = 64, /* columns */
    GEMM4_UNIT = 64,  /* of K */
    GEMM4_STRIP = 16, /* columns */
    GEMM4_STRIPS = GEMM4_PANEL / GEMM4_STRIP,
    GEMM4_LINES = GEMM4_UNIT / 8,
    GEMM4_BLOCKS = GEMM4_UNIT / 16,
    GEMM4_STRIP_BYTES = 64 + 64 * GEMM4_LINES,
    GEMM4_UNIT_BYTES = GEMM4_STRIPS * GEMM4_STRIP_BYTES,
    GEMM4_WORDS_I8 = GEMM4_UNIT / 4, /* of four codes, a column of a unit */
    GEMM4_FEW_ROWS = 8
};

/* The integer product of some rows with one panel, a block of 16 at a time: C[m][64] (+)= sum over blocks of
 * (integer sum) * (a_scale * b_scale), each block's sum exact, blocks added in f32 in the order of K. */
typedef struct gemm4_i8_tile {
    int64_t rows, blocks;
    const uint32_t *a;    /* [rows][4 blocks]: words of four signed codes */
    const float *a_scale; /* [rows][blocks] */
    const int32_t *start; /* [rows][blocks]: -12 times the sum of the block's codes */
    int64_t lda;          /* blocks from row to row */
    const uint32_t *b;    /* [4 blocks][64]: words of four codes, doubled, plus 12 */
    const float *b_scale; /* [blocks][64] */
    float *c;             /* [rows][64] */
    bool accumulate;
} gemm4_i8_tile;

/* The f32 product of some rows with one panel, a block of 16 at a time: C[m][64] (+)= sum over blocks of (a's
 * values times the codes, summed from 0 in the order of K) * b_scale, an FMA a block. A block's sum is f32
 * and 2^25 times what it stands for, so a's values are below 2^95. */
typedef struct gemm4_f32_tile {
    int64_t rows, blocks;
    const float *a; /* [rows][16 blocks] */
    int64_t lda;
    const float *codes;  /* [16 blocks][64] */
    const float *scales; /* [blocks][64] */
    float *c;            /* [rows][64] */
    bool accumulate;
} gemm4_f32_tile;

/* A block of 16 values of a row of A: value k is (256 high + low) 2^(power + 1). The bytes stand in the order
 * of decode_i8. */
enum { GEMM4_NOT_INTEGERS = INT32_MIN };

typedef struct gemm4_a_block {
    int8_t high[16], low[16];
    int32_t start; /* -12 times the sum of the integers */
    int32_t power; /* or GEMM4_NOT_INTEGERS, and nothing else is set */
} gemm4_a_block;

typedef struct gemm4_kernels {
    quern_cpu_level level;
    /* Decodes units of a panel to code * scale, exact: [64 units][64] f32, or [32 units][64] words of two
     * bf16. */
    void (*decode_f32)(const uint8_t *panel, int64_t units, float *out);
    void (*decode_bf16)(const uint8_t *panel, int64_t units, uint32_t *out);
    /* Turns a unit of decode_bf16, [32][64] words that pair K, to [32][64] words that pair columns: word [n /
     * 2][k] holds columns n and n + 1. NULL where there is no decode_bf16. */
    void (*turn_bf16)(const uint32_t *decoded, uint32_t *out);
    /* Decodes units to the operands of mm_blocks: [64 units][64] codes and [4 units][64] scales. */
    void (*decode_blocks)(const uint8_t *panel, int64_t units, float *codes, float *scales);
    void (*mm_blocks)(const gemm4_f32_tile *t);
    /* c[64] (+)= a row times the units, decoded on the way: the same bits as decode_blocks and mm_blocks. */
    void (*row_f32)(const uint8_t *panel, int64_t units, const float *a, float *c, bool accumulate);
    /* Writes a row's values as integers. */
    void (*integer_blocks)(const float *a, int64_t blocks, gemm4_a_block *out);
    /* row_f32, by the integers of those blocks that have them: the same bits. */
    void (*row_blocks)(const uint8_t *panel, int64_t units, const float *a, const gemm4_a_block *blocks,
                       float *c, bool accumulate);
    /* c[rows][64] (+)= up to GEMM4_FEW_ROWS rows of words, `lda` apart, the same bits as decode_bf16 and a
     * product. */
    void (*rows_bf16)(const uint8_t *panel, int64_t units, int64_t rows, const uint32_t *a, int64_t lda,
                      float *c, bool accumulate);
    /* Decodes units to the operands of mm_i8: [16 units][64] words and [4 units][64] scales. Within a block
     * the words hold k 0, 4, 1, 5 | 2, 6, 3, 7 | 8, 12, 9, 13 | 10, 14, 11, 15. */
    void (*decode_i8)(const uint8_t *panel, int64_t units, uint32_t *codes, float *scales);
    void (*mm_i8)(const gemm4_i8_tile *t);
    /* out[j] = fl(fl(acc[j] fl(a_global b_global[j])) + bias[j]); bias NULL: none. */
    void (*scale_row)(const float *acc, float a_global, const float *b_global, const float *bias, int64_t n,
                      float *out);
} gemm4_kernels;

/* The byte that a panel holds of an E4M3 byte, 0x00 ... 0x7e, and back. */
static inline uint8_t gemm4_scale_byte(uint8_t e4m3)
{
    static const uint8_t subnormal[8] = {0, 144, 136, 132, 128, 126, 124, 122};
    return e4m3 < 8 ? subnormal[e4m3] : (uint8_t)(128 - e4m3);
}

static inline uint8_t gemm4_e4m3_byte(uint8_t scale)
{
    uint8_t e4m3 = 0;
    while (e4m3 < 8 && gemm4_scale_byte(e4m3) != scale) e4m3++;
    return e4m3 < 8 ? e4m3 : (uint8_t)(128 - scale);
}

#endif
