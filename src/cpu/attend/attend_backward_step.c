/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_step.c - one tile of 192 query rows against one of 192 keys: the five products of the
 * attention backward.
 *
 *   S = Q K^T, dP = dO V^T           A: rows of Q, dO; B: panels of K, V
 *   P, dS from S and dP              attention_backward_rows.h
 *   dV += (c P)^T dO, dK += dS^T Q   A: columns of P, dS (broadcast, so transposing is free); B: rows of dO,
 * Q dQ += dS K                       A: rows of dS; B: rows of K
 *
 * At D = 128 in f32, S and dP take 160 KB each, and dK, dV and the rows of Q, dO and dQ 110 KB each. What two
 * products share stays in L2. The panel that a product reads as B (32 to 48 KB) stays in L1 while A streams
 * past it. 192 rows are 32 full micro-kernels of 6, and a micro-kernel does 96 (bf16 pairs) to 192 steps of
 * 24 FMAs for 24 stores; tiles of 96 or 128 rows or keys are 3 to 6% slower.
 *
 * A tile that its rows see only in part is cut into runs of 64 keys, each with just the rows that see some of
 * it. Masked scores are 0 in P and dS. The products take 0 in place of nonfinite values of Q, dO or K, and
 * add_nonfinite() adds their share for the pairs of rows and keys that are seen (nonfinite.h).
 *
 * Limit: the FMA (or bf16 dot product) peak.
 */
#include "cpu/attend/attend_backward.h"

#include "cpu/kernels/attend/nonfinite.h"
#include "cpu/rows_at.h"

#include <string.h>

void backward_scratch_carve(const backward_plan *p, arena *a, backward_scratch *s)
{
    const size_t rows = BACKWARD_ROWS / (p->attend.bf16 ? 2 : 1);
    const size_t tile = (size_t)BACKWARD_ROWS * BACKWARD_LDS * 4;
    s->s = arena_take(a, tile);
    s->dp = arena_take(a, tile);
    s->p_pairs = arena_take(a, tile / 2);
    s->ds_pairs = arena_take(a, tile / 2);
    s->ds_words = arena_take(a, tile / 2);
    s->tile_lo = arena_take(a, BACKWARD_ROWS * 4);
    s->tile_hi = arena_take(a, BACKWARD_ROWS * 4);
    s->finite_q = arena_take(a, rows * (size_t)p->key_ld * 4);
    s->finite_d_o = arena_take(a, rows * (size_t)p->value_ld * 4);
}

/* Rows [*first, *end) that see some of columns [c0, c1). */
static void rows_meeting(const backward_scratch *s, int32_t n, int32_t c0, int32_t c1, int32_t *first,
                         int32_t *end)
{
    int32_t a = 0, b = n;
    while (a < b && (s->tile_hi[a] <= c0 || s->tile_lo[a] >= c1)) a++;
    while (b > a && (s->tile_hi[b - 1] <= c0 || s->tile_lo[b - 1] >= c1)) b--;
    *first = a;
    *end = b;
}

static const void *at_row(const void *words, int64_t row, int64_t ld)
{
    return (const uint32_t *)words + row * ld;
}

/* S and dP of rows [a, b), columns [c, c + n), which lie in one panel. */
static void score(const backward_plan *p, const backward_rows *rows, const backward_keys *keys, int32_t a,
                  int32_t b, int64_t base, int32_t c, int32_t n, const backward_scratch *s)
{
    const attention_kernels *k = p->attend.kernels;
    mm_kernel *mm = p->attend.bf16 ? k->mm_bf16 : k->mm_f32;
    const int64_t key = keys->head * p->attend.packed_rows + keys->seq->packed0 + base + c,
                  in_panel = key % k->panel;
    const int64_t q_ld = p->attend.bf16 ? p->attend.key_words : p->key_ld,
                  o_ld = p->attend.bf16 ? p->value_words : p->value_ld;
    const int64_t at = (int64_t)a * BACKWARD_LDS + c;
    mm(b - a, n, p->attend.key_words, at_row(rows->q, a, q_ld), q_ld, 1,
       (const uint32_t *)p->keys + (key - in_panel) * p->attend.key_words + in_panel, k->panel, s->s + at,
       BACKWARD_LDS, false);
    mm(b - a, n, p->value_words, at_row(rows->d_o, a, o_ld), o_ld, 1,
       (const uint32_t *)p->values + (key - in_panel) * p->value_words + in_panel, k->panel, s->dp + at,
       BACKWARD_LDS, false);
}

/* sum[keys][width] (+)= X^T Y over rows [a, b), X = P or dS, Y = dO or Q. */
static void sum_over_rows(const backward_plan *p, int32_t a, int32_t b, int32_t c0, int32_t c1, const void *x,
                          const void *y, int64_t width, int64_t ld, float *sum, bool accumulate)
{
    const attention_kernels *k = p->attend.kernels;
    mm_kernel *mm = p->attend.bf16 ? k->mm_bf16 : k->mm_f32;
    const int64_t first = p->attend.bf16 ? a / 2 : a, end = p->attend.bf16 ? (b + 1) / 2 : b;
    const uint32_t *xa = (const uint32_t *)x + first * BACKWARD_LDS + c0;
    for (int64_t j = 0; j < width; j += k->panel)
        mm(c1 - c0, width - j < k->panel ? width - j : k->panel, end - first, xa, 1, BACKWARD_LDS,
           (const uint32_t *)y + first * ld + j, ld, sum + c0 * ld + j, ld, accumulate);
}

/* dQ[a .. b) += dS[a .. b)[c0 .. c1) K. */
static void sum_over_keys(const backward_plan *p, const backward_rows *rows, const backward_keys *keys,
                          int32_t a, int32_t b, int64_t base, int32_t c0, int32_t c1,
                          const backward_scratch *s)
{
    const attention_kernels *k = p->attend.kernels;
    mm_kernel *mm = p->attend.bf16 ? k->mm_bf16 : k->mm_f32;
    const int64_t pairs = p->attend.bf16 ? 2 : 1, ld = BACKWARD_LDS / pairs;
    const int64_t panels = (p->key_width + p->key_panel - 1) / p->key_panel,
                  stride = p->attend.packed_rows / pairs * p->key_panel;
    const uint32_t *b_rows = (const uint32_t *)p->key_rows + keys->head * panels * stride +
                             (keys->seq->packed0 + base + c0) / pairs * p->key_panel;
    const uint32_t *ds =
        (p->attend.bf16 ? s->ds_words : (const uint32_t *)(const void *)s->dp) + a * ld + c0 / pairs;
    for (int64_t j = 0; j < panels; j++) {
        const int64_t column = j * p->key_panel,
                      n = p->key_width - column < p->key_panel ? p->key_width - column : p->key_panel;
        mm(b - a, n, (c1 - c0 + pairs - 1) / pairs, ds, ld, 1, b_rows + j * stride, p->key_panel,
           rows->d_q + a * p->key_ld + column, p->key_ld, true);
    }
}

/* row_scale * P and dS of row r, column c, rounded as the products read them. */
static float p_at(bool bf16, const backward_scratch *s, int64_t r, int64_t c)
{
    if (!bf16) return s->s[r * BACKWARD_LDS + c];
    return float_from_bf16((uint16_t)(s->p_pairs[r / 2 * BACKWARD_LDS + c] >> (r % 2 * 16)));
}

static float ds_at(bool bf16, const backward_scratch *s, int64_t r, int64_t c)
{
    return bf16 ? element_as_f32(s->ds_words + r * (BACKWARD_LDS / 2), QUERN_BF16, c)
                : s->dp[r * BACKWARD_LDS + c];
}

static bool any_key_nonfinite(const backward_plan *p, const backward_keys *keys, int64_t base)
{
    const uint8_t *of_head = p->nonfinite + keys->head * p->attend.packed_rows / KEY_ALIGN;
    bool found = false;
    for (int64_t at = (keys->seq->packed0 + base) / KEY_ALIGN;
         at <= (keys->seq->packed0 + keys->key1 - 1) / KEY_ALIGN; at++)
        found |= of_head[at];
    return found;
}

/* Adds the share of the nonfinite keys of [base, key1) to dQ of the rows that see them. */
static void add_nonfinite_keys(const backward_plan *p, const backward_rows *rows, const backward_keys *keys,
                               int32_t first, int32_t end, int64_t base, const backward_scratch *s)
{
    const quern_tensor *k = &p->attend.args->k;
    for (int64_t key = keys->key0; key < keys->key1; key++) {
        const void *row = row_at(k, keys->seq->view_b, keys->seq->k0 + key, keys->head);
        const int32_t c = (int32_t)(key - base);
        for (int32_t d = 0; d < p->attend.dim_k; d++) {
            if (!is_nonfinite(row, k->dtype, d)) continue;
            for (int32_t r = first; r < end; r++)
                if (c >= s->tile_lo[r] && c < s->tile_hi[r])
                    rows->d_q[r * p->key_ld + d] +=
                        ds_at(p->attend.bf16, s, r, c) * element_as_f32(row, k->dtype, d);
        }
    }
}

/* Adds the share of nonfinite rows of q and d_o to dK and dV of the keys that they see. */
static void add_nonfinite_rows(const backward_plan *p, const backward_rows *rows, const backward_keys *keys,
                               int32_t first, int32_t end, const backward_scratch *s)
{
    const bool bf16 = p->attend.bf16;
    const quern_dtype dtype = bf16 ? QUERN_BF16 : QUERN_F32;
    const int64_t q_ld = bf16 ? p->attend.key_words : p->key_ld, o_ld = bf16 ? p->value_words : p->value_ld;
    for (int32_t r = first; r < end; r++) {
        if (!rows->nonfinite[r]) continue;
        const void *q = (const uint32_t *)rows->q + r * q_ld, *d_o = (const uint32_t *)rows->d_o + r * o_ld;
        for (int32_t c = s->tile_lo[r]; c < s->tile_hi[r]; c++) {
            for (int32_t d = 0; d < p->attend.dim_k; d++)
                if (is_nonfinite(q, dtype, d))
                    keys->d_k[c * p->key_ld + d] += ds_at(bf16, s, r, c) * element_as_f32(q, dtype, d);
            for (int32_t d = 0; d < p->attend.dim_v; d++)
                if (is_nonfinite(d_o, dtype, d))
                    keys->d_v[c * p->value_ld + d] += p_at(bf16, s, r, c) * element_as_f32(d_o, dtype, d);
        }
    }
}

/* The tile's rows with nonfinite values as 0 in the operands of dV and dK. */
static backward_rows finite_rows(const backward_plan *p, const backward_rows *rows, int32_t n,
                                 const backward_scratch *s)
{
    const int64_t halves = p->attend.bf16 ? (n + 1) / 2 * 2 : n; /* bf16: rows of two halves a word */
    const quern_dtype dtype = p->attend.bf16 ? QUERN_BF16 : QUERN_F32;
    backward_rows finite = *rows;
    copy_finite(rows->q_pairs, dtype, halves * p->key_ld, s->finite_q);
    copy_finite(rows->d_o_pairs, dtype, halves * p->value_ld, s->finite_d_o);
    finite.q_pairs = s->finite_q;
    finite.d_o_pairs = s->finite_d_o;
    return finite;
}

static bool same_freshness(const backward_keys *keys, int32_t columns)
{
    for (int32_t c = KEY_ALIGN; c < columns; c += KEY_ALIGN)
        if (keys->fresh[c / KEY_ALIGN] != keys->fresh[0]) return false;
    return true;
}

static void multiply(const backward_plan *p, const backward_rows *rows, backward_keys *keys, int32_t a,
                     int32_t b, int64_t base, int32_t c0, int32_t c1, const backward_scratch *s)
{
    const void *pt = p->attend.bf16 ? (const void *)s->p_pairs : s->s,
               *dst = p->attend.bf16 ? (const void *)s->ds_pairs : s->dp;
    const bool add = !keys->fresh[c0 / KEY_ALIGN];
    sum_over_rows(p, a, b, c0, c1, pt, rows->d_o_pairs, p->value_width, p->value_ld, keys->d_v, add);
    sum_over_rows(p, a, b, c0, c1, dst, rows->q_pairs, p->key_width, p->key_ld, keys->d_k, add);
    sum_over_keys(p, rows, keys, a, b, base, c0, c1, s);
}

/* What a tile of rows sees of a tile of keys. */
typedef struct tile_view {
    int64_t base;       /* the key of column 0 */
    int32_t columns;    /* a multiple of 16 */
    int32_t first, end; /* the rows that see some of it; none: first >= end */
    bool whole;         /* every row sees every column, except padding */
} tile_view;

static tile_view look(const backward_rows *rows, int32_t n, const backward_keys *keys,
                      const backward_scratch *s)
{
    tile_view v = {.base = keys->key0 & ~(int64_t)15};
    const int32_t seen = (int32_t)(keys->key1 - v.base);
    v.columns = (seen + 15) & ~15;
    v.whole = v.base == keys->key0 && (seen == v.columns || keys->key1 == keys->seq->nk);
    for (int32_t r = 0; r < n + (n & 1); r++) {
        const int64_t lo = rows->lo[r] > keys->key0 ? rows->lo[r] : keys->key0,
                      hi = rows->hi[r] < keys->key1 ? rows->hi[r] : keys->key1;
        s->tile_lo[r] = lo < hi ? (int32_t)(lo - v.base) : 0;
        s->tile_hi[r] = lo < hi ? (int32_t)(hi - v.base) : 0;
        v.whole = v.whole && (r == n || (s->tile_lo[r] == 0 && s->tile_hi[r] == seen));
    }
    rows_meeting(s, n, 0, v.columns, &v.first, &v.end);
    return v;
}

/* S and dP where the tile's rows see them. */
static void score_all(const backward_plan *p, const backward_rows *rows, int32_t n, const backward_keys *keys,
                      const tile_view *v, const backward_scratch *s)
{
    const attention_kernels *k = p->attend.kernels;
    for (int32_t c = 0; c < v->columns;) {
        const int64_t in_panel = (keys->seq->packed0 + v->base + c) % k->panel;
        const int32_t w =
            (int32_t)(k->panel - in_panel < v->columns - c ? k->panel - in_panel : v->columns - c);
        int32_t a, b;
        rows_meeting(s, n, c, c + w, &a, &b);
        if (a < b) score(p, rows, keys, a, b, v->base, c, w, s);
        c += w;
    }
}

void backward_weigh(const backward_plan *p, const backward_rows *rows, int32_t n, const backward_keys *keys,
                    const backward_scratch *s)
{
    const tile_view v = look(rows, n, keys, s);
    float *shrink = (float *)(void *)s->ds_words;
    if (v.first >= v.end) return;
    score_all(p, rows, n, keys, &v, s);
    const softmax_tile soft = {s->s + (int64_t)v.first * BACKWARD_LDS,
                               BACKWARD_LDS,
                               v.end - v.first,
                               v.columns,
                               s->tile_lo + v.first,
                               s->tile_hi + v.first,
                               p->attend.scale2,
                               rows->max + v.first,
                               rows->sum + v.first,
                               shrink + v.first};
    p->attend.kernels->softmax_f32(&soft);
    for (int32_t r = v.first; r < v.end; r++) {
        const int64_t at = (int64_t)r * BACKWARD_LDS + s->tile_lo[r];
        rows->mean[r] =
            rows->mean[r] * shrink[r] + backward_dot(s->s + at, s->dp + at, s->tile_hi[r] - s->tile_lo[r]);
    }
}

void backward_step(const backward_plan *p, const backward_rows *rows, int32_t n, backward_keys *keys,
                   const backward_scratch *s)
{
    const attention_kernels *k = p->attend.kernels;
    const tile_view v = look(rows, n, keys, s);
    const int64_t base = v.base;
    const int32_t columns = v.columns, first = v.first, end = v.end;
    bool nonfinite = false;
    if (first >= end) return;
    for (int32_t r = 0; r < n + (n & 1); r++) nonfinite |= rows->nonfinite[r];
    score_all(p, rows, n, keys, &v, s);
    const int32_t top = first & ~1;
    const softmax_backward_tile soft = {s->s + (int64_t)top * BACKWARD_LDS,
                                        s->dp + (int64_t)top * BACKWARD_LDS,
                                        BACKWARD_LDS,
                                        end + (end & 1) - top,
                                        columns,
                                        s->tile_lo + top,
                                        s->tile_hi + top,
                                        p->attend.scale2,
                                        rows->top + top,
                                        rows->factor + top,
                                        rows->delta + top,
                                        rows->row_scale + top,
                                        rows->dp_scale + top,
                                        s->p_pairs + top / 2 * BACKWARD_LDS,
                                        s->ds_pairs + top / 2 * BACKWARD_LDS,
                                        s->ds_words + top * (BACKWARD_LDS / 2)};
    if (p->attend.bf16) k->softmax_backward_bf16(&soft);
    else k->softmax_backward_f32(&soft);

    const backward_rows used = nonfinite ? finite_rows(p, rows, n, s) : *rows;
    if (v.whole && same_freshness(keys, columns)) {
        multiply(p, &used, keys, first, end, base, 0, columns, s);
        for (int32_t c = 0; c < columns; c += KEY_ALIGN) keys->fresh[c / KEY_ALIGN] = false;
    } else {
        for (int32_t c = 0; c < columns; c += KEY_ALIGN) {
            int32_t a, b;
            const int32_t c1 = c + KEY_ALIGN < columns ? c + KEY_ALIGN : columns;
            rows_meeting(s, n, c, c1, &a, &b);
            if (a >= b) continue;
            multiply(p, &used, keys, a, b, base, c, c1, s);
            keys->fresh[c / KEY_ALIGN] = false;
        }
    }
    if (nonfinite) add_nonfinite_rows(p, rows, keys, first, end, s);
    if (any_key_nonfinite(p, keys, base)) add_nonfinite_keys(p, rows, keys, first, end, base, s);
}
