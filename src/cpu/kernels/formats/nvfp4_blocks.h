/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4_blocks.h - LANES blocks of 16 values at once: x[i] holds value i of each block, a lane a block. So
 * a block's maximum and its sums are vertical and run in the order of the index.
 *
 * Every step of a profile is one f32 rounding (files that include this are compiled without contraction to
 * FMA), with true divisions. Two divisions a value are the limit while data comes from a cache (10 cycles of
 * AVX-512 for 16 values).
 */
#ifndef QUERN_CPU_NVFP4_BLOCKS_H
#define QUERN_CPU_NVFP4_BLOCKS_H

#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/formats/lanes.h"
#include "cpu/kernels/vector_dtype.h"

enum { BLOCK = QUANTISE_BLOCK };

typedef void block_function(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK], vint *scale);

/* The code of magnitudes in [0, 6] by the half-step rule: round to halves first, then to codes with ties
 * down. */
INLINE vint e2m1_half_steps(vfloat y)
{
    const vfloat shifted = (y + y) + 8388608.0f;
    const vfloat steps = shifted - 8388608.0f;
    return e2m1_of(steps * 0.49999f);
}

INLINE vint code_of(vfloat y, const bool half_steps)
{
    const vfloat magnitude = v_min(magnitude_of(y), v_splat(6.0f));
    const vint code = half_steps ? e2m1_half_steps(magnitude) : e2m1_of(magnitude);
    return code | ((y < 0.0f) & 8);
}

INLINE vfloat largest_of(const vfloat x[BLOCK])
{
    vfloat a = magnitude_of(x[0]);
#pragma GCC unroll 16
    for (int i = 1; i < BLOCK; i++) a = v_max(a, magnitude_of(x[i]));
    return a;
}

/* Sum of the squared errors that scale s leaves, in the order of the index. */
INLINE vfloat error_of(const vfloat xn[BLOCK], vfloat s)
{
    vfloat sum = {0};
    for (int i = 0; i < BLOCK; i++) {
        const vfloat y = xn[i] / s;
        const vfloat rounded = e2m1_value(saturated_e2m1(magnitude_of(y)));
        const vfloat difference = rounded * s - magnitude_of(xn[i]);
        sum += difference * difference;
    }
    return sum;
}

/* Infinite where it is NaN, so that it loses every comparison. */
INLINE vfloat finite_or_infinite(vfloat error)
{
    return v_select(error < INFINITY, error, v_splat(INFINITY));
}

INLINE vint four_over_six(const vfloat xn[BLOCK], vfloat a, vint nearest)
{
    const vint four = saturated_e4m3(a / 4.0f);
    const vfloat six_error = finite_or_infinite(error_of(xn, e4m3_value(nearest)));
    const vfloat four_error = finite_or_infinite(error_of(xn, e4m3_value(four)));
    const vint better = four_error < six_error;
    return (four & better) | (nearest & ~better);
}

INLINE vint searched(const vfloat xn[BLOCK], vint nearest)
{
    vfloat best = v_splat(INFINITY);
    vint chosen = nearest;
    for (int step = -3; step <= 8; step++) {
        vint byte = nearest + step;
        byte = (byte & (byte >= 1)) | (1 & (byte < 1));
        byte = (byte & (byte <= 126)) | (126 & (byte > 126));
        const vfloat error = error_of(xn, e4m3_value(byte));
        const vint better = error < best;
        best = v_select(better, error, best);
        chosen = (byte & better) | (chosen & ~better);
    }
    return chosen;
}

INLINE void normalised_block(float global, quantise_scales scales, const bool half_steps,
                             const vfloat x[BLOCK], vint codes[BLOCK], vint *scale)
{
    vfloat xn[BLOCK];
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK; i++) xn[i] = x[i] / global;
    const vfloat a = largest_of(xn);
    const vint kept = a >= 6 * 0x1p-9f;
    vint byte = saturated_e4m3(a / 6.0f);
    if (scales == QUANTISE_SCALES_FOUR_OVER_SIX) byte = four_over_six(xn, a, byte);
    if (scales == QUANTISE_SCALES_SEARCH) byte = searched(xn, byte);
    const vfloat s = e4m3_value(byte);
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK; i++) codes[i] = code_of(xn[i] / s, half_steps) & kept;
    *scale = byte & kept;
}

INLINE float global_of(const quantise_rule *rule)
{
    return rule->profile == QUANTISE_PROFILE_COMPRESSED_TENSORS ? 1.0f / rule->global : rule->global;
}

static void block_rne(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK], vint *scale)
{
    normalised_block(global_of(rule), QUANTISE_SCALES_RNE, false, x, codes, scale);
}

static void block_half_steps(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK], vint *scale)
{
    normalised_block(global_of(rule), QUANTISE_SCALES_RNE, true, x, codes, scale);
}

static void block_four_over_six(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK],
                                vint *scale)
{
    normalised_block(global_of(rule), QUANTISE_SCALES_FOUR_OVER_SIX, false, x, codes, scale);
}

static void block_search(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK], vint *scale)
{
    normalised_block(global_of(rule), QUANTISE_SCALES_SEARCH, false, x, codes, scale);
}

INLINE vint modelopt_scale(const quantise_rule *rule, vfloat largest)
{
    const float six = 6.0f * rule->global;
    vfloat p = largest / six;
    p = v_select(p == 0.0f, v_splat(1.0f), p);
    return saturated_e4m3(v_select(p < 0x1p-9f, v_splat(0x1p-9f), p));
}

INLINE vint compressed_scale(const quantise_rule *rule, vfloat largest)
{
    const vint byte = saturated_e4m3(rule->global * (largest / 6.0f));
    return byte | ((byte == 0) & 0x20);
}

static void block_modelopt(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK], vint *scale)
{
    const vint byte = modelopt_scale(rule, largest_of(x));
    const vfloat divisor = e4m3_value(byte) * rule->global;
    const vint kept = divisor != 0.0f;
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK; i++) codes[i] = code_of(x[i] / divisor, false) & kept;
    *scale = byte;
}

static void block_compressed(const quantise_rule *rule, const vfloat x[BLOCK], vint codes[BLOCK], vint *scale)
{
    const vint byte = compressed_scale(rule, largest_of(x));
    const vfloat divisor = e4m3_value(byte) / rule->global;
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK; i++) codes[i] = code_of(x[i] / divisor, false);
    *scale = byte;
}

INLINE block_function *block_function_of(const quantise_rule *rule)
{
    if (rule->scales == QUANTISE_SCALES_FOUR_OVER_SIX) return block_four_over_six;
    if (rule->scales == QUANTISE_SCALES_SEARCH) return block_search;
    if (rule->profile == QUANTISE_PROFILE_MODELOPT) return block_modelopt;
    if (rule->profile == QUANTISE_PROFILE_COMPRESSED_TENSORS) return block_compressed;
    return rule->profile == QUANTISE_PROFILE_HALFSTEP ? block_half_steps : block_rne;
}

#endif
