/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4_rows.h - the tile kernels of products with NVFP4 weights, written over the level's vectors and
 * compiled by each level's file under its own flags. The layout of repacked weights stands in
 * gemm4_kernels.h.
 *
 * The f32 product keeps a block of 16 along K apart: the sum of a's values times the codes, which then takes
 * the block's scale in one FMA into the row's sum. So no value needs its scale: one row at AVX2 takes 3.6
 * instructions for 8 weights, 4.4 cycles for 32. (A row of bf16 values takes fewer: gemm4_integers.h.) Codes
 * count 2^25 times, which an integer's top byte makes them.
 *
 * mm_i8 keeps I8_ROWS x I8_VECTORS sums in f32 and as many of a block in integers; a block of 16 takes 4 dot
 * products, a conversion, a product of scales and an FMA: limit, two thirds of the peak of the dot product.
 */
#ifndef QUERN_CPU_GEMM4_ROWS_H
#define QUERN_CPU_GEMM4_ROWS_H

#include "cpu/gemm4/gemm4_kernels.h"
#include "cpu/kernels/vector.h"

#define E2M1_VALUES                                                                                          \
    0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f
#define E2M1_MAGNITUDES 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f

enum {
    VECTORS_A_STRIP = GEMM4_STRIP / LANES,
    ROW_AHEAD = 2 * GEMM4_UNIT_BYTES,
    ROW_FAR_AHEAD = 8 * GEMM4_UNIT_BYTES
};

/* The value of nibble j of each lane. */
INLINE vfloat code_value(vint w, const int j)
{
#if defined(__AVX512F__)
    const __m512 table = {E2M1_VALUES};
    return _mm512_permutexvar_ps((__m512i)(w >> 4 * j), table);
#elif defined(__AVX2__)
    const __m256 table = {E2M1_MAGNITUDES};
    const vint sign = (vint)((vuint)w << (28 - 4 * j)) & INT32_MIN;
    return (vfloat)((vint)_mm256_permutevar8x32_ps(table, (__m256i)(w >> 4 * j)) | sign);
#else
    static const float table[16] = {E2M1_VALUES};
    vfloat v;
    for (int i = 0; i < LANES; i++) v[i] = table[w[i] >> 4 * j & 15];
    return v;
#endif
}

/* The words of LANES columns. */
INLINE vint load_words(const uint8_t *p)
{
    vint v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The scales of LANES columns times 2^p, where `exponent` is (136 + p) 2^23. */
INLINE vfloat scaled_by(const uint8_t *bytes, vint exponent)
{
    const vint v = v_load_bytes(bytes), bits = exponent - (v << 20);
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (vfloat)_mm256_sign_epi32((__m256i)bits, (__m256i)v);
#else
    const vfloat zero = {0};
    return v_select(v == 0, zero, (vfloat)bits);
#endif
}

/* The scales of LANES columns, times a power of two. */
INLINE vfloat load_scales(const uint8_t *p, const int power)
{
    return scaled_by(p, ((136 + power) << 23) - (vint){0});
}

/* Requests a block's share of the strips that lie ROW_FAR_AHEAD into L2 and of those ROW_AHEAD into L1, line
 * after line in the order of their addresses. L1 waits for too few lines at once to fetch them from memory.
 * (A line that is left out arrives late: a ninth of them cost a ninth of the speed.) */
INLINE void request_ahead(const uint8_t *unit, int block, const int strips)
{
    const int share = strips * GEMM4_STRIP_BYTES / GEMM4_BLOCKS;
    const uint8_t *from = unit + block * share;
#pragma GCC unroll 9
    for (int at = 0; at < share; at += 64) {
        __builtin_prefetch(from + ROW_FAR_AHEAD + at, 0, 2);
        __builtin_prefetch(from + ROW_AHEAD + at);
    }
}

/* The k of nibble j of a word. */
INLINE int k_of_nibble(int j)
{
    return j < 4 ? 2 * j : 2 * (j - 4) + 1;
}

static void decode_f32(const uint8_t *panel, int64_t units, float *out)
{
    for (int64_t u = 0; u < units; u++, panel += GEMM4_UNIT_BYTES, out += GEMM4_UNIT * GEMM4_PANEL)
        for (int strip = 0; strip < GEMM4_STRIPS; strip++) {
            const uint8_t *scales = panel + strip * GEMM4_STRIP_BYTES, *codes = scales + 64;
            for (int v = 0; v < VECTORS_A_STRIP; v++)
                for (int line = 0; line < GEMM4_LINES; line++) {
                    const vfloat s = load_scales(scales + line / 2 * GEMM4_STRIP + v * LANES, 0);
                    const vint w = load_words(codes + 64 * line + 4 * v * LANES);
                    float *to = out + 8 * line * GEMM4_PANEL + strip * GEMM4_STRIP + v * LANES;
#pragma GCC unroll 8
                    for (int j = 0; j < 8; j++)
                        v_store(to + k_of_nibble(j) * GEMM4_PANEL, code_value(w, j) * s);
                }
        }
}

enum { BLOCK_POWER = -25 /* undoes the power of two in the codes */ };

/* Codes, 2^25 times, and scales that undo it. */
static void decode_blocks(const uint8_t *panel, int64_t units, float *codes, float *scales)
{
    for (int64_t u = 0; u < units; u++, panel += GEMM4_UNIT_BYTES, codes += GEMM4_UNIT * GEMM4_PANEL)
        for (int strip = 0; strip < GEMM4_STRIPS; strip++) {
            const uint8_t *from = panel + strip * GEMM4_STRIP_BYTES;
            for (int v = 0; v < VECTORS_A_STRIP; v++) {
                const int column = strip * GEMM4_STRIP + v * LANES;
                for (int b = 0; b < GEMM4_BLOCKS; b++)
                    v_store(scales + (u * GEMM4_BLOCKS + b) * GEMM4_PANEL + column,
                            load_scales(from + b * GEMM4_STRIP + v * LANES, BLOCK_POWER));
                for (int line = 0; line < GEMM4_LINES; line++) {
                    const vint w = load_words(from + 64 + 64 * line + 4 * v * LANES);
#pragma GCC unroll 8
                    for (int j = 0; j < 8; j++)
                        v_store(codes + (8 * line + k_of_nibble(j)) * GEMM4_PANEL + column,
                                code_value(w, j) * 0x1p25f);
                }
            }
        }
}

enum { F32_ROWS = LANES == 4 ? 2 : 6, F32_VECTORS = LANES == 16 ? 4 : 2 };

/* Some rows times F32_VECTORS vectors of columns, a block at a time. */
INLINE void f32_tile(const gemm4_f32_tile *t, const int rows, int64_t row, int64_t column)
{
    const float *b = t->codes + column, *scales = t->scales + column, *a = t->a + row * t->lda;
    float *const c = t->c + row * GEMM4_PANEL + column;
    for (int64_t block = 0; block < t->blocks; block++, a += 16, scales += GEMM4_PANEL) {
        vfloat sum[F32_ROWS][F32_VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < F32_VECTORS; j++) sum[i][j] = (vfloat){0};
        for (int k = 0; k < 16; k++, b += GEMM4_PANEL) {
            vfloat bv[F32_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < F32_VECTORS; j++) bv[j] = v_load(b + j * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                const vfloat av = v_splat(a[i * t->lda + k]);
#pragma GCC unroll 4
                for (int j = 0; j < F32_VECTORS; j++) sum[i][j] = v_fma(av, bv[j], sum[i][j]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < F32_VECTORS; j++) {
                float *to = c + i * GEMM4_PANEL + j * LANES;
                const vfloat old = block > 0 || t->accumulate ? v_load(to) : (vfloat){0};
                v_store(to, v_fma(sum[i][j], v_load(scales + j * LANES), old));
            }
    }
}

static void mm_blocks(const gemm4_f32_tile *t)
{
    for (int64_t column = 0; column < GEMM4_PANEL; column += F32_VECTORS * LANES) {
        int64_t row = 0;
        for (; row + F32_ROWS <= t->rows; row += F32_ROWS) f32_tile(t, F32_ROWS, row, column);
        for (; row + 4 <= t->rows && F32_ROWS > 4; row += 4) f32_tile(t, 4, row, column);
        for (; row + 2 <= t->rows && F32_ROWS > 2; row += 2) f32_tile(t, 2, row, column);
        for (; row < t->rows; row++) f32_tile(t, 1, row, column);
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* Byte i of each lane at the top of a lane, zeros below. */
INLINE __m256i top_byte(__m256i v, const int i)
{
    const char b = (char)i, none = -1;
    const __m128i move = _mm_setr_epi8(none, none, none, b, none, none, none, (char)(b + 4), none, none, none,
                                       (char)(b + 8), none, none, none, (char)(b + 12));
    if (i == 3) return _mm256_and_si256(v, _mm256_set1_epi32((int)0xff000000));
    if (i == 0) return _mm256_slli_epi32(v, 24);
    return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(move));
}

/* Twice the values of the codes in each byte's low bits. */
INLINE __m256i doubled(__m256i codes)
{
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}
#endif

enum { ROW_VECTORS = GEMM4_PANEL / LANES };

/* sum + a line's eight products for all columns, K in order. */
INLINE void add_line(vfloat sum[ROW_VECTORS], const uint8_t *unit, int line, const float *a)
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i bytes[2][ROW_VECTORS];
#else
    vint words[ROW_VECTORS];
#endif
#pragma GCC unroll 16
    for (int v = 0; v < ROW_VECTORS; v++) {
        const uint8_t *from =
            unit + v / VECTORS_A_STRIP * GEMM4_STRIP_BYTES + 64 + 64 * line + v % VECTORS_A_STRIP * 4 * LANES;
#if defined(__AVX2__) && !defined(__AVX512F__)
        const __m256i w = (__m256i)load_words(from);
        bytes[0][v] = doubled(w);
        bytes[1][v] = doubled(_mm256_srli_epi16(w, 4));
#else
        words[v] = load_words(from);
#endif
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        const int j = k / 2 + k % 2 * 4;
        const vfloat x = v_splat(a[k]);
#pragma GCC unroll 16
        for (int v = 0; v < ROW_VECTORS; v++) {
#if defined(__AVX2__) && !defined(__AVX512F__)
            const vfloat value = _mm256_cvtepi32_ps(top_byte(bytes[j % 2][v], j / 2));
#else
            const vfloat value = code_value(words[v], j) * 0x1p25f;
#endif
            sum[v] = v_fma(x, value, sum[v]);
        }
    }
}

/* c[64] += a block's products. All columns side by side, so that no sum waits for the one before. */
INLINE void float_block(const float *a, const uint8_t *unit, int at, float *c)
{
    vfloat sum[ROW_VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < ROW_VECTORS; v++) sum[v] = (vfloat){0};
    add_line(sum, unit, 2 * at, a);
    add_line(sum, unit, 2 * at + 1, a + 8);
#pragma GCC unroll 16
    for (int v = 0; v < ROW_VECTORS; v++) {
        const uint8_t *scales =
            unit + v / VECTORS_A_STRIP * GEMM4_STRIP_BYTES + at * GEMM4_STRIP + v % VECTORS_A_STRIP * LANES;
        v_store(c + v * LANES, v_fma(sum[v], load_scales(scales, BLOCK_POWER), v_load(c + v * LANES)));
    }
}

static void row_f32(const uint8_t *panel, int64_t units, const float *a, float *c, bool accumulate)
{
    if (!accumulate) memset(c, 0, GEMM4_PANEL * sizeof *c);
    for (int64_t block = 0; block < units * GEMM4_BLOCKS; block++, a += 16) {
        const uint8_t *unit = panel + block / GEMM4_BLOCKS * GEMM4_UNIT_BYTES;
        const int at = (int)(block % GEMM4_BLOCKS);
        request_ahead(unit, at, GEMM4_STRIPS);
        float_block(a, unit, at, c);
    }
}

/* Twice a code's value plus 12, in each byte, from a nibble in each byte. */
INLINE vint doubled_plus_12(vint codes)
{
#if defined(__AVX512BW__)
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return (vint)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return (vint)_mm256_shuffle_epi8(table, (__m256i)codes);
#else
    static const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    uint8_t bytes[sizeof(vint)];
    memcpy(bytes, &codes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = table[bytes[i]];
    memcpy(&codes, bytes, sizeof bytes);
    return codes;
#endif
}

static void decode_i8(const uint8_t *panel, int64_t units, uint32_t *codes, float *scales)
{
    for (int64_t u = 0; u < units; u++, panel += GEMM4_UNIT_BYTES)
        for (int strip = 0; strip < GEMM4_STRIPS; strip++) {
            const uint8_t *from = panel + strip * GEMM4_STRIP_BYTES;
            for (int v = 0; v < VECTORS_A_STRIP; v++) {
                const int column = strip * GEMM4_STRIP + v * LANES;
                for (int b = 0; b < GEMM4_BLOCKS; b++)
                    v_store(scales + (u * GEMM4_BLOCKS + b) * GEMM4_PANEL + column,
                            load_scales(from + b * GEMM4_STRIP + v * LANES, 0));
                for (int line = 0; line < GEMM4_LINES; line++) {
                    const vint w = load_words(from + 64 + 64 * line + 4 * v * LANES);
                    const vint low = doubled_plus_12(w & 0x0f0f0f0f),
                               high = doubled_plus_12(w >> 4 & 0x0f0f0f0f);
                    uint32_t *to = codes + (u * GEMM4_WORDS_I8 + 2 * line) * GEMM4_PANEL + column;
                    memcpy(to, &low, sizeof low);
                    memcpy(to + GEMM4_PANEL, &high, sizeof high);
                }
            }
        }
}

typedef int16_t vshort __attribute__((vector_size(4 * LANES)));

/* Unsigned bytes of b times signed ones of a, neighbours added. */
INLINE vshort pair_sums(vint b, vint a)
{
#if defined(__AVX512BW__)
    return (vshort)_mm512_maddubs_epi16((__m512i)b, (__m512i)a);
#elif defined(__AVX2__)
    return (vshort)_mm256_maddubs_epi16((__m256i)b, (__m256i)a);
#else
    const vshort x = (vshort)b, y = (vshort)a;
    return (x & 255) * ((y << 8) >> 8) + (x >> 8 & 255) * (y >> 8);
#endif
}

/* The sums of neighbours times a factor, the same in all lanes. */
INLINE vint add_pairs(vshort v, vshort factor)
{
#if defined(__AVX512BW__)
    return (vint)_mm512_madd_epi16((__m512i)v, (__m512i)factor);
#elif defined(__AVX2__)
    return (vint)_mm256_madd_epi16((__m256i)v, (__m256i)factor);
#else
    return (((vint)((vuint)v << 16) >> 16) + ((vint)v >> 16)) * ((vint)factor >> 16);
#endif
}

/* sum + the dot product of four unsigned bytes of b and four signed ones of a, lane by lane. */
INLINE vint dot4(vint sum, vint b, vint a)
{
#if defined(__AVX512VNNI__)
    return (vint)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
#else
    return sum + add_pairs(pair_sums(b, a), 1 - (vshort){0});
#endif
}

enum { I8_ROWS = LANES == 16 ? 6 : LANES == 8 ? 2 : 1, I8_VECTORS = 2 };

INLINE void i8_block(const gemm4_i8_tile *t, const int rows, int64_t row, int64_t column)
{
    vfloat acc[I8_ROWS][I8_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < I8_VECTORS; j++) acc[i][j] = (vfloat){0};
    const uint32_t *b = t->b + column, *a = t->a + 4 * row * t->lda;
    const float *b_scale = t->b_scale + column, *a_scale = t->a_scale + row * t->lda;
    const int32_t *start = t->start + row * t->lda;
    for (int64_t block = 0; block < t->blocks; block++) {
        vint sum[I8_ROWS][I8_VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int j = 0; j < I8_VECTORS; j++) sum[i][j] = start[i * t->lda + block] - (vint){0};
#pragma GCC unroll 4
        for (int word = 0; word < 4; word++, b += GEMM4_PANEL) {
            vint bv[I8_VECTORS];
#pragma GCC unroll 2
            for (int j = 0; j < I8_VECTORS; j++)
                bv[j] = (vint)v_load((const float *)(const void *)(b + j * LANES));
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                const vint av = (int32_t)a[4 * (i * t->lda + block) + word] - (vint){0};
#pragma GCC unroll 2
                for (int j = 0; j < I8_VECTORS; j++) sum[i][j] = dot4(sum[i][j], bv[j], av);
            }
        }
        vfloat s[I8_VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < I8_VECTORS; j++) s[j] = v_load(b_scale + block * GEMM4_PANEL + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int j = 0; j < I8_VECTORS; j++)
                acc[i][j] = v_fma(__builtin_convertvector(sum[i][j], vfloat),
                                  s[j] * a_scale[i * t->lda + block], acc[i][j]);
    }
    float *c = t->c + row * GEMM4_PANEL + column;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++, c += GEMM4_PANEL)
#pragma GCC unroll 2
        for (int j = 0; j < I8_VECTORS; j++)
            v_store(c + j * LANES, t->accumulate ? acc[i][j] + v_load(c + j * LANES) : acc[i][j]);
}

static void mm_i8(const gemm4_i8_tile *t)
{
    for (int64_t column = 0; column < GEMM4_PANEL; column += I8_VECTORS * LANES) {
        int64_t row = 0;
        for (; row + I8_ROWS <= t->rows; row += I8_ROWS) i8_block(t, I8_ROWS, row, column);
        for (; row + 4 <= t->rows && I8_ROWS > 4; row += 4) i8_block(t, 4, row, column);
        for (; row + 2 <= t->rows && I8_ROWS > 2; row += 2) i8_block(t, 2, row, column);
        for (; row < t->rows; row++) i8_block(t, 1, row, column);
    }
}

static void scale_row(const float *acc, float a_global, const float *b_global, const float *bias, int64_t n,
                      float *out)
{
    for (int64_t c = 0; c < n; c += LANES) {
        const int32_t left = n - c < LANES ? (int32_t)(n - c) : LANES;
        const vfloat zero = {0}, g = v_load_first(b_global + c, left, zero) * a_global;
        vfloat v = v_load_first(acc + c, left, zero) * g;
        if (bias != NULL) v += v_load_first(bias + c, left, zero);
        v_store_first(out + c, left, v);
    }
}

#define GEMM4_ROW_KERNELS                                                                                    \
    .decode_f32 = decode_f32, .decode_blocks = decode_blocks, .mm_blocks = mm_blocks, .row_f32 = row_f32,    \
    .integer_blocks = integer_blocks, .row_blocks = row_blocks, .decode_i8 = decode_i8, .mm_i8 = mm_i8,      \
    .scale_row = scale_row

#endif
