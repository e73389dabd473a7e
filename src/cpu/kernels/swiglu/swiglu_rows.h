/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swiglu_rows.h - SwiGLU's row kernels, written once over the level's vectors and compiled by each level's
 * file under its own flags. */
#ifndef QUERN_CPU_SWIGLU_ROWS_H
#define QUERN_CPU_SWIGLU_ROWS_H

#include "cpu/kernels/formats/nvfp4_rows.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"
#if defined(__AVX512BW__)
#include "cpu/kernels/swiglu/swiglu_words.h"
#endif

#if defined(__AVX512F__)
/* Runs of 8 by two registers: gate or up values of 32 interleaved columns. */
INLINE vfloat halves_of(vfloat a, vfloat b, const bool up)
{
    return up ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
              : __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}
#endif

INLINE void part_row_as(const void *x, const quern_dtype dtype, int64_t first, const bool up, int64_t q,
                        int64_t n, float *out)
{
    int64_t i = 0;
#if defined(__AVX512F__)
    if (q == 8 && first % 8 == 0)
        for (; i + LANES <= n; i += LANES) {
            const int64_t at = 2 * (first + i);
            v_store(out + i, halves_of(load_as(x, dtype, at), load_as(x, dtype, at + LANES), up));
        }
#endif
    while (i < n) {
        const int64_t column = first + i, in_run = column % q, left = q - in_run;
        const int64_t run = left < n - i ? left : n - i, at = (column - in_run) * 2 + in_run + (up ? q : 0);
        for (int64_t c = 0; c < run; c += LANES)
            store_some(out + i, QUERN_F32, c, run,
                       load_some((const char *)x + at * dtype_bytes(dtype), dtype, c, run));
        i += run;
    }
}

static void part_row(const void *x, quern_dtype dtype, int64_t first, bool up, int64_t q, int64_t n,
                     float *out)
{
    if (dtype == QUERN_F32)
        up ? part_row_as(x, QUERN_F32, first, true, q, n, out)
           : part_row_as(x, QUERN_F32, first, false, q, n, out);
    else if (dtype == QUERN_BF16)
        up ? part_row_as(x, QUERN_BF16, first, true, q, n, out)
           : part_row_as(x, QUERN_BF16, first, false, q, n, out);
    else
        up ? part_row_as(x, QUERN_F16, first, true, q, n, out)
           : part_row_as(x, QUERN_F16, first, false, q, n, out);
}

/* The largest power of two that v_exp2 makes. A smaller sigmoid than its inverse, 2^-y, may be too small for
 * f32 where its factors are large, so each of two factors takes its root. */
#define MOST_POWER 127.0f

INLINE vfloat root_of(vfloat y)
{
    return v_exp2(y * -0.5f);
}

/* NaN fails every comparison and stays. */
INLINE vfloat swiglu(const swiglu_rule *rule, vfloat g, vfloat u)
{
    const vfloat limit = v_splat(rule->limit > 0.0f ? rule->limit : INFINITY);
    g = v_select(g > limit, limit, g);
    u = v_select(u > limit, limit, u);
    u = v_select(u < -limit, -limit, u) + rule->beta;
    const vfloat y = g * (rule->alpha * -1.44269504088896340736f);
    const vint far = y > MOST_POWER;
    const vfloat h = g / (1.0f + v_exp2(v_select(far, v_splat(MOST_POWER), y))) * u;
    if (!v_any(far)) return h;
    const vfloat root = root_of(y);
    return v_select(far, (g * root) * (u * root), h);
}

static void swiglu_row(const swiglu_rule *rule, const float *gate, const float *up, int64_t n, float *h)
{
    for (int64_t c = 0; c < n; c += LANES)
        store_some(h, QUERN_F32, c, n,
                   swiglu(rule, load_some(gate, QUERN_F32, c, n), load_some(up, QUERN_F32, c, n)));
}

INLINE uint32_t larger_magnitude(uint32_t most, const float *x, int64_t n)
{
    vint larger = {0};
    for (int64_t c = 0; c < n; c += LANES) {
        const vint bits = (vint)magnitude_of(load_some(x, QUERN_F32, c, n)), more = bits > larger;
        larger = (bits & more) | (larger & ~more);
    }
    for (int i = 0; i < LANES; i++)
        if ((uint32_t)larger[i] > most) most = (uint32_t)larger[i];
    return most;
}

/* A strip at a time goes through buffers in L1. */
static uint32_t swiglu_strips(const swiglu_rule *rule, const quantise_rule *to, const void *x,
                              quern_dtype dtype, int64_t q, int64_t n, uint8_t *codes, uint8_t *scales)
{
    enum { STRIP = 4 * GROUP };
    float gate[STRIP], up[STRIP];
    uint32_t most = 0;
    for (int64_t column = 0; column < n; column += STRIP) {
        const int64_t some = n - column < STRIP ? n - column : STRIP;
        part_row(x, dtype, column, false, q, some, gate);
        part_row(x, dtype, column, true, q, some, up);
        most = larger_magnitude(larger_magnitude(most, gate, some), up, some);
        swiglu_row(rule, gate, up, some, gate);
        quantise_row(to, gate, QUERN_F32, some, codes + column / 2, scales + column / BLOCK);
    }
    return most;
}

static uint32_t swiglu_quantise(const swiglu_rule *rule, const quantise_rule *to, const void *x,
                                quern_dtype dtype, int64_t q, int64_t n, uint8_t *codes, uint8_t *scales)
{
#if defined(__AVX512BW__)
    if (dtype == QUERN_BF16 && q == SWIGLU_RUN && n % q == 0 && has_words(to)) {
        if (rule->limit == 0.0f && rule->alpha == 1.0f && rule->beta == 0.0f)
            return swiglu_words(rule, to, true, x, n, codes, scales);
        return swiglu_words(rule, to, false, x, n, codes, scales);
    }
#endif
    return swiglu_strips(rule, to, x, dtype, q, n, codes, scales);
}

/* With s the sigmoid of alpha g: du = d g s, dg = d (u + beta) s (1 + alpha g (1 - s)); both 0 beyond the
 * limit. */
static void swiglu_backward_row(const swiglu_rule *rule, const float *d, int64_t n, float *gate, float *up)
{
    const vfloat limit = v_splat(rule->limit > 0.0f ? rule->limit : INFINITY), zero = {0};
    for (int64_t c = 0; c < n; c += LANES) {
        const vfloat g = load_some(gate, QUERN_F32, c, n), u = load_some(up, QUERN_F32, c, n);
        const vfloat h = load_some(d, QUERN_F32, c, n), x = v_select(g > limit, limit, g);
        const vfloat below = v_select(u < -limit, -limit, u), v = v_select(u > limit, limit, below);
        const vfloat y = x * (rule->alpha * -1.44269504088896340736f);
        const vint far = y > MOST_POWER;
        const vfloat e = v_exp2(v_select(far, v_splat(MOST_POWER), y)), s = 1.0f / (1.0f + e);
        vfloat dg = h * (v + rule->beta) * s * (1.0f + rule->alpha * (x * (e * s))), du = h * x * s;
        if (v_any(far)) {
            const vfloat root = root_of(y), slope = root + x * root * rule->alpha;
            dg = v_select(far, h * (v + rule->beta) * root * slope, dg);
            du = v_select(far, (h * root) * (x * root), du);
        }
        store_some(gate, QUERN_F32, c, n, v_select(g > limit, zero, dg));
        store_some(up, QUERN_F32, c, n, v_select(u > limit, zero, v_select(u < -limit, zero, du)));
    }
}

#define SWIGLU_ROW_KERNELS                                                                                   \
    .part_row = part_row, .swiglu_row = swiglu_row, .swiglu_quantise = swiglu_quantise,                      \
    .swiglu_backward_row = swiglu_backward_row

#endif
