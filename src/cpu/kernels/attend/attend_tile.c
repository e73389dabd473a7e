/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_tile.c - one step of blockwise softmax attention (FlashAttention-2's recurrence): up to 192 query
 * rows against up to 384 keys.
 *
 *   S = Q K^T; m' = max(m, rowmax S); P = 2^(S - m'); l = l 2^(m - m') + rowsum P; O = O 2^(m - m') + P V
 *
 * Rows are processed in groups of 96. That is whole vectors of rows for the softmax, and 16 micro-kernels
 * share a panel of K or V in L1 (32 KB for 64 keys). S, Q and O of a group (240 KB) come from L2. So do K and
 * V (384 KB at f32, D = 128), which the 192 rows use twice; the next tile's are prefetched there. Longer
 * tiles rescale and add to O less often: 384 keys are 1% faster than 256, 512 no faster than 384. Each
 * product accumulates P V from zero in registers and adds it to O once: adding in place would cost precision
 * over long sums. O is rescaled only in rows whose maximum rose.
 *
 * A group's keys are cut to those that some of its rows see. At the edge of a mask (causal, window) the
 * products take six rows at a time over the keys that these see, in whole vectors for S. An edge then costs
 * three keys and half a vector a row instead of half a group. Masks are intervals of columns.
 *
 * 0 * inf must not carry a nonfinite value to rows that do not see it. The value panels hold 0 in its place,
 * and add_nonfinite() adds it to the rows that see it (nonfinite.h).
 *
 * Limit: 2 vector FMAs a cycle in the products. At D = 128, f32, a group's step has 18.9 MFLOP, which take
 * 294912 cycles; softmax adds 4%, packing, masks and stores 4%.
 */
#include "cpu/kernels/attend/attend_tile.h"

#include "cpu/kernels/attend/nonfinite.h"
#include "cpu/rows_at.h"

#include <string.h>

enum { EDGE_ROWS = 6 }; /* the rows of a micro-kernel */

/* A group of rows, the keys of a tile that it needs, and their columns in S. */
typedef struct row_group {
    tile_rows t;
    key_tile keys;
    int32_t column[TILE_KEYS / 16]; /* of run i's first key, rounded down to 16 */
    int32_t columns;                /* of S: a multiple of 16 */
    float *s;
    int32_t *lo, *hi; /* columns that a row sees */
} row_group;

static int64_t rounded_down(int64_t key)
{
    return key & ~(int64_t)15;
}

static const float *values_at(const attend_plan *p, const attend_packed *packed, const tile_rows *t,
                              int64_t key)
{
    const int64_t pairs = p->bf16 ? 2 : 1, stride = p->packed_rows / pairs * p->value_panel;
    return (const float *)packed->values + t->head * attend_row_panels(p, p->dim_v) * stride +
           (t->seq->packed0 + key) / pairs * p->value_panel;
}

static const float *keys_at(const attend_plan *p, const attend_packed *packed, const tile_rows *t,
                            int64_t key)
{
    const int64_t in_panel = key % p->kernels->panel;
    const float *keys =
        (const float *)packed->keys + (t->head * p->packed_rows + t->seq->packed0) * p->key_words;
    return keys + (key - in_panel) * p->key_words + in_panel;
}

/* Prefetches lines [part / parts, (part + 1) / parts) of `bytes` at p. */
static void prefetch_part(const void *p, int64_t bytes, int64_t part, int64_t parts)
{
    const char *from = (const char *)p + bytes * part / parts,
               *to = (const char *)p + bytes * (part + 1) / parts;
    for (; from < to; from += 64) __builtin_prefetch(from, 0, 2);
}

enum { EXPECTED_A_STEP = 16 };

static void prefetch_expected(expected_rows *x)
{
    for (int32_t i = 0; i < EXPECTED_A_STEP && x->at < x->end; i++, x->at++)
        prefetch_part(x->row0 + x->at / x->hs * x->query_step + x->at % x->hs * x->head_step, x->bytes, 0, 1);
}

static void prefetch_tile(const attend_plan *p, const attend_packed *packed, const tile_rows *t,
                          const key_tile *keys, int64_t part, int64_t parts)
{
    const int64_t pairs = p->bf16 ? 2 : 1, stride = p->packed_rows / pairs * p->value_panel;
    for (int32_t i = 0; i < keys->n; i++) {
        const int64_t n = keys->run[i].end - keys->run[i].first;
        prefetch_part(keys_at(p, packed, t, keys->run[i].first), n * p->key_words * 4, part, parts);
        const float *values = values_at(p, packed, t, keys->run[i].first);
        for (int64_t j = 0; j < attend_row_panels(p, p->dim_v); j++)
            prefetch_part(values + j * stride, n / pairs * p->value_panel * 4, part, parts);
    }
}

/* O[row .. row + n) += P[..][c0 .. c1) V, column c0 holding key `key`. */
static void add_values(const attend_plan *p, const attend_packed *packed, const row_group *g, int32_t row,
                       int32_t n, int32_t c0, int32_t c1, int64_t key, bool accumulate)
{
    const int64_t pairs = p->bf16 ? 2 : 1, stride = p->packed_rows / pairs * p->value_panel,
                  depth = (c1 - c0 + pairs - 1) / pairs;
    mm_kernel *mm = p->bf16 ? p->kernels->mm_bf16 : p->kernels->mm_f32;
    const float *values = values_at(p, packed, &g->t, key),
                *weights = g->s + (int64_t)row * TILE_KEYS + c0 / pairs;
    for (int64_t column = 0; column < p->value_width; column += p->value_panel, values += stride) {
        const int64_t width =
            p->value_width - column < p->value_panel ? p->value_width - column : p->value_panel;
        mm(n, width, depth, weights, TILE_KEYS, 1, values, p->value_panel,
           g->t.o + row * p->value_width + column, p->value_width, accumulate);
    }
}

/* P of row r, column c, rounded as the product P V read it. */
static float weight_at(const attend_plan *p, const row_group *g, int32_t r, int64_t c)
{
    return element_as_f32(g->s + (int64_t)r * TILE_KEYS, p->bf16 ? QUERN_BF16 : QUERN_F32, c);
}

/* Adds P V over the nonfinite elements of keys [first, end) to the rows that see them. A key's column is key
 * - base. */
static void add_nonfinite(const attend_plan *p, const row_group *g, int64_t first, int64_t end, int64_t base)
{
    const quern_tensor *v = &p->args->v;
    for (int64_t key = first; key < end; key++) {
        const void *row = row_at(v, g->t.seq->view_b, g->t.seq->k0 + key, g->t.head);
        const int64_t c = key - base;
        for (int64_t d = 0; d < p->dim_v; d++) {
            if (!is_nonfinite(row, v->dtype, d)) continue;
            for (int32_t r = 0; r < g->t.n; r++)
                if (c >= g->lo[r] && c < g->hi[r])
                    g->t.o[r * p->value_width + d] +=
                        weight_at(p, g, r, c) * element_as_f32(row, v->dtype, d);
        }
    }
}

/* The same for all keys of the group. */
static void add_all_nonfinite(const attend_plan *p, const attend_packed *packed, const row_group *g)
{
    const uint8_t *nonfinite =
        packed->nonfinite + (g->t.head * p->packed_rows + g->t.seq->packed0) / KEY_ALIGN;
    for (int32_t i = 0; i < g->keys.n; i++) {
        const int64_t first = g->keys.run[i].first, end = g->keys.run[i].end,
                      base = rounded_down(first) - g->column[i];
        for (int64_t at = first / KEY_ALIGN; at <= (end - 1) / KEY_ALIGN; at++) {
            const int64_t from = at * KEY_ALIGN > first ? at * KEY_ALIGN : first,
                          to = (at + 1) * KEY_ALIGN < end ? (at + 1) * KEY_ALIGN : end;
            if (nonfinite[at]) add_nonfinite(p, g, from, to, base);
        }
    }
}

/* Cuts the tile's keys to those that some row of the group sees and lays them out as columns. Returns whether
 * every row sees every key. */
static bool lay_out(const key_tile *tile, row_group *g)
{
    const tile_rows *t = &g->t;
    const int64_t lowest = t->lo[0], highest = t->hi[t->n - 1];
    bool whole = true;
    g->keys.n = 0;
    g->columns = 0;
    for (int32_t i = 0; i < tile->n; i++) {
        const int64_t first = tile->run[i].first > lowest ? tile->run[i].first : lowest;
        const int64_t end = tile->run[i].end < highest ? tile->run[i].end : highest;
        if (first >= end) continue;
        g->keys.run[g->keys.n] = (key_run){first, end};
        g->column[g->keys.n++] = g->columns;
        g->columns += (int32_t)((end - rounded_down(first) + 15) & ~15);
        whole = whole && t->lo[t->n - 1] <= first && t->hi[0] >= end && first % 16 == 0 && end % 16 == 0;
    }
    for (int32_t r = 0; r < t->n; r++) {
        g->lo[r] = 0;
        g->hi[r] = whole ? g->columns : 0;
    }
    if (whole) return true;
    for (int32_t i = 0; i < g->keys.n; i++) {
        const int64_t first = g->keys.run[i].first, end = g->keys.run[i].end,
                      base = rounded_down(first) - g->column[i];
        for (int32_t r = 0; r < t->n; r++) {
            const int64_t lo = t->lo[r] > first ? t->lo[r] : first, hi = t->hi[r] < end ? t->hi[r] : end;
            if (lo >= hi) continue;
            if (i == 0) g->lo[r] = (int32_t)(lo - base);
            g->hi[r] = (int32_t)(hi - base);
        }
    }
    return false;
}

/* S = Q K^T of rows [row, row + n) in the columns from c0, a multiple of 16, to c1 at least. */
static void scores(const attend_plan *p, const attend_packed *packed, const row_group *g, int32_t row,
                   int32_t n, int32_t c0, int32_t c1)
{
    mm_kernel *mm = p->bf16 ? p->kernels->mm_bf16 : p->kernels->mm_f32;
    const int64_t panel = p->kernels->panel;
    for (int32_t i = 0; i < g->keys.n; i++) {
        const int64_t base = rounded_down(g->keys.run[i].first) - g->column[i];
        const int64_t first = base + (c0 > g->column[i] ? c0 : g->column[i]);
        const int64_t last = g->keys.run[i].end < base + c1 ? g->keys.run[i].end : base + c1,
                      end = (last + 15) & ~(int64_t)15;
        for (int64_t key = first, width; key < end; key += width) {
            const int64_t rest = panel - key % panel;
            width = end - key < rest ? end - key : rest;
            mm(n, width, p->key_words, g->t.q + row * p->key_words, p->key_words, 1,
               keys_at(p, packed, &g->t, key), panel, g->s + (int64_t)row * TILE_KEYS + (key - base),
               TILE_KEYS, false);
        }
    }
}

/* O (+)= P V of rows [row, row + n) over the columns [c0, c1), c0 a multiple of 16. */
static void weighted_values(const attend_plan *p, const attend_packed *packed, const row_group *g,
                            int32_t row, int32_t n, int32_t c0, int32_t c1)
{
    bool accumulate = !g->t.fresh;
    for (int32_t i = 0; i < g->keys.n; i++) {
        const int64_t base = rounded_down(g->keys.run[i].first) - g->column[i];
        const int32_t end = (int32_t)(g->keys.run[i].end - base);
        const int32_t from = c0 > g->column[i] ? c0 : g->column[i], to = c1 < end ? c1 : end;
        if (from >= to) continue;
        add_values(p, packed, g, row, n, from, to, base + from, accumulate);
        accumulate = true;
    }
    if (!accumulate) memset(g->t.o + row * p->value_width, 0, (size_t)(n * p->value_width) * sizeof *g->t.o);
}

/* The rows from `row` on that are multiplied together, and the columns that they see. */
static int32_t next_rows(const row_group *g, bool whole, int32_t row, int32_t *c0, int32_t *c1)
{
    int32_t n = g->t.n - row;
    *c0 = 0;
    *c1 = g->columns;
    if (whole) return n;
    if (n > EDGE_ROWS) n = EDGE_ROWS;
    *c0 = g->columns;
    *c1 = 0;
    for (int32_t r = row; r < row + n; r++) {
        if (g->lo[r] >= g->hi[r]) continue;
        if (g->lo[r] < *c0) *c0 = g->lo[r];
        if (g->hi[r] > *c1) *c1 = g->hi[r];
    }
    *c0 &= ~15;
    return n;
}

static void step_group(const attend_plan *p, const attend_packed *packed, const key_tile *tile, float *shrink,
                       row_group *g)
{
    const attention_kernels *k = p->kernels;
    const tile_rows *t = &g->t;
    const bool whole = lay_out(tile, g);
    if (g->keys.n == 0) {
        for (int32_t r = 0; r < t->n; r++) shrink[r] = 1.0f;
        if (t->fresh) memset(t->o, 0, (size_t)(t->n * p->value_width) * sizeof *t->o);
        return;
    }
    int32_t c0, c1;
    for (int32_t row = 0, n; row < t->n; row += n) {
        n = next_rows(g, whole, row, &c0, &c1);
        scores(p, packed, g, row, n, c0, c1);
    }
    const softmax_tile soft = {g->s,  TILE_KEYS, t->n,   g->columns, g->lo,
                               g->hi, p->scale2, t->max, t->sum,     shrink};
    if (p->bf16) k->softmax_bf16(&soft);
    else k->softmax_f32(&soft);
    if (!t->fresh)
        for (int32_t r = 0; r < t->n; r++)
            if (shrink[r] != 1.0f) k->scale_row(t->o + r * p->value_width, shrink[r], p->value_width);

    for (int32_t row = 0, n; row < t->n; row += n) {
        n = next_rows(g, whole, row, &c0, &c1);
        weighted_values(p, packed, g, row, n, c0, c1);
    }
    add_all_nonfinite(p, packed, g);
}

void attend_tile_step(const attend_plan *p, const attend_packed *packed, const tile_rows *rows,
                      const key_tile *keys, const key_tile *next, attend_scratch *s)
{
    row_group g;
    g.s = s->s;
    g.lo = s->tile_lo;
    g.hi = s->tile_hi;
    for (int32_t row = 0; row < rows->n; row += STEP_ROWS) {
        g.t = *rows;
        g.t.n = rows->n - row < STEP_ROWS ? rows->n - row : STEP_ROWS;
        g.t.q += row * p->key_words;
        g.t.o += row * p->value_width;
        g.t.lo += row;
        g.t.hi += row;
        g.t.max += row;
        g.t.sum += row;
        prefetch_tile(p, packed, rows, next, row, rows->n);
        prefetch_expected(&s->expected);
        step_group(p, packed, keys, s->shrink + row, &g);
    }
}
