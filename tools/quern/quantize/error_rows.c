/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * error_rows.c - sweeps over blocks of 16 values. A block's sums run by halves (16, 8, 4, 2, 1), so that each
 * level of the CPU gives the same bits; the compiler makes a version for each where it can.
 */
#include "quantize/error_rows.h"

#include "core/half.h"

#include <math.h>
#include <string.h>

typedef float floats16 __attribute__((vector_size(64)));
typedef double doubles8 __attribute__((vector_size(64)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef uint16_t halves32 __attribute__((vector_size(64)));

/* Versions for what x86 CPUs have; the sums are the same. */
#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define MIDDLE __attribute__((target("avx2")))
#else
#define WIDE
#define MIDDLE
#endif
#define INLINE static inline __attribute__((always_inline))

/* Lane i: table[index[i] % 16]. */
#if defined(__clang__)
INLINE floats16 permute16(floats16 table, words16 index)
{
    floats16 out;
    for (int i = 0; i < 16; i++) out[i] = table[index[i] & 15];
    return out;
}
#else
INLINE floats16 permute16(floats16 table, words16 index)
{
    return __builtin_shuffle(table, index);
}
#endif

INLINE floats16 load(const void *row, quern_dtype dtype, int64_t at)
{
    floats16 f;
    halves16 h;
    if (dtype == QUERN_F32) {
        memcpy(&f, (const float *)row + at, sizeof f);
        return f;
    }
    memcpy(&h, (const uint16_t *)row + at, sizeof h);
    const words16 w = __builtin_convertvector(h, words16);
    if (dtype == QUERN_BF16) return (floats16)(w << 16);
    const words16 magnitude = (w & 0x7fff) << 13, sign = (w & 0x8000) << 16;
    const floats16 widened = (floats16)magnitude * 0x1p112f; /* exact: of subnormals too */
    const words16 infinite = (words16)(magnitude >= 0x0f800000) & 0x7f800000;
    return (floats16)((words16)widened | sign | infinite);
}

INLINE words16 larger(words16 a, words16 b)
{
    const words16 m = (words16)(a > b);
    return (a & m) | (b & ~m);
}

INLINE uint32_t largest_of(words16 v)
{
    uint32_t most = 0;
    for (int i = 0; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* The halves of runs of `run` lanes: of a's and then of b's. */
#define FIRST_HALVES(a, b, run)                                                                              \
    ((run) == 16  ? __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)    \
     : (run) == 8 ? __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)  \
     : (run) == 4                                                                                            \
         ? __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)           \
         : __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30))
#define LAST_HALVES(a, b, run)                                                                               \
    ((run) == 16                                                                                             \
         ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)       \
     : (run) == 8                                                                                            \
         ? __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)         \
     : (run) == 4                                                                                            \
         ? __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31)         \
         : __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))

/* Lane i: the sum, by halves, of v[i]'s lanes. */
INLINE floats16 sums_of(const floats16 v[16])
{
    floats16 u[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        u[i] = FIRST_HALVES(v[2 * i], v[2 * i + 1], 16) + LAST_HALVES(v[2 * i], v[2 * i + 1], 16);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        u[i] = FIRST_HALVES(u[2 * i], u[2 * i + 1], 8) + LAST_HALVES(u[2 * i], u[2 * i + 1], 8);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        u[i] = FIRST_HALVES(u[2 * i], u[2 * i + 1], 4) + LAST_HALVES(u[2 * i], u[2 * i + 1], 4);
    return FIRST_HALVES(u[0], u[1], 2) + LAST_HALVES(u[0], u[1], 2);
}

INLINE uint32_t row_largest(const void *row, const quern_dtype dtype, int64_t columns)
{
    words16 most = {0};
    int64_t c = 0;
    for (; c + 16 <= columns; c += 16) {
        most = larger((words16)load(row, dtype, c) & 0x7fffffff, most);
    }
    uint32_t largest = largest_of(most);
    for (; c < columns; c++) {
        float tail[16] = {0};
        memcpy(tail, (const char *)row + c * (int64_t)quern_dtype_size(dtype), quern_dtype_size(dtype));
        const uint32_t one = largest_of((words16)load(tail, dtype, 0) & 0x7fffffff);
        largest = one > largest ? one : largest;
    }
    return largest;
}

INLINE uint32_t largest_bf16(const uint16_t *x, int64_t columns)
{
    halves32 most = {0};
    int64_t i = 0;
    uint16_t largest = 0;
    for (; i + 32 <= columns; i += 32) {
        halves32 h;
        memcpy(&h, x + i, sizeof h);
        h &= 0x7fff;
        const halves32 m = (halves32)(h > most);
        most = (h & m) | (most & ~m);
    }
    for (int k = 0; k < 32; k++) largest = most[k] > largest ? most[k] : largest;
    for (; i < columns; i++) largest = (x[i] & 0x7fff) > largest ? x[i] & 0x7fff : largest;
    return (uint32_t)largest << 16;
}

INLINE uint32_t largest_as(const void *row, quern_dtype dtype, int64_t columns)
{
    if (dtype == QUERN_BF16) return largest_bf16(row, columns);
    return dtype == QUERN_F32 ? row_largest(row, QUERN_F32, columns) : row_largest(row, QUERN_F16, columns);
}

WIDE static uint32_t largest_wide(const void *row, quern_dtype dtype, int64_t columns)
{
    return largest_as(row, dtype, columns);
}

MIDDLE static uint32_t largest_middle(const void *row, quern_dtype dtype, int64_t columns)
{
    return largest_as(row, dtype, columns);
}

static uint32_t largest_plain(const void *row, quern_dtype dtype, int64_t columns)
{
    return largest_as(row, dtype, columns);
}

/* 2: WIDE, 1: MIDDLE, 0: neither. */
static int width_of_cpu(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    return __builtin_cpu_supports("avx2") ? 1 : 0;
#else
    return 0;
#endif
}

uint32_t largest_of_values(const matrix_values *x, int64_t rows, int64_t columns)
{
    const int width = width_of_cpu();
    uint32_t largest = 0;
    for (int64_t r = 0; r < rows; r++) {
        const char *row = (const char *)x->data + r * x->stride * (int64_t)quern_dtype_size(x->dtype);
        const uint32_t one = width == 2   ? largest_wide(row, x->dtype, columns)
                             : width == 1 ? largest_middle(row, x->dtype, columns)
                                          : largest_plain(row, x->dtype, columns);
        largest = one > largest ? one : largest;
    }
    return largest;
}

/* What a row needs besides its values, by scale byte. A value of a code is fl(fl(code scale) global). */
typedef struct error_rule {
    float unit, global, scale[256];
    bool any_scale;    /* a block's scale may be any, not its largest value's sixth, rounded */
    float beyond[256]; /* half a code's step in units, squared: a larger error is saturation */
} error_rule;

/* The values of a block's 16 codes. */
INLINE floats16 decode(const uint8_t *codes, float scale, float global, const bool permute)
{
    uint32_t half[2];
    memcpy(half, codes, sizeof half);
    const words16 both = {half[0], half[0], half[0], half[0], half[0], half[0], half[0], half[0],
                          half[1], half[1], half[1], half[1], half[1], half[1], half[1], half[1]};
    const words16 code = both >> (words16){0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    if (permute) {
        const floats16 table = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
        return permute16(table * scale * global, code);
    }
    /* Two bits of exponent and one of mantissa, as f32 has them: right from 1 on. Below, 0.5 + bits / 4
     * stands for bits / 2. No step meets a subnormal, which some CPUs multiply slowly. */
    const words16 bits = code & 7;
    const floats16 plain = (floats16)((bits << 22) + 0x3f000000), small = plain + plain - 1.0f;
    const words16 is_small = (words16)(bits < 2);
    const words16 magnitude = ((words16)small & is_small) | ((words16)plain & ~is_small);
    return (floats16)(magnitude | (code & 8) << 28) * scale * global;
}

/* Sums over the groups of a row, a lane a block of each. */
typedef struct row_sums {
    doubles8 error[2], square[2];
    floats16 worst;
    int64_t saturated;
} row_sums;

INLINE void add_lanes(doubles8 sum[2], floats16 v)
{
    sum[0] += __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), doubles8);
    sum[1] += __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), doubles8);
}

INLINE bool any_of(words16 v)
{
    uint32_t any = 0;
    for (int i = 0; i < 16; i++) any |= v[i];
    return any != 0;
}

/* Whether a block may saturate: an E4M3 scale that is normal and no more than rounded keeps values below 7
 * scale, half a step beyond 6. */
INLINE bool may_saturate(const uint8_t *scales, const int blocks)
{
    bytes16 s = {0};
    uint64_t any[2];
    memset(&s, 8, sizeof s);
    if (blocks == 16) memcpy(&s, scales, sizeof s);
    else memcpy(&s, scales, 1);
    s = (bytes16)(s < 8) | (bytes16)(s == 0x7e);
    memcpy(any, &s, sizeof any);
    return (any[0] | any[1]) != 0;
}

/* 16 blocks side by side, or one. */
INLINE void group_errors(const error_rule *rule, const void *x, const quern_dtype dtype, const uint8_t *codes,
                         const uint8_t *scales, int64_t at, const int blocks, const bool permute,
                         const bool scaled, row_sums *sums)
{
    floats16 lost[16], square[16];
    codes += at / 2;
    scales += at / 16;
    for (int b = blocks; b < 16; b++) lost[b] = square[b] = (floats16){0};
#pragma GCC unroll 16
    for (int b = 0; b < blocks; b++) {
        const floats16 value = load(x, dtype, at + 16 * b);
        const floats16 one = value - decode(codes + 8 * b, rule->scale[scales[b]], rule->global, permute);
        lost[b] = scaled ? (one * rule->unit) * (one * rule->unit) : one * one;
        square[b] = scaled ? (value * rule->unit) * (value * rule->unit) : value * value;
    }
    const int looked_at = rule->any_scale || may_saturate(scales, blocks) ? blocks : 0;
    for (int b = 0; b < looked_at; b++)
        sums->saturated += any_of((words16)(lost[b] > rule->beyond[scales[b]]));
    const floats16 errors = sums_of(lost), squares = sums_of(square), share = errors / squares;
    const words16 worse = (words16)(share > sums->worst); /* not where a block of zeros makes a NaN */
    sums->worst = (floats16)(((words16)share & worse) | ((words16)sums->worst & ~worse));
    add_lanes(sums->error, errors);
    add_lanes(sums->square, squares);
}

INLINE void row_errors(const error_rule *rule, const void *x, const quern_dtype dtype, const uint8_t *codes,
                       const uint8_t *scales, int64_t columns, const bool permute, const bool scaled,
                       module_error *e)
{
    row_sums sums = {0};
    int64_t at = 0;
    for (; at + 256 <= columns; at += 256)
        group_errors(rule, x, dtype, codes, scales, at, 16, permute, scaled, &sums);
    for (; at < columns; at += 16) group_errors(rule, x, dtype, codes, scales, at, 1, permute, scaled, &sums);
    for (int i = 0; i < 16; i++) {
        e->error += sums.error[i / 8][i % 8];
        e->square += sums.square[i / 8][i % 8];
        e->worst = (double)sums.worst[i] > e->worst ? (double)sums.worst[i] : e->worst;
    }
    e->saturated += sums.saturated;
}

INLINE void errors_as(const error_rule *rule, const void *x, quern_dtype dtype, const uint8_t *codes,
                      const uint8_t *scales, int64_t columns, const bool permute, module_error *e)
{
    if (rule->unit != 1.0f && dtype == QUERN_BF16)
        row_errors(rule, x, QUERN_BF16, codes, scales, columns, permute, true, e);
    else if (dtype == QUERN_BF16) row_errors(rule, x, QUERN_BF16, codes, scales, columns, permute, false, e);
    else if (dtype == QUERN_F32) row_errors(rule, x, QUERN_F32, codes, scales, columns, permute, true, e);
    else row_errors(rule, x, QUERN_F16, codes, scales, columns, permute, true, e);
}

WIDE static void errors_wide(const error_rule *rule, const void *x, quern_dtype dtype, const uint8_t *codes,
                             const uint8_t *scales, int64_t columns, module_error *e)
{
    errors_as(rule, x, dtype, codes, scales, columns, true, e);
}

MIDDLE static void errors_middle(const error_rule *rule, const void *x, quern_dtype dtype,
                                 const uint8_t *codes, const uint8_t *scales, int64_t columns,
                                 module_error *e)
{
    errors_as(rule, x, dtype, codes, scales, columns, false, e);
}

static void errors_plain(const error_rule *rule, const void *x, quern_dtype dtype, const uint8_t *codes,
                         const uint8_t *scales, int64_t columns, module_error *e)
{
    errors_as(rule, x, dtype, codes, scales, columns, false, e);
}

/* A power of two that brings the largest value near 1 where squares would leave f32. */
static float unit_of(float largest)
{
    const int exponent = largest > 0.0f && isfinite(largest) ? ilogbf(largest) : 0;
    if (exponent > -32 && exponent < 32) return 1.0f;
    return ldexpf(1.0f, exponent > 126 ? -126 : exponent < -126 ? 126 : -exponent);
}

static void make_rule(const coded_rows *coded, error_rule *rule)
{
    const float global = coded->global;
    const bool reciprocal = coded->reciprocal;
    const float largest = (reciprocal ? 1.0f / global : global) * 2688.0f;
    rule->unit = unit_of(coded->largest > 0.0f ? coded->largest : largest);
    rule->global = reciprocal ? 1.0f : global;
    rule->any_scale = coded->any_scale;
    for (int i = 0; i < 256; i++) {
        const float scale = e4m3_byte_value((uint8_t)i);
        rule->scale[i] = reciprocal ? scale / global : scale;
        const float beyond = rule->scale[i] * rule->global * rule->unit;
        rule->beyond[i] = i == 0 ? INFINITY : beyond * beyond; /* a block of zeros saturates nowhere */
    }
}

void add_errors(const matrix_values *x, const coded_rows *coded, int64_t rows, int64_t columns,
                module_error *e)
{
    const int width = width_of_cpu();
    const uint8_t *codes = coded->codes, *scales = coded->scales;
    error_rule rule;
    make_rule(coded, &rule);
    for (int64_t r = 0; r < rows; r++, codes += columns / 2, scales += columns / 16) {
        const char *row = (const char *)x->data + r * x->stride * (int64_t)quern_dtype_size(x->dtype);
        if (width == 2) errors_wide(&rule, row, x->dtype, codes, scales, columns, e);
        else if (width == 1) errors_middle(&rule, row, x->dtype, codes, scales, columns, e);
        else errors_plain(&rule, row, x->dtype, codes, scales, columns, e);
    }
}
