/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nonfinite.h - infinities and NaN beside masks. A masked weight is 0, but 0 * inf is NaN, so the operands of
 * P V, dS K, P^T dO and dS^T Q hold 0 in place of nonfinite values. No product can then carry one to a row or
 * key that does not see it, and the products add in the same order as always. The rows and keys that do see
 * it get its share afterwards, element by element.
 */
#ifndef QUERN_CPU_NONFINITE_H
#define QUERN_CPU_NONFINITE_H

#include "core/half.h"
#include "cpu/kernels/attention_kernels.h"

#include <stdbool.h>

/* Whether an element's bits are those of an infinity or a NaN: all exponent bits are set. */
static inline bool is_nonfinite(const void *row, quern_dtype dtype, int64_t i)
{
    if (dtype == QUERN_F32) return (((const uint32_t *)row)[i] & 0x7f800000u) == 0x7f800000u;
    const uint16_t exponent = dtype == QUERN_BF16 ? 0x7f80 : 0x7c00;
    return (((const uint16_t *)row)[i] & exponent) == exponent;
}

/* Whether one of n elements is nonfinite. */
static inline bool any_nonfinite(const void *row, quern_dtype dtype, int64_t n)
{
    bool found = false;
    if (dtype == QUERN_F32)
        for (int64_t i = 0; i < n; i++) found |= is_nonfinite(row, QUERN_F32, i);
    else if (dtype == QUERN_BF16)
        for (int64_t i = 0; i < n; i++) found |= is_nonfinite(row, QUERN_BF16, i);
    else
        for (int64_t i = 0; i < n; i++) found |= is_nonfinite(row, QUERN_F16, i);
    return found;
}

/* Copies a row with 0 in place of nonfinite elements. */
static inline void copy_finite(const void *row, quern_dtype dtype, int64_t n, void *dst)
{
    for (int64_t i = 0; i < n; i++) {
        const bool keep = !is_nonfinite(row, dtype, i);
        if (dtype == QUERN_F32) ((uint32_t *)dst)[i] = keep ? ((const uint32_t *)row)[i] : 0;
        else ((uint16_t *)dst)[i] = keep ? ((const uint16_t *)row)[i] : 0;
    }
}

static inline float element_as_f32(const void *row, quern_dtype dtype, int64_t i)
{
    if (dtype == QUERN_F32) return ((const float *)row)[i];
    const uint16_t half = ((const uint16_t *)row)[i];
    return dtype == QUERN_BF16 ? float_from_bf16(half) : float_from_f16(half);
}

#endif
