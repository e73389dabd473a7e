/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_pairs.h - two vectors of a row at once, in the order that its dtype is widened in.
 *
 * A register of bf16 becomes its even channels by a shift and its odd ones by a mask, where widening them in
 * memory's order takes a shuffle each. So the first vector has the even channels of 2 LANES, the second the
 * odd ones; of f32 and f16 they have the first and the second half. What is multiplied with such rows again
 * and again is kept in their order (pack()), what is met once is shuffled. The channels after the last whole
 * pair stand in memory's order everywhere.
 */
#ifndef QUERN_CPU_HYPER_PAIRS_H
#define QUERN_CPU_HYPER_PAIRS_H

#include "cpu/kernels/vector_dtype.h"

enum { PAIR = 2 * LANES };

typedef struct vpair {
    vfloat first, second;
} vpair;

INLINE vfloat load_first(const void *p, const quern_dtype dtype, int64_t at)
{
    if (dtype != QUERN_BF16) return load_as(p, dtype, at);
    vuint words;
    memcpy(&words, (const uint16_t *)p + at, sizeof words);
    return (vfloat)(words << 16);
}

INLINE vfloat load_second(const void *p, const quern_dtype dtype, int64_t at)
{
    if (dtype != QUERN_BF16) return load_as(p, dtype, at + LANES);
    vuint words;
    memcpy(&words, (const uint16_t *)p + at, sizeof words);
    return (vfloat)(words & 0xffff0000u);
}

INLINE vpair load_two(const void *p, const quern_dtype dtype, int64_t at)
{
    return (vpair){load_first(p, dtype, at), load_second(p, dtype, at)};
}

/* f32 from memory's order to that of `dtype`, and back. */
INLINE vpair in_order_of(const quern_dtype dtype, vpair v)
{
    if (dtype != QUERN_BF16) return v;
    return (vpair){__builtin_shufflevector(v.first, v.second, EVEN_LANES),
                   __builtin_shufflevector(v.first, v.second, ODD_LANES)};
}

INLINE vpair out_of_order(const quern_dtype dtype, vpair v)
{
    if (dtype != QUERN_BF16) return v;
    return (vpair){__builtin_shufflevector(v.first, v.second, ZIP_LOW),
                   __builtin_shufflevector(v.first, v.second, ZIP_HIGH)};
}

/* `order`: of the vectors; it is `dtype`, or `dtype` is f32. */
INLINE void store_two(void *p, const quern_dtype dtype, const quern_dtype order, int64_t at, vpair v,
                      const bool stream)
{
    if (dtype == QUERN_BF16) {
        const vuint words = v_pairs(v.first, v.second);
        uint16_t *to = (uint16_t *)p + at;
#if defined(__AVX512F__)
        if (stream) _mm512_stream_si512((__m512i *)to, (__m512i)words);
#elif defined(__FMA__)
        if (stream) _mm256_stream_si256((__m256i *)to, (__m256i)words);
#else
        if (stream) memcpy(to, &words, sizeof words);
#endif
        else memcpy(to, &words, sizeof words);
        return;
    }
    v = out_of_order(order, v);
    if (stream) {
        stream_as(p, dtype, at, v.first);
        stream_as(p, dtype, at + LANES, v.second);
    } else {
        store_as(p, dtype, at, v.first);
        store_as(p, dtype, at + LANES, v.second);
    }
}

#endif
