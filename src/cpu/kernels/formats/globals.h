/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* globals.h - global scales: the one that a profile computes from a largest magnitude, and the one that a row
 * uses. */
#ifndef QUERN_CPU_QUANTISE_GLOBALS_H
#define QUERN_CPU_QUANTISE_GLOBALS_H

#include "cpu/kernels/rows/views.h"

#include "stages/quantise.h"

#include <math.h>

/* G, or R under COMPRESSED_TENSORS. */
static inline float global_from_largest(quantise_profile profile, float amax)
{
    if (profile == QUANTISE_PROFILE_MODELOPT) {
        if (amax == 0.0f) return 1.0f;
        return fmaxf(amax / 2688.0f, 0x1p-149f);
    }
    if (profile == QUANTISE_PROFILE_COMPRESSED_TENSORS) {
        const float r = 1.0f / amax * 2688.0f;
        return isfinite(r) ? r : 1.0f;
    }
    return fmaxf(amax, 1e-8f) / 2688.0f;
}

/* The expert of a row of x, rows or a stack [E, n, D]. */
static inline int64_t expert_in(const quern_tensor *offsets, quantise_global per, const quern_tensor *x,
                                int64_t row)
{
    if (offsets->ndim > 0) return expert_of_row(offsets, row);
    return per == QUANTISE_GLOBAL_EXPERT && x->ndim == 3 ? row / x->shape[1] : 0;
}

/* The global of row `row` of a matrix; the row belongs to `expert`. */
static inline float global_at(const quern_tensor *global, quantise_global per, int64_t row, int64_t expert)
{
    const int64_t index = per == QUANTISE_GLOBAL_ROW ? row : per == QUANTISE_GLOBAL_EXPERT ? expert : 0;
    return *(const float *)view_row(global, index);
}

#endif
