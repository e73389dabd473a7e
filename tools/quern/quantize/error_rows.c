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
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint16_t halves16 __attribute__((vector_size(32)));

/* Sanitizers do not stand the resolver that picks a version before they have started. */
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&                          \
    !defined(__SANITIZE_THREAD__)
#define CLONED __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

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

INLINE float sum_of(floats16 v)
{
    const floats8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const floats4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* Of values that are not negative, whose bits order as they do. */
INLINE uint32_t largest_bits(words16 v)
{
    typedef uint32_t words8 __attribute__((vector_size(32)));
    typedef uint32_t words4 __attribute__((vector_size(16)));
    const words8 l = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                 h = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), m = (words8)(l > h);
    const words8 a = (l & m) | (h & ~m);
    const words4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7),
                 k = (words4)(c > d), b = (c & k) | (d & ~k);
    const uint32_t x = b[0] > b[2] ? b[0] : b[2], y = b[1] > b[3] ? b[1] : b[3];
    return x > y ? x : y;
}

INLINE uint32_t row_largest(const void *row, const quern_dtype dtype, int64_t columns)
{
    words16 most = {0};
    int64_t c = 0;
    for (; c + 16 <= columns; c += 16) {
        const words16 w = (words16)load(row, dtype, c) & 0x7fffffff, m = (words16)(w > most);
        most = (w & m) | (most & ~m);
    }
    uint32_t largest = largest_bits(most);
    for (; c < columns; c++) {
        float tail[16] = {0};
        memcpy(tail, (const char *)row + c * (int64_t)quern_dtype_size(dtype), quern_dtype_size(dtype));
        const uint32_t one = largest_bits((words16)load(tail, dtype, 0) & 0x7fffffff);
        largest = one > largest ? one : largest;
    }
    return largest;
}

CLONED static uint32_t largest_f32(const float *x, int64_t columns)
{
    return row_largest(x, QUERN_F32, columns);
}

CLONED static uint32_t largest_bf16(const uint16_t *x, int64_t columns)
{
    return row_largest(x, QUERN_BF16, columns);
}

CLONED static uint32_t largest_f16(const uint16_t *x, int64_t columns)
{
    return row_largest(x, QUERN_F16, columns);
}

uint32_t largest_of_values(const matrix_values *x, int64_t rows, int64_t columns)
{
    uint32_t largest = 0;
    for (int64_t r = 0; r < rows; r++) {
        const char *row = (const char *)x->data + r * x->stride * (int64_t)quern_dtype_size(x->dtype);
        const uint32_t one = x->dtype == QUERN_F32    ? largest_f32((const float *)row, columns)
                             : x->dtype == QUERN_BF16 ? largest_bf16((const uint16_t *)row, columns)
                                                      : largest_f16((const uint16_t *)row, columns);
        largest = one > largest ? one : largest;
    }
    return largest;
}

/* What a row needs besides its values. */
typedef struct error_rule {
    float unit, step[256]; /* step: of each scale byte, squared and times the unit's square */
} error_rule;

INLINE void row_errors(const error_rule *rule, const void *x, const quern_dtype dtype, const float *y,
                       const uint8_t *scales, int64_t columns, module_error *e)
{
    double error = 0, square = 0, worst = e->worst;
    int64_t saturated = 0;
    for (int64_t c = 0; c < columns; c += 16) {
        const floats16 value = load(x, dtype, c) * rule->unit,
                       lost = value - load(y, QUERN_F32, c) * rule->unit;
        const floats16 lost2 = lost * lost;
        const float block_error = sum_of(lost2), block_square = sum_of(value * value);
        error += block_error;
        square += block_square;
        /* without a division: this block's error is the larger share */
        if (block_error > worst * block_square && block_square > 0)
            worst = (double)block_error / block_square;
        saturated += float_from_bits(largest_bits((words16)lost2)) > rule->step[scales[c / 16]];
    }
    e->error += error;
    e->square += square;
    e->worst = worst;
    e->saturated += saturated;
}

CLONED static void errors_f32(const error_rule *rule, const float *x, const float *y, const uint8_t *scales,
                              int64_t columns, module_error *e)
{
    row_errors(rule, x, QUERN_F32, y, scales, columns, e);
}

CLONED static void errors_bf16(const error_rule *rule, const uint16_t *x, const float *y,
                               const uint8_t *scales, int64_t columns, module_error *e)
{
    row_errors(rule, x, QUERN_BF16, y, scales, columns, e);
}

CLONED static void errors_f16(const error_rule *rule, const uint16_t *x, const float *y,
                              const uint8_t *scales, int64_t columns, module_error *e)
{
    row_errors(rule, x, QUERN_F16, y, scales, columns, e);
}

void add_errors(const matrix_values *x, const float *y, const uint8_t *scales, float step, float unit,
                int64_t rows, int64_t columns, module_error *e)
{
    error_rule rule = {.unit = unit};
    for (int i = 0; i < 256; i++) { /* a block of zeros, scale 0, saturates nowhere */
        const float beyond = i == 0 ? INFINITY : e4m3_byte_value((uint8_t)i) * step * unit;
        rule.step[i] = beyond * beyond;
    }
    for (int64_t r = 0; r < rows; r++, y += columns, scales += columns / 16) {
        const char *row = (const char *)x->data + r * x->stride * (int64_t)quern_dtype_size(x->dtype);
        if (x->dtype == QUERN_F32) errors_f32(&rule, (const float *)row, y, scales, columns, e);
        else if (x->dtype == QUERN_BF16) errors_bf16(&rule, (const uint16_t *)row, y, scales, columns, e);
        else errors_f16(&rule, (const uint16_t *)row, y, scales, columns, e);
    }
}
