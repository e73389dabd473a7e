/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * norm_rows.h - norm, rotation and Walsh-Hadamard transform of a row in f32, written once over the level's
 * vectors. A pooled row comes from r projected ones of four times its length, so these steps take a tenth of
 * the pooling's time at most (the Hadamard transform: 7 additions a channel of the indexer's 128).
 */
#ifndef QUERN_CPU_NORM_ROWS_H
#define QUERN_CPU_NORM_ROWS_H

#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/vector_dtype.h"

/* Sum of x y z over n channels, lane by lane; y, z may be NULL: 1. */
INLINE float product_sum(const float *x, const float *y, const float *z, int64_t n)
{
    vfloat sum = {0};
    for (int64_t at = 0; at < n; at += LANES) {
        vfloat v = load_some(x, QUERN_F32, at, n);
        if (z != NULL) v *= load_some(z, QUERN_F32, at, n);
        sum = v_fma(v, load_some(y, QUERN_F32, at, n), sum);
    }
    return sum_of(sum);
}

INLINE float inverse_rms(const float *x, float eps, int64_t n)
{
    return 1.0f / sqrtf(product_sum(x, x, NULL, n) / (float)n + eps);
}

static void norm_row(const float *x, const float *weight, float eps, int64_t n, float *out)
{
    const float scale = inverse_rms(x, eps, n);
    for (int64_t at = 0; at < n; at += LANES)
        store_some(out, QUERN_F32, at, n,
                   load_some(x, QUERN_F32, at, n) * scale * load_some(weight, QUERN_F32, at, n));
}

static void norm_backward(const float *x, const float *weight, float eps, int64_t n, float *d,
                          float *d_weight)
{
    const float scale = inverse_rms(x, eps, n);
    const float mean = product_sum(d, weight, x, n) / (float)n * scale * scale;
    for (int64_t at = 0; at < n; at += LANES) {
        const vfloat xv = load_some(x, QUERN_F32, at, n), dv = load_some(d, QUERN_F32, at, n);
        if (d_weight != NULL)
            store_some(d_weight, QUERN_F32, at, n,
                       v_fma(dv * xv, v_splat(scale), load_some(d_weight, QUERN_F32, at, n)));
        store_some(d, QUERN_F32, at, n, (dv * load_some(weight, QUERN_F32, at, n) - xv * mean) * scale);
    }
}

static void rotate_row(float *row, const float *cosines, const float *sines, int64_t n, bool inverse)
{
    const float sign = inverse ? -1.0f : 1.0f;
    for (int64_t m = 0; m < n / 2; m++) {
        const float x = row[2 * m], y = row[2 * m + 1], c = cosines[m], s = sign * sines[m];
        row[2 * m] = x * c - y * s;
        row[2 * m + 1] = x * s + y * c;
    }
}

/* Lane i of the result is lane i ^ h. */
INLINE vfloat lanes_crossed(vfloat v, int h)
{
    const vint from = (vint)LANE_NUMBERS ^ h;
#if defined(__AVX512F__)
    return (vfloat)_mm512_permutexvar_ps((__m512i)from, (__m512)v);
#elif defined(__FMA__)
    return (vfloat)_mm256_permutevar8x32_ps((__m256)v, (__m256i)from);
#else
    vfloat crossed;
    for (int i = 0; i < LANES; i++) crossed[i] = v[from[i]];
    return crossed;
#endif
}

/* The transform of fewer channels than a vector's lanes. */
INLINE void hadamard_short(float *row, int64_t n)
{
    for (int64_t h = 1; h < n; h *= 2) {
        for (int64_t i = 0; i < n; i++) {
            if (i & h) continue;
            const float x = row[i], y = row[i + h];
            row[i] = x + y;
            row[i + h] = x - y;
        }
    }
}

static void hadamard_row(float *row, int64_t n)
{
    const float scale = 1.0f / sqrtf((float)n);
    if (n < LANES) hadamard_short(row, n);
    for (int64_t at = 0; at + LANES <= n; at += LANES) {
        vfloat v = v_load(row + at);
        for (int h = 1; h < LANES; h *= 2) {
            const vint upper = ((vint)LANE_NUMBERS & h) != 0;
            v = lanes_crossed(v, h) + v_select(upper, -v, v);
        }
        v_store(row + at, v);
    }
    for (int64_t h = LANES; h < n; h *= 2) {
        for (int64_t at = 0; at < n; at += LANES) {
            if (at & h) continue;
            const vfloat x = v_load(row + at), y = v_load(row + at + h);
            v_store(row + at, x + y);
            v_store(row + at + h, x - y);
        }
    }
    for (int64_t at = 0; at < n; at += LANES)
        store_some(row, QUERN_F32, at, n, load_some(row, QUERN_F32, at, n) * scale);
}

#define NORM_ROW_KERNELS                                                                                     \
    .norm_row = norm_row, .norm_backward = norm_backward, .rotate_row = rotate_row,                          \
    .hadamard_row = hadamard_row

#endif
