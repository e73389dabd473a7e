/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_mix.h - sums of a token's rows, written once over the level's vectors: mix() makes the collapsed
 * copies and the new ones, mix_backward() the gradient of the copies, scale_row() a token's input.
 *
 * A pair of vectors at a time, so that a factor is loaded for two of them and a line of bf16 is stored at
 * once; with 4 copies all inputs of a pair stay in registers while the outputs are made (48 FMAs). Both are
 * bound by the FMA pipes where L2 holds the rows, or by the memory behind it.
 */
#ifndef QUERN_CPU_HYPER_MIX_H
#define QUERN_CPU_HYPER_MIX_H

#include "cpu/hyper/hyper_kernels.h"
#include "cpu/hyper/hyper_pairs.h"

INLINE vpair add_pair(float m, vpair x, vpair sum)
{
    return (vpair){v_fma(v_splat(m), x.first, sum.first), v_fma(v_splat(m), x.second, sum.second)};
}

/* The pair at `at` in the order of `dtype`; behind the whole ones what is left, in memory's order. */
INLINE vpair pair_at(const void *row, const quern_dtype dtype, int64_t at, int64_t n, const bool whole)
{
    if (whole) return load_two(row, dtype, at);
    return (vpair){load_some(row, dtype, at, n),
                   at + LANES < n ? load_some(row, dtype, at + LANES, n) : (vfloat){0}};
}

INLINE void store_pair(void *row, const quern_dtype dtype, const quern_dtype order, int64_t at, int64_t n,
                       vpair v, const bool whole, const bool stream)
{
    if (whole) {
        store_two(row, dtype, order, at, v, stream);
        return;
    }
    store_some(row, dtype, at, n, v.first);
    if (at + LANES < n) store_some(row, dtype, at + LANES, n, v.second);
}

/* The collapsed pair; its squares are added to *square. */
INLINE void collapse_pair(const quern_dtype dtype, const hyper_mix *t, int64_t at, const bool whole, vpair v,
                          vpair *square)
{
    store_pair(t->collapsed, QUERN_F32, dtype, at, t->n, v, whole, false);
    square->first = v_fma(v.first, v.first, square->first);
    square->second = v_fma(v.second, v.second, square->second);
}

/* Any number of copies. */
INLINE void mix_pair(const quern_dtype dtype, const hyper_mix *t, int64_t at, const bool whole, vpair *square)
{
    vpair sum = {{0}, {0}};
    for (int k = 0; t->f != NULL && k < t->copies; k++) {
        const float *m = t->m + k * HYPER_INPUTS;
        vpair made = {{0}, {0}};
        for (int i = 0; i < t->copies; i++)
            made = add_pair(m[i], pair_at(t->x[i], dtype, at, t->n, whole), made);
        made = add_pair(m[t->copies], pair_at(t->f, dtype, at, t->n, whole), made);
        store_pair(t->out[k], dtype, dtype, at, t->n, made, whole, false);
    }
    for (int i = 0; i < t->copies; i++)
        sum = add_pair(t->pre[i], pair_at(t->x[i], dtype, at, t->n, whole), sum);
    collapse_pair(dtype, t, at, whole, sum, square);
}

enum { FOUR = 4 };

/* Four copies, whole pairs; f and stream are constants. */
INLINE void mix_four(const quern_dtype dtype, const bool f, const hyper_mix *t, const char *const in[FOUR],
                     char *const out[FOUR], int64_t at, const bool stream, vpair *square)
{
    vpair x[FOUR], sum = {{0}, {0}};
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) x[i] = load_two(in[i], dtype, at);
    if (f) {
        const vpair last = load_two(t->f, dtype, at);
#pragma GCC unroll 4
        for (int k = 0; k < FOUR; k++) {
            const float *m = t->m + k * HYPER_INPUTS;
            vpair made = {{0}, {0}};
#pragma GCC unroll 4
            for (int i = 0; i < FOUR; i++) made = add_pair(m[i], x[i], made);
            store_two(out[k], dtype, dtype, at, add_pair(m[FOUR], last, made), stream);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) sum = add_pair(t->pre[i], x[i], sum);
    collapse_pair(dtype, t, at, true, sum, square);
}

INLINE int64_t mix_fours(const quern_dtype dtype, const bool f, const hyper_mix *t, const bool stream,
                         vpair *square)
{
    const char *in[FOUR];
    char *out[FOUR];
    int64_t at = 0;
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) {
        in[i] = t->x[i];
        out[i] = t->out[i];
    }
    for (; at + PAIR <= t->n; at += PAIR) mix_four(dtype, f, t, in, out, at, stream, square);
    return at;
}

INLINE float mix_as(const quern_dtype dtype, const hyper_mix *t)
{
    vpair square = {{0}, {0}};
    int64_t at = 0;
    if (t->copies == FOUR && t->f == NULL) at = mix_fours(dtype, false, t, false, &square);
    else if (t->copies == FOUR && t->stream) at = mix_fours(dtype, true, t, true, &square);
    else if (t->copies == FOUR) at = mix_fours(dtype, true, t, false, &square);
    for (; at + PAIR <= t->n; at += PAIR) mix_pair(dtype, t, at, true, &square);
    if (at < t->n) mix_pair(dtype, t, at, false, &square);
    return sum_of(square.first + square.second);
}

static float mix(const hyper_mix *t)
{
    if (t->dtype == QUERN_F32) return mix_as(QUERN_F32, t);
    return t->dtype == QUERN_BF16 ? mix_as(QUERN_BF16, t) : mix_as(QUERN_F16, t);
}

/* What the sums and the collapsed copies give a pair of copy i. */
INLINE vpair start_pair(const hyper_gradient *t, int i, int64_t at, const bool whole, vpair collapsed)
{
    vpair v = {{0}, {0}};
    if (t->d_sums != NULL) v = pair_at(t->d_sums + i * t->ld_sums, QUERN_F32, at, t->n, whole);
    return add_pair(t->pre[i], collapsed, v);
}

INLINE vpair collapsed_pair(const quern_dtype dtype, const hyper_gradient *t, int64_t at, const bool whole)
{
    const vpair v = pair_at(t->d_collapsed, QUERN_F32, at, t->n, whole);
    return whole ? in_order_of(dtype, v) : v;
}

/* Any number of copies. */
INLINE void gradient_pair(const quern_dtype dtype, const hyper_gradient *t, int64_t at, const bool whole)
{
    const vpair collapsed = collapsed_pair(dtype, t, at, whole);
    for (int i = 0; i < t->copies; i++) {
        vpair v = start_pair(t, i, at, whole, collapsed);
        for (int k = 0; t->d_out[0] != NULL && k < t->copies; k++)
            v = add_pair(t->comb[i * t->copies + k], pair_at(t->d_out[k], dtype, at, t->n, whole), v);
        v = add_pair(t->square, pair_at(t->x[i], dtype, at, t->n, whole), v);
        store_pair(t->d_x[i], dtype, dtype, at, t->n, v, whole, false);
    }
}

/* Four copies, whole pairs; out and stream are constants. */
INLINE void gradient_four(const quern_dtype dtype, const bool out, const hyper_gradient *t,
                          const char *const x[FOUR], const char *const d_out[FOUR], char *const d_x[FOUR],
                          int64_t at, const bool stream)
{
    const vpair collapsed = collapsed_pair(dtype, t, at, true);
    vpair d[FOUR] = {{{0}, {0}}};
#pragma GCC unroll 4
    for (int k = 0; out && k < FOUR; k++) d[k] = load_two(d_out[k], dtype, at);
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) {
        vpair v = start_pair(t, i, at, true, collapsed);
#pragma GCC unroll 4
        for (int k = 0; out && k < FOUR; k++) v = add_pair(t->comb[i * FOUR + k], d[k], v);
        v = add_pair(t->square, load_two(x[i], dtype, at), v);
        store_two(d_x[i], dtype, dtype, at, v, stream);
    }
}

INLINE int64_t gradient_fours(const quern_dtype dtype, const bool out, const hyper_gradient *t,
                              const bool stream)
{
    const char *x[FOUR], *d_out[FOUR];
    char *d_x[FOUR];
    int64_t at = 0;
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) {
        x[i] = t->x[i];
        d_out[i] = t->d_out[i];
        d_x[i] = t->d_x[i];
    }
    for (; at + PAIR <= t->n; at += PAIR) gradient_four(dtype, out, t, x, d_out, d_x, at, stream);
    return at;
}

INLINE void gradient_as(const quern_dtype dtype, const hyper_gradient *t)
{
    const bool four = t->copies == FOUR, out = t->d_out[0] != NULL;
    int64_t at = 0;
    if (four && out && t->stream) at = gradient_fours(dtype, true, t, true);
    else if (four && out) at = gradient_fours(dtype, true, t, false);
    else if (four && t->stream) at = gradient_fours(dtype, false, t, true);
    for (; at + PAIR <= t->n; at += PAIR) gradient_pair(dtype, t, at, true);
    if (at < t->n) gradient_pair(dtype, t, at, false);
}

static void mix_backward(const hyper_gradient *t)
{
#define CALL(d) gradient_as(d, t)
    BY_DTYPE(t->dtype, CALL);
#undef CALL
}

INLINE void scale_of(const quern_dtype to, const float *x, const float *weight, float scale, int64_t n,
                     void *out, const bool stream)
{
    int64_t at = 0;
    for (; at + PAIR <= n; at += PAIR)
#pragma GCC unroll 2
        for (int64_t half = at; half < at + PAIR; half += LANES) {
            const vfloat v = v_load(x + half) * scale * v_load(weight + half);
            if (stream) stream_as(out, to, half, v);
            else store_as(out, to, half, v);
        }
    for (; at < n; at += LANES)
        store_some(out, to, at, n,
                   load_some(x, QUERN_F32, at, n) * scale * load_some(weight, QUERN_F32, at, n));
}

static void scale_row(const float *x, const float *weight, float scale, int64_t n, void *out, quern_dtype to,
                      bool stream)
{
    if (stream) {
#define CALL(d) scale_of(d, x, weight, scale, n, out, true)
        BY_DTYPE(to, CALL);
#undef CALL
    } else {
#define CALL(d) scale_of(d, x, weight, scale, n, out, false)
        BY_DTYPE(to, CALL);
#undef CALL
    }
}

#endif
