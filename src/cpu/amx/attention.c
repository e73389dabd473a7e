/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.c - products with bf16 weights by AMX: C[16][16] += A[16][16] B[16][16] in words of two bf16, a
 * tile of 1 KiB each.
 *
 * A tile product sums its even and its odd products apart, from zero, and adds both sums to C. So an element
 * of C is a sum over steps of 32 from the first k on, whichever operand the weights are, in however many
 * pieces k comes. Tiles of fewer rows, or with zeros for words past the last, give the same sums.
 *
 * Many rows: packed columns of 64 are four tiles of B, and 16 rows of A meet them. Few rows: weights are A in
 * place, 16 rows at a time, since the hardware's prefetchers follow more streams worse (64: 0.86 as fast).
 * Limit: 16 cycles a product, so packed columns take 16 bytes of weights a cycle; few rows read weights at
 * 0.94 of the bandwidth.
 */
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector.h"

#include <immintrin.h>

enum { SIDE = 16, PANEL = 64, TILE_BYTES = 64, AHEAD = 1024 };

/* The operand of LDTILECFG. */
typedef struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;
_Static_assert(sizeof(tile_shapes) == 64, "LDTILECFG reads 64 bytes");

/* GCC does not see that LDTILECFG and TILELOADD read memory. What it stores at p is there after `stored`, and
 * no later store moves before it. */
INLINE void stored(const void *p)
{
    __asm__ volatile("" : : "r"(p) : "memory");
}

/* Tiles 0 to 4 have `rows` rows, those from 5 on 16. All but 4, A's, have `columns` columns. */
INLINE void shape_tiles(int64_t rows, int64_t columns)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = (uint16_t)(i == 4 ? TILE_BYTES : 4 * columns);
        shapes.rows[i] = (uint8_t)(i < 5 ? rows : SIDE);
    }
    stored(&shapes);
    _tile_loadconfig(&shapes);
}

/* Tiles of C are 0 to 3, of A 4, of B 5 to 7. */
#define MULTIPLY(tiles, a, a_bytes, b, b_bytes)                                                              \
    do {                                                                                                     \
        _tile_loadd(4, a, a_bytes);                                                                          \
        _tile_loadd(5, b, b_bytes);                                                                          \
        _tile_dpbf16ps(0, 4, 5);                                                                             \
        if ((tiles) > 1) _tile_loadd(6, (b) + SIDE, b_bytes);                                                \
        if ((tiles) > 1) _tile_dpbf16ps(1, 4, 6);                                                            \
        if ((tiles) > 2) _tile_loadd(7, (b) + 2 * SIDE, b_bytes);                                            \
        if ((tiles) > 2) _tile_dpbf16ps(2, 4, 7);                                                            \
        if ((tiles) > 3) _tile_loadd(5, (b) + 3 * SIDE, b_bytes);                                            \
        if ((tiles) > 3) _tile_dpbf16ps(3, 4, 5);                                                            \
    } while (0)

/* The last words of k, fewer than a tile has: the others are zero in A and in B. */
typedef struct last_words {
    float a[SIDE * SIDE], b[SIDE * PANEL];
} last_words;

INLINE void copy_last(last_words *last, const int tiles, int64_t rows, int64_t words, const float *a,
                      int64_t a_row, const float *b, int64_t ldb)
{
    memset(last, 0, sizeof *last);
    for (int64_t i = 0; i < rows; i++) memcpy(last->a + i * SIDE, a + i * a_row, (size_t)words * sizeof *a);
    for (int64_t i = 0; i < words; i++)
        memcpy(last->b + i * PANEL, b + i * ldb, (size_t)(tiles * SIDE) * sizeof *b);
    stored(last);
}

/* Up to 16 rows of A, as many as the tiles have, and tiles of 16 columns of B. */
INLINE void multiply_rows(const int tiles, int64_t rows, int64_t k, const float *a, int64_t a_row,
                          const float *b, int64_t ldb, float *c, int64_t ldc, bool accumulate)
{
    const int64_t a_bytes = a_row * 4, b_bytes = ldb * 4, c_bytes = ldc * 4;
    int64_t p = 0;
    stored(c);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (accumulate) _tile_loadd(0, c, c_bytes);
    if (accumulate && tiles > 1) _tile_loadd(1, c + SIDE, c_bytes);
    if (accumulate && tiles > 2) _tile_loadd(2, c + 2 * SIDE, c_bytes);
    if (accumulate && tiles > 3) _tile_loadd(3, c + 3 * SIDE, c_bytes);
    for (; p + SIDE <= k; p += SIDE) MULTIPLY(tiles, a + p, a_bytes, b + p * ldb, b_bytes);
    if (p < k) {
        last_words last;
        copy_last(&last, tiles, rows, k - p, a + p, a_row, b + p * ldb, ldb);
        MULTIPLY(tiles, last.a, TILE_BYTES, last.b, PANEL * 4);
    }
    _tile_stored(0, c, c_bytes);
    if (tiles > 1) _tile_stored(1, c + SIDE, c_bytes);
    if (tiles > 2) _tile_stored(2, c + 2 * SIDE, c_bytes);
    if (tiles > 3) _tile_stored(3, c + 3 * SIDE, c_bytes);
}

INLINE void multiply_columns(const int tiles, int64_t m, int64_t k, const float *a, int64_t a_row,
                             const float *b, int64_t ldb, float *c, int64_t ldc, bool accumulate)
{
    if (m >= SIDE) shape_tiles(SIDE, SIDE);
    for (; m >= SIDE; m -= SIDE, a += SIDE * a_row, c += SIDE * ldc)
        multiply_rows(tiles, SIDE, k, a, a_row, b, ldb, c, ldc, accumulate);
    if (m == 0) return;
    shape_tiles(m, SIDE);
    multiply_rows(tiles, m, k, a, a_row, b, ldb, c, ldc, accumulate);
}

static void mm_weights_bf16(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k,
                            const void *b, int64_t ldb, float *c, int64_t ldc, bool accumulate)
{
    (void)a_k; /* 1 */
    switch ((n + SIDE - 1) / SIDE) {
    case 1: multiply_columns(1, m, k, a, a_row, b, ldb, c, ldc, accumulate); break;
    case 2: multiply_columns(2, m, k, a, a_row, b, ldb, c, ldc, accumulate); break;
    case 3: multiply_columns(3, m, k, a, a_row, b, ldb, c, ldc, accumulate); break;
    case 4: multiply_columns(4, m, k, a, a_row, b, ldb, c, ldc, accumulate); break;
    default: break;
    }
    _tile_release();
}

/* Words [p, p + n) of a's rows, as columns. */
INLINE void turn_rows(int64_t m, const char *a, int64_t a_bytes, int64_t p, int64_t n, float to[SIDE * SIDE])
{
    const __mmask16 kept = n < SIDE ? (__mmask16)((1u << n) - 1u) : (__mmask16)0xffff;
    vfloat block[LANES];
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; i++)
        block[i] = i < m ? (vfloat)_mm512_maskz_loadu_ps(kept, a + i * a_bytes + 4 * p) : (vfloat){0};
    v_transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) memcpy(to + i * SIDE, &block[i], sizeof block[i]);
    stored(to);
}

/* Words [p, p + n) of the rows of b from `first` on, in place; the tile's last words, a copy. What follows is
 * requested into L2, 1 KiB on or there in the next 16 rows, as in attention_across.h. */
INLINE const float *weights_at(const row_source *b, int64_t first, int64_t rows, int64_t p, int64_t n,
                               float copy[SIDE * SIDE], int64_t *bytes)
{
    const char *at = (const char *)b->data + first * 2 * b->stride + 4 * p;
    const int64_t line = 4 * p + AHEAD, length = 2 * b->dim;
    const int64_t ahead = line < length ? AHEAD : AHEAD + SIDE * 2 * b->stride - length;
    *bytes = 2 * b->stride;
    for (int64_t i = 0; i < rows; i++) __builtin_prefetch(at + i * *bytes + ahead, 0, 2);
    if (n == SIDE) return (const float *)(const void *)at;
    memset(copy, 0, SIDE * SIDE * sizeof *copy);
    for (int64_t i = 0; i < rows; i++) memcpy(copy + i * SIDE, at + i * *bytes, (size_t)n * sizeof *copy);
    stored(copy);
    *bytes = TILE_BYTES;
    return copy;
}

/* c[0 .. m)[first .. first + rows), the columns as many as the tiles have rows. */
INLINE void across_group(int64_t m, const char *a, int64_t a_bytes, const row_source *b, int64_t first,
                         int64_t rows, float *c, int64_t ldc)
{
    const int64_t words = b->dim / 2;
    const __mmask16 kept = (__mmask16)((1u << rows) - 1u);
    float columns[SIDE * SIDE] __attribute__((aligned(64))), copy[SIDE * SIDE] __attribute__((aligned(64))),
        sums[SIDE * SIDE] __attribute__((aligned(64)));
    memset(sums, 0, sizeof sums);
    stored(a);
    _tile_zero(0);
    for (int64_t p = 0; p < words; p += SIDE) {
        const int64_t n = words - p < SIDE ? words - p : SIDE;
        int64_t bytes;
        const float *weights = weights_at(b, first, rows, p, n, copy, &bytes);
        if (m == 1 && n == SIDE) { /* one row is its own column */
            MULTIPLY(1, weights, bytes, (const float *)(const void *)(a + 4 * p), 4);
        } else {
            turn_rows(m, a, a_bytes, p, n, columns);
            MULTIPLY(1, weights, bytes, columns, TILE_BYTES);
        }
        stored(columns);
    }
    _tile_stored(0, sums, TILE_BYTES);
    stored(sums);
    vfloat block[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) memcpy(&block[i], sums + i * SIDE, sizeof block[i]);
    v_transpose(block);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ACROSS_ROWS; r++)
        if (r < m) _mm512_mask_storeu_ps(c + r * ldc + first, kept, (__m512)block[r]);
}

static void across_weights_bf16(int64_t m, const void *a, int64_t lda, const row_source *b, float *c,
                                int64_t ldc)
{
    const int64_t columns = m == 1 ? 1 : SIDE, left = b->rows % SIDE, whole = b->rows - left;
    if (whole > 0) shape_tiles(SIDE, columns);
    for (int64_t j = 0; j < whole; j += SIDE) across_group(m, a, 2 * lda, b, j, SIDE, c, ldc);
    if (left > 0) shape_tiles(left, columns);
    if (left > 0) across_group(m, a, 2 * lda, b, whole, left, c, ldc);
    _tile_release();
}

const attention_kernels attention_kernels_amx = {.level = QUERN_CPU_LEVEL_AMX,
                                                 .mm_weights_bf16 = mm_weights_bf16,
                                                 .across_weights_bf16 = across_weights_bf16};
