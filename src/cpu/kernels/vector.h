/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * vector.h - LANES floats as one value, one register of the level: 16 (AVX-512), 8 (AVX2) or 4, by the
 * compiler's vector extension. (The compiler would keep a wider type in memory.) Everything is static, so
 * each level's object files have their own copy.
 */
#ifndef QUERN_CPU_VECTOR_H
#define QUERN_CPU_VECTOR_H

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#define LANE_NUMBERS                                                                                         \
    {                                                                                                        \
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15                                                 \
    }
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANES = 8 };
#define LANE_NUMBERS                                                                                         \
    {                                                                                                        \
        0, 1, 2, 3, 4, 5, 6, 7                                                                               \
    }
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
/* A shuffle across 128-bit lanes takes three instructions, so only the last round has them. */
enum { PAIR_LANES = LANES / 2 };
#define PAIR_FIRST 0, 2, 8, 10, 4, 6, 12, 14
#define PAIR_SECOND 1, 3, 9, 11, 5, 7, 13, 15
#define LAST_FIRST 0, 1, 2, 3, 8, 9, 10, 11
#define LAST_SECOND 4, 5, 6, 7, 12, 13, 14, 15
#else
enum { LANES = 4 };
#define LANE_NUMBERS                                                                                         \
    {                                                                                                        \
        0, 1, 2, 3                                                                                           \
    }
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

/* How the neighbours of two vectors meet in the rounds of lane_sums(), and in a last one where PAIR_LANES is
 * less than LANES. */
#if !defined(PAIR_FIRST)
enum { PAIR_LANES = LANES };
#define PAIR_FIRST EVEN_LANES
#define PAIR_SECOND ODD_LANES
#define LAST_FIRST EVEN_LANES
#define LAST_SECOND ODD_LANES
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE vfloat v_load(const float *p)
{
    vfloat v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* v in a register. (The compiler would load it anew for each product that it goes into.) */
INLINE vfloat v_keep(vfloat v)
{
#if defined(__AVX512F__)
    __asm__("" : "+v"(v));
#elif defined(__FMA__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

INLINE void v_store(float *p, vfloat v)
{
    memcpy(p, &v, sizeof v);
}

INLINE vfloat v_splat(float x)
{
    return x - (vfloat){0};
}

INLINE vfloat v_select(vint mask, vfloat yes, vfloat no)
{
    return (vfloat)(((vint)yes & mask) | ((vint)no & ~mask));
}

/* Whether a lane of a mask is set. */
INLINE bool v_any(vint mask)
{
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__FMA__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    uint64_t pairs[LANES / 2], any = 0;
    memcpy(pairs, &mask, sizeof mask);
    for (int i = 0; i < LANES / 2; i++) any |= pairs[i];
    return any != 0;
#endif
}

/* A mask of columns [lo, hi) in a vector whose first column is `at`. */
INLINE vint lanes_in(int32_t at, int32_t lo, int32_t hi)
{
    const vint lane = (vint)LANE_NUMBERS + at;
    return (lane >= lo) & (lane < hi);
}

/* The first n <= LANES of a vector in memory; `pad` in the others. (A copy of unknown length would become a
 * string instruction, which takes as long as a row of scores.) */
INLINE vfloat v_load_first(const float *p, int32_t n, vfloat pad)
{
#if defined(__AVX512F__)
    return _mm512_mask_loadu_ps(pad, (__mmask16)((1u << n) - 1), p);
#elif defined(__FMA__)
    const vint first = lanes_in(0, 0, n);
    return v_select(first, _mm256_maskload_ps(p, (__m256i)first), pad);
#else
    for (int32_t i = 0; i < n; i++) pad[i] = p[i];
    return pad;
#endif
}

INLINE void v_store_first(float *p, int32_t n, vfloat v)
{
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
#elif defined(__FMA__)
    _mm256_maskstore_ps(p, (__m256i)lanes_in(0, 0, n), v);
#else
    for (int32_t i = 0; i < n; i++) p[i] = v[i];
#endif
}

/* LANES bytes as integers, and the low bytes of integers that fit. (The compiler's own conversions go through
 * scalars.) */
INLINE vint v_load_bytes(const uint8_t *p)
{
#if defined(__AVX512F__)
    return (vint)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__FMA__)
    return (vint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vint v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE void v_store_bytes(uint8_t *p, vint v)
{
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__FMA__)
    const __m256i words = _mm256_packus_epi32((__m256i)v, (__m256i)v),
                  bytes = _mm256_packus_epi16(words, words);
    const int64_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    const int64_t both = (low & 0xffffffff) | (int64_t)((uint64_t)high << 32);
    memcpy(p, &both, sizeof both);
#else
    for (int i = 0; i < LANES; i++) p[i] = (uint8_t)v[i];
#endif
}

/* a b + c in one rounding where the level has FMA, whatever -ffp-contract says. */
INLINE vfloat v_fma(vfloat a, vfloat b, vfloat c)
{
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

/* The larger of each lane; `than` where either is NaN. */
INLINE vfloat v_max(vfloat v, vfloat than)
{
#if defined(__AVX512F__)
    return _mm512_max_ps(v, than);
#elif defined(__FMA__)
    return _mm256_max_ps(v, than);
#else
    return v_select(v > than, v, than);
#endif
}

/* Lane i of the result is the sum, or the maximum, of vector i's lanes, of the first `rows` vectors. Every
 * step adds neighbours of two vectors and lays them side by side, so LANES rows take 3 (LANES - 1)
 * instructions. A lane's tree is the same whatever `rows`. Destroys v. */
INLINE vfloat lane_sums(vfloat v[LANES], int rows)
{
    const vfloat none = {0};
    for (int n = PAIR_LANES; n > 1; n /= 2, rows = (rows + 1) / 2)
        for (int i = 0; i < rows; i += 2) {
            const vfloat next = i + 1 < rows ? v[i + 1] : none;
            v[i / 2] = __builtin_shufflevector(v[i], next, PAIR_FIRST) +
                       __builtin_shufflevector(v[i], next, PAIR_SECOND);
        }
    if ((int)PAIR_LANES == (int)LANES) return v[0];
    const vfloat next = rows > 1 ? v[1] : none;
    return __builtin_shufflevector(v[0], next, LAST_FIRST) + __builtin_shufflevector(v[0], next, LAST_SECOND);
}

INLINE vfloat lane_maxima(vfloat v[LANES], int rows)
{
    const vfloat none = v_splat(-INFINITY);
    for (int n = PAIR_LANES; n > 1; n /= 2, rows = (rows + 1) / 2)
        for (int i = 0; i < rows; i += 2) {
            const vfloat next = i + 1 < rows ? v[i + 1] : none;
            v[i / 2] = v_max(__builtin_shufflevector(v[i], next, PAIR_FIRST),
                             __builtin_shufflevector(v[i], next, PAIR_SECOND));
        }
    if ((int)PAIR_LANES == (int)LANES) return v[0];
    const vfloat next = rows > 1 ? v[1] : none;
    return v_max(__builtin_shufflevector(v[0], next, LAST_FIRST),
                 __builtin_shufflevector(v[0], next, LAST_SECOND));
}

/* Lane j of vector i becomes lane i of vector j: log2 LANES rounds. With 16 lanes, two within 128-bit lanes
 * and two of whole ones, which need no registers of indices; else each interleaves the two halves. */
INLINE void v_transpose(vfloat v[LANES])
{
#if defined(__AVX512F__)
    __m512 within[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        const __m512d low0 = (__m512d)_mm512_unpacklo_ps(v[i], v[i + 1]),
                      low2 = (__m512d)_mm512_unpacklo_ps(v[i + 2], v[i + 3]),
                      high0 = (__m512d)_mm512_unpackhi_ps(v[i], v[i + 1]),
                      high2 = (__m512d)_mm512_unpackhi_ps(v[i + 2], v[i + 3]);
        within[i] = (__m512)_mm512_unpacklo_pd(low0, low2);
        within[i + 1] = (__m512)_mm512_unpackhi_pd(low0, low2);
        within[i + 2] = (__m512)_mm512_unpacklo_pd(high0, high2);
        within[i + 3] = (__m512)_mm512_unpackhi_pd(high0, high2);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512 even0 = _mm512_shuffle_f32x4(within[j], within[4 + j], 0x88),
                     odd0 = _mm512_shuffle_f32x4(within[j], within[4 + j], 0xdd),
                     even2 = _mm512_shuffle_f32x4(within[8 + j], within[12 + j], 0x88),
                     odd2 = _mm512_shuffle_f32x4(within[8 + j], within[12 + j], 0xdd);
        v[j] = (vfloat)_mm512_shuffle_f32x4(even0, even2, 0x88);
        v[4 + j] = (vfloat)_mm512_shuffle_f32x4(odd0, odd2, 0x88);
        v[8 + j] = (vfloat)_mm512_shuffle_f32x4(even0, even2, 0xdd);
        v[12 + j] = (vfloat)_mm512_shuffle_f32x4(odd0, odd2, 0xdd);
    }
#else
    for (int n = 1; n < LANES; n *= 2) {
        vfloat half[LANES];
        memcpy(half, v, sizeof half);
        for (int i = 0; i < LANES / 2; i++) {
            v[2 * i] = __builtin_shufflevector(half[i], half[i + LANES / 2], ZIP_LOW);
            v[2 * i + 1] = __builtin_shufflevector(half[i], half[i + LANES / 2], ZIP_HIGH);
        }
    }
#endif
}

/* The vectors at rows[i] + at, transposed. Four floats of a row go into a 128-bit lane on their way from
 * memory, so that half of the rounds need no shuffles, and those of the others stay within lanes. */
INLINE void v_load_transposed(const float *const rows[LANES], int64_t at, vfloat v[LANES])
{
#if defined(__AVX512F__)
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        __m512 a[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            a[r] = _mm512_castps128_ps512(_mm_loadu_ps(rows[r] + at + i));
            a[r] = _mm512_mask_broadcast_f32x4(a[r], 0x00f0, _mm_loadu_ps(rows[r + 4] + at + i));
            a[r] = _mm512_mask_broadcast_f32x4(a[r], 0x0f00, _mm_loadu_ps(rows[r + 8] + at + i));
            a[r] = _mm512_mask_broadcast_f32x4(a[r], 0xf000, _mm_loadu_ps(rows[r + 12] + at + i));
        }
        const __m512d low0 = (__m512d)_mm512_unpacklo_ps(a[0], a[1]),
                      low2 = (__m512d)_mm512_unpacklo_ps(a[2], a[3]),
                      high0 = (__m512d)_mm512_unpackhi_ps(a[0], a[1]),
                      high2 = (__m512d)_mm512_unpackhi_ps(a[2], a[3]);
        v[i] = (vfloat)_mm512_unpacklo_pd(low0, low2);
        v[i + 1] = (vfloat)_mm512_unpackhi_pd(low0, low2);
        v[i + 2] = (vfloat)_mm512_unpacklo_pd(high0, high2);
        v[i + 3] = (vfloat)_mm512_unpackhi_pd(high0, high2);
    }
#elif defined(__FMA__)
#pragma GCC unroll 2
    for (int i = 0; i < LANES; i += 4) {
        __m256 a[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) a[r] = _mm256_loadu2_m128(rows[r + 4] + at + i, rows[r] + at + i);
        const __m256d low0 = (__m256d)_mm256_unpacklo_ps(a[0], a[1]),
                      low2 = (__m256d)_mm256_unpacklo_ps(a[2], a[3]),
                      high0 = (__m256d)_mm256_unpackhi_ps(a[0], a[1]),
                      high2 = (__m256d)_mm256_unpackhi_ps(a[2], a[3]);
        v[i] = (vfloat)_mm256_unpacklo_pd(low0, low2);
        v[i + 1] = (vfloat)_mm256_unpackhi_pd(low0, low2);
        v[i + 2] = (vfloat)_mm256_unpacklo_pd(high0, high2);
        v[i + 3] = (vfloat)_mm256_unpackhi_pd(high0, high2);
    }
#else
    for (int i = 0; i < LANES; i++) v[i] = v_load(rows[i] + at);
    v_transpose(v);
#endif
}

/* The sum of the lanes by a fixed tree, so that a row's result depends only on the row. */
INLINE float sum_of(vfloat v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#elif defined(__FMA__)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
#endif
}

/* Tests the bits, because compilers and linters warn about comparing a value with itself. */
INLINE vint v_is_nan(vfloat v)
{
    return (vint)((vuint)v & 0x7fffffffu) > 0x7f800000;
}

/*
 * 2^x for x <= 127, within 2.4e-7 relative; NaN stays NaN, -inf gives 0. x = n + f with n the nearest
 * integer, 2^f by a minimax polynomial of degree 5 on [-0.5, 0.5] (error 7.5e-8). AVX-512 scales by 2^n in
 * one instruction, which saves a compare, a shift, an add and two subtractions: 2.8 cycles a vector instead
 * of 3.5. The other levels add n to the exponent bits and give 0 below -126. (AVX2: NaN converts to the
 * integer INT_MIN, whose shifted bits are 0, so it passes.)
 */
INLINE vfloat v_exp2(vfloat x)
{
#if defined(__AVX512F__)
    const vfloat n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - n;
#elif defined(__FMA__)
    const __m256i n = _mm256_cvtps_epi32(x);
    const vfloat f = x - _mm256_cvtepi32_ps(n);
#else
    const vint tiny = x < -126.0f;
    const vfloat clamped = v_select(tiny, v_splat(-126.0f), x);
    const vfloat shifted = clamped + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    const vfloat f = clamped - (shifted - 12582912.0f);
#endif
    vfloat p = v_fma(f, v_splat(0x1.5c08e4p-10f), v_splat(0x1.3d0c54p-7f));
    p = v_fma(p, f, v_splat(0x1.c6b6e4p-5f));
    p = v_fma(p, f, v_splat(0x1.ebf918p-3f));
    p = v_fma(p, f, v_splat(0x1.62e428p-1f));
    p = v_fma(p, f, v_splat(0x1.000002p+0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n); /* f is NaN where n is -inf, and the result is still 0 */
#elif defined(__FMA__)
    const __m256 kept = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm256_and_ps(kept, (__m256)_mm256_add_epi32((__m256i)p, _mm256_slli_epi32(n, 23)));
#else
    /* Unsigned, because a NaN's sums overflow int. */
    typedef uint32_t vbits __attribute__((vector_size(sizeof(vfloat))));
    vfloat y = (vfloat)((vbits)p + ((vbits)shifted << 23));
    y = v_select(tiny, (vfloat){0}, y);
    return v_select(v_is_nan(x), x, y);
#endif
}

/* Round to nearest even; NaN stays NaN. */
INLINE vhalf v_narrow(vfloat v)
{
#if defined(__AVX512BF16__)
    return (vhalf)_mm512_cvtneps_pbh(v);
#elif defined(__AVX512F__)
    const __m512i u = (__m512i)v, odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
    const __m512i kept =
        _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    return (vhalf)_mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#elif defined(__FMA__)
    const __m256i u = (__m256i)v, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i kept =
        (__m256i)_mm256_blendv_ps((__m256)rounded, (__m256)quiet, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(kept, 16);
    return (vhalf)_mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
#else
    const vuint u = (vuint)v;
    const vuint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vuint quiet = (u >> 16) | 0x40u;
    const vuint nan = (vuint)v_is_nan(v);
    return __builtin_convertvector((rounded & ~nan) | (quiet & nan), vhalf);
#endif
}

/* Words of two bf16 values, `even` in the lower halves. */
INLINE vuint v_pairs(vfloat even, vfloat odd)
{
#if defined(__AVX512BF16__)
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                                23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vuint)_mm512_permutexvar_epi16(interleave,
                                           (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
#else
    return __builtin_convertvector(v_narrow(even), vuint) | __builtin_convertvector(v_narrow(odd), vuint)
                                                                << 16;
#endif
}

#endif
