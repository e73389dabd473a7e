/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_across.h - products of a few rows with bf16 weights [out, in] in place: decoding reads each
 * weight once, so packing it would cost more than its products.
 *
 * 16 weight rows by 16 words of two bf16 neighbours are transposed in registers; a lane then is a column of
 * the result, as in the micro-kernel, and sums go over k in the same order and pieces: the bits are those of
 * packed panels. Registers: 16 for the block, 8 accumulators, 8 totals. The hardware's prefetchers follow 16
 * streams badly, so each load prefetches its own stream (into L2: 16 lines of equal low address bits are more
 * than an L1 set holds) 1 KB on, or there in the next 16 rows. A block is 64 shuffles and 16 loads a
 * KiB.
 * Limit: the read bandwidth; one core of a Zen 5 reads 27 GB/s this way, where DRAM gives two cores 45.
 */
#ifndef QUERN_CPU_ATTENTION_ACROSS_H
#define QUERN_CPU_ATTENTION_ACROSS_H

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector.h"

enum { ACROSS_PIECE = ACROSS_DEPTH / 2, ACROSS_AHEAD = 1024 };

/* LANES rows of b from `first` on, past the last the last one again; words [p, p + n) of each, transposed. */
INLINE void load_across(const row_source *b, int64_t first, int64_t p, int64_t n, vfloat block[LANES])
{
    const int64_t bytes = 2 * b->stride, last = b->rows - 1, line = 4 * p + ACROSS_AHEAD, length = 2 * b->dim;
    const int64_t ahead =
        ACROSS_AHEAD + (line < length ? 0 : LANES * bytes - length); /* or of the next rows */
    const __mmask16 kept = n < LANES ? (__mmask16)((1u << n) - 1u) : (__mmask16)0xffff;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const char *at = (const char *)b->data + (first + i < last ? first + i : last) * bytes + 4 * p;
        block[i] = (vfloat)_mm512_maskz_loadu_ps(kept, at);
        __builtin_prefetch(at + ahead, 0, 2);
    }
    v_transpose(block);
}

/* c[0 .. m)[first ..) of LANES columns, or of those that b has. */
INLINE void across_group(const int m, const char *a, int64_t a_bytes, const row_source *b, int64_t first,
                         float *c, int64_t ldc)
{
    const int64_t words = b->dim / 2, left = b->rows - first;
    const __mmask16 kept = left < LANES ? (__mmask16)((1u << left) - 1u) : (__mmask16)0xffff;
    __m512 total[ACROSS_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++) total[r] = _mm512_setzero_ps();
    for (int64_t p = 0; p < words; p += ACROSS_PIECE) {
        const int64_t end = words - p < ACROSS_PIECE ? words : p + ACROSS_PIECE;
        __m512 acc[ACROSS_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < m; r++) acc[r] = _mm512_setzero_ps();
        for (int64_t q = p; q < end; q += LANES) {
            const int64_t n = end - q < LANES ? end - q : LANES;
            vfloat block[LANES];
            load_across(b, first, q, n, block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                if (i >= n) break;
#pragma GCC unroll 8
                for (int r = 0; r < m; r++) {
                    int32_t pair;
                    memcpy(&pair, a + r * a_bytes + 4 * (q + i), sizeof pair);
                    acc[r] = _mm512_dpbf16_ps(acc[r], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)block[i]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < m; r++) total[r] = p == 0 ? acc[r] : _mm512_add_ps(acc[r], total[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < m; r++) _mm512_mask_storeu_ps(c + r * ldc + first, kept, total[r]);
}

static void mm_across_bf16(int64_t m, const void *a, int64_t lda, const row_source *b, float *c, int64_t ldc)
{
    const char *rows = a;
    for (int64_t j = 0; j < b->rows; j += LANES) {
        switch (m) {
        case 1: across_group(1, rows, 2 * lda, b, j, c, ldc); break;
        case 2: across_group(2, rows, 2 * lda, b, j, c, ldc); break;
        case 3: across_group(3, rows, 2 * lda, b, j, c, ldc); break;
        case 4: across_group(4, rows, 2 * lda, b, j, c, ldc); break;
        case 5: across_group(5, rows, 2 * lda, b, j, c, ldc); break;
        case 6: across_group(6, rows, 2 * lda, b, j, c, ldc); break;
        case 7: across_group(7, rows, 2 * lda, b, j, c, ldc); break;
        case 8: across_group(8, rows, 2 * lda, b, j, c, ldc); break;
        default: break;
        }
    }
}

#endif
