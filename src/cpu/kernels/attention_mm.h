/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_mm.h - the micro-kernel behind every product of attention, over vectors of the including file's
 * width: C[ROWS][VECTORS] in registers, B loaded, A broadcast, k innermost.
 *
 * The full tile is ROWS x VECTORS accumulators (AVX-512: 6 x 4 = 24 of 32 registers, 4 for B, 1 for A: per
 * step 24 FMAs, 4 loads and 6 broadcasts, so the two FMA pipes are the limit, not the two load pipes; AVX2: 6
 * x 2 = 12 of 16). Each call accumulates from zero and adds to C at the end: adding in place would cost
 * precision over long sums. Adding to addresses instead of indexing, and loops that begin at a cache line
 * (CMakeLists.txt), give 1.5% of the speed: alone, a product of 48 rows, 64 columns and a depth of 128 or 256
 * then runs at 0.98 of the FMA peak.
 *
 * The including file defines vec, ROWS, VECTORS, broadcast(), step_f32(acc, a, b) and, where the level has
 * it, step_bf16; `pairs` picks one at compile time. It gets mm_f32() and mm_scaled_f32(), whose sums take
 * their column's factor as they are added to C. (They test the factors' address, so that the compiler
 * knows it.)
 */
#ifndef QUERN_CPU_ATTENTION_MM_H
#define QUERN_CPU_ATTENTION_MM_H

#define MM_INLINE static inline __attribute__((always_inline))

enum { VEC_LANES = sizeof(vec) / 4 };

MM_INLINE void mm_block(const bool pairs, const int rows, const int vectors, int64_t k, const float *a,
                        int64_t a_row, int64_t a_k, const float *b, int64_t ldb, const float *scale, float *c,
                        int64_t ldc, bool accumulate)
{
    vec acc[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[i][j] = (vec){0};
    const float *low = rows > 3 ? a + 3 * a_row : a; /* two addresses and three offsets reach six rows */
    for (int64_t p = 0; p < k; p++) {
        vec bv[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) memcpy(&bv[j], b + j * VEC_LANES, sizeof(vec));
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const vec av = broadcast(i < 3 ? a + i * a_row : low + (i - 3) * a_row);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                acc[i][j] = pairs ? step_bf16(acc[i][j], av, bv[j]) : step_f32(acc[i][j], av, bv[j]);
        }
        a += a_k;
        low += a_k;
        b += ldb;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++, c += ldc) {
        /* Otherwise the compiler keeps an offset for each vector, most of them on the stack. */
        __asm__("" : "+r"(c));
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            vec old = {0}, by;
            if (accumulate) memcpy(&old, c + j * VEC_LANES, sizeof old);
            if (scale != NULL) {
                memcpy(&by, scale + j * VEC_LANES, sizeof by);
                if (accumulate) acc[i][j] = step_f32(old, acc[i][j], by);
                else acc[i][j] *= by;
            } else if (accumulate) acc[i][j] += old;
            memcpy(c + j * VEC_LANES, &acc[i][j], sizeof(vec));
        }
    }
}

MM_INLINE void mm_columns(const bool pairs, const int vectors, int64_t m, int64_t k, const float *a,
                          int64_t a_row, int64_t a_k, const float *b, int64_t ldb, const float *scale,
                          float *c, int64_t ldc, bool accumulate)
{
    /* Eight rows are two blocks of four: two rows alone wait for their sums. */
    for (; m >= ROWS && m != 8; m -= ROWS, a += ROWS * a_row, c += ROWS * ldc)
        mm_block(pairs, ROWS, vectors, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
    for (; m >= 4; m -= 4, a += 4 * a_row, c += 4 * ldc)
        mm_block(pairs, 4, vectors, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
    if (m >= 2) {
        mm_block(pairs, 2, vectors, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
        m -= 2;
        a += 2 * a_row;
        c += 2 * ldc;
    }
    if (m == 1) mm_block(pairs, 1, vectors, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
}

/* n columns, n <= VECTORS vectors. */
MM_INLINE void mm_any(const bool pairs, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row,
                      int64_t a_k, const float *b, int64_t ldb, const float *scale, float *c, int64_t ldc,
                      bool accumulate)
{
    switch ((n + VEC_LANES - 1) / VEC_LANES) {
    case 1: mm_columns(pairs, 1, m, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate); break;
    case 2: mm_columns(pairs, 2, m, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate); break;
    case 3:
        mm_columns(pairs, 3 < VECTORS ? 3 : VECTORS, m, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
        break;
    case 4: mm_columns(pairs, VECTORS, m, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate); break;
    default: break;
    }
}

static void mm_f32(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k, const void *b,
                   int64_t ldb, float *c, int64_t ldc, bool accumulate)
{
    mm_any(false, m, n, k, a, a_row, a_k, b, ldb, NULL, c, ldc, accumulate);
}

static void mm_scaled_f32(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k,
                          const void *b, int64_t ldb, const float *scale, float *c, int64_t ldc,
                          bool accumulate)
{
    if (scale != NULL) mm_any(false, m, n, k, a, a_row, a_k, b, ldb, scale, c, ldc, accumulate);
}

#endif
