/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_row_loops.h - the kernels of hyper-connections' rows, and a token's products, written once over the
 * level's vectors.
 *
 * dots() keeps the 24 sums of 4 copies in registers (AVX-512) while x, d_out, f and d_collapsed pass once: 28
 * FMAs for 10 vectors of rows. Limit: the FMA pipes where L2 holds the rows.
 */
#ifndef QUERN_CPU_HYPER_ROW_LOOPS_H
#define QUERN_CPU_HYPER_ROW_LOOPS_H

#include "cpu/hyper/hyper_mix.h"
#include "cpu/hyper/hyper_outer.h"

/* Lanes of the products of a token with n copies. */
typedef struct token_sums {
    vfloat pre[HYPER_COPIES], post[HYPER_COPIES], comb[HYPER_COPIES][HYPER_COPIES];
} token_sums;

INLINE vfloat half_of(const void *p, const quern_dtype from, int64_t at, const int half)
{
    return half == 0 ? load_first(p, from, at) : load_second(p, from, at);
}

/* A vector of channels, the first or second of the pair at `at`, or what is left of the row; n, out, f and
 * whole are constants where n is 4. */
INLINE vfloat dot_vector(const quern_dtype from, const int n, const bool out, const hyper_token *t,
                         int64_t at, const int half, const bool whole, vfloat collapsed, token_sums *s)
{
    vfloat d[HYPER_COPIES], d_f = {0};
#pragma GCC unroll 4
    for (int k = 0; out && k < n; k++) {
        d[k] = whole ? half_of(t->d_out[k], from, at, half) : load_some(t->d_out[k], from, at, t->n);
        d_f = v_fma(v_splat(t->post[k]), d[k], d_f);
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        const vfloat x = whole ? half_of(t->x[i], from, at, half) : load_some(t->x[i], from, at, t->n);
        s->pre[i] = v_fma(x, collapsed, s->pre[i]);
#pragma GCC unroll 4
        for (int k = 0; out && k < n; k++) s->comb[i][k] = v_fma(x, d[k], s->comb[i][k]);
    }
    if (out) {
        const vfloat f = whole ? half_of(t->f, from, at, half) : load_some(t->f, from, at, t->n);
#pragma GCC unroll 4
        for (int k = 0; k < n; k++) s->post[k] = v_fma(f, d[k], s->post[k]);
    }
    return d_f;
}

INLINE void dots_of(const quern_dtype from, const int n, const bool out, const hyper_token *t)
{
    token_sums s;
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        s.pre[i] = s.post[i] = (vfloat){0};
#pragma GCC unroll 4
        for (int k = 0; k < n; k++) s.comb[i][k] = (vfloat){0};
    }
    int64_t at = 0;
    for (; at + PAIR <= t->n; at += PAIR) {
        vpair c = {{0}, {0}}, d_f;
        if (t->d_collapsed != NULL)
            c = in_order_of(from, (vpair){v_load(t->d_collapsed + at), v_load(t->d_collapsed + at + LANES)});
        d_f.first = dot_vector(from, n, out, t, at, 0, true, c.first, &s);
        d_f.second = dot_vector(from, n, out, t, at, 1, true, c.second, &s);
        if (t->d_f != NULL) store_two(t->d_f, from, from, at, d_f, false);
    }
    for (; at < t->n; at += LANES) {
        const vfloat c =
            t->d_collapsed != NULL ? load_some(t->d_collapsed, QUERN_F32, at, t->n) : (vfloat){0};
        const vfloat d_f = dot_vector(from, n, out, t, at, 0, false, c, &s);
        if (t->d_f != NULL) store_some(t->d_f, from, at, t->n, d_f);
    }
    for (int i = 0; i < n; i++) {
        if (t->d_collapsed != NULL) t->d[i] += sum_of(s.pre[i]);
        for (int k = 0; out && k < n; k++) t->d[2 * n + i * n + k] += sum_of(s.comb[i][k]);
        if (out) t->d[n + i] += sum_of(s.post[i]);
    }
}

INLINE void dots_from(const quern_dtype from, const hyper_token *t)
{
    if (t->d_out[0] == NULL) dots_of(from, t->copies, false, t);
    else if (t->copies == 4) dots_of(from, 4, true, t);
    else dots_of(from, t->copies, true, t);
}

static void dots(const hyper_token *t)
{
#define CALL(d) dots_from(d, t)
    BY_DTYPE(t->from, CALL);
#undef CALL
}

#define HYPER_ROWS                                                                                           \
    .lanes = LANES, .dot_rows = DOT_ROWS, .pack = pack, .unpack = unpack, .add_products = add_products,      \
    .fold = fold, .times_fn = times_fn, .add_outer = add_outer, .dots = dots, .mix = mix,                    \
    .mix_backward = mix_backward, .scale_row = scale_row

#endif
