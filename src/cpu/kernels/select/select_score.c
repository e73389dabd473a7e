/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * select_score.c - scores of compressed entries, tile by tile.
 *
 * mean_logit: the mean query of every tile (f32), with the scale folded in, times the panels of entries: one
 * row per tile. probability: products of 48 query rows by 128 entries become probabilities with the row's LSE
 * and are summed into the entry scores of the row's tile. Without an LSE from the compressed branch, an
 * earlier pass computes it with the same products. Scores take 24 KB of L1; only the entry scores of tiles
 * are kept. Limit: the products' FMAs (2 D a score) and one exp2 a score.
 *
 * Every row of products and every sum runs in one order that depends only on the tile.
 */
#include "cpu/rows_at.h"
#include "cpu/kernels/select/select.h"
#include "cpu/levels.h"

#include <math.h>
#include <string.h>

enum { ENTRY_BYTES = 1 << 20 /* most bytes of a task's entry scores, where several tiles share it */ };

void select_plan_make(const stage_exec *exec, const select_args *args, select_plan *p)
{
    const bool softmax = args->rule.scorer == SELECT_PROBABILITY;
    memset(p, 0, sizeof *p);
    p->args = args;
    p->attend = (attend_args){.mask = ATTEND_COMPRESSED,
                              .seqs = args->seqs,
                              .causal = args->causal,
                              .scale = args->rule.scale,
                              .block_size = args->rule.block_size,
                              .stride = args->rule.stride,
                              .visibility = args->visibility,
                              .tile = args->tile,
                              .scope = args->rule.scope,
                              .q = args->q,
                              .k = args->keys,
                              .v = args->keys};
    p->attention = attend_plan_of(exec, &p->attend);
    attend_plan *a = &p->attention;
    if (args->rule.scope == LIST_BY_HEAD) {
        a->hs = 1;
        a->units = a->heads;
    }
    if (!softmax) {
        a->bf16 = false;
        a->key_words = a->dim_k;
    }
    p->kernels = cpu_kernels_for(exec->cpu_level)->nsa;
    p->list_heads = a->units;
    p->hs = a->hs;
    p->tile = args->tile;
    p->width = round_up16(args->seqs.n_kv + 1);
    p->blocks = mask_blocks(args->seqs.n_q, args->rule.select_block);
    p->tiles = softmax ? SELECT_ROWS / (p->tile * p->hs) : SELECT_ROWS;
    const int64_t most = ENTRY_BYTES / 4 / p->width;
    if (p->tiles > most) p->tiles = most;
    if (p->tiles < 1) p->tiles = 1;
}

void *select_keys_carve(const select_plan *p, arena *a)
{
    return arena_take(a, (size_t)(p->attention.kv_heads * p->attention.packed_rows * p->attention.key_words) *
                             4);
}

void select_keys_pack(const stage_exec *exec, const select_plan *p, void *keys)
{
    const attend_pack_target target = {&p->attend.k, keys, NULL, NULL, 0};
    attend_pack_all(exec, &p->attention, &target, 1);
}

void select_scratch_carve(const select_plan *p, arena *a, select_scratch *s)
{
    const bool softmax = p->args->rule.scorer == SELECT_PROBABILITY;
    const int64_t k = p->args->rule.k < p->blocks ? p->args->rule.k : p->blocks;
    const int64_t groups = mask_blocks(p->width, STAGE_GROUP_ENTRIES);
    const size_t most = (size_t)(k > groups ? k : groups);
    memset(s, 0, sizeof *s);
    if (softmax) {
        s->chunk.q = arena_take(a, (size_t)(SELECT_ROWS * p->attention.key_words) * 4);
        s->s = arena_take(a, (size_t)SELECT_ROWS * SELECT_KEYS * 4);
        float **floats[] = {&s->lse2, &s->max, &s->sum, &s->shrink};
        int32_t **ints[] = {&s->lo, &s->seen, &s->tile_hi};
        for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
            *floats[i] = arena_take(a, SELECT_ROWS * 4);
        for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) *ints[i] = arena_take(a, SELECT_ROWS * 4);
    } else {
        s->mean = arena_take(a, (size_t)(p->tiles * p->attention.dim_k) * 4);
    }
    s->entries = arena_take(a, (size_t)(p->tiles * p->width) * 4);
    s->scores = arena_take(a, (size_t)(p->blocks + groups + 16) * 4);
    s->best = arena_take(a, most * sizeof *s->best);
    s->chosen = arena_take(a, most * sizeof *s->chosen);
}

/* c[m][columns rounded up to 16] = a K^T for entries [first, first + columns) of a head's key panels; first
 * is a multiple of the panel. */
static void products(const select_plan *p, const void *keys, const attend_sequence *seq, int64_t kv_head,
                     int64_t m, const void *a, int64_t first, int64_t columns, float *c, int64_t ldc)
{
    const attend_plan *t = &p->attention;
    const int64_t panel = t->kernels->panel;
    const float *base = (const float *)keys + (kv_head * t->packed_rows + seq->packed0) * t->key_words;
    mm_kernel *mm = t->bf16 ? t->kernels->mm_bf16 : t->kernels->mm_f32;
    for (int64_t j = 0; j < columns; j += panel)
        mm(m, columns - j < panel ? columns - j : panel, t->key_words, a, t->key_words, 1,
           base + (first + j) * t->key_words, panel, c + j, ldc, false);
}

static void score_mean_logits(const select_plan *p, const void *keys, int64_t b, int64_t list_head,
                              int64_t tile0, int64_t count, select_scratch *s)
{
    const attend_plan *t = &p->attention;
    const attend_sequence seq = attend_sequence_at(t, b);
    const int64_t head0 = list_head * p->hs, dim = t->dim_k;
    int64_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = (tile0 + i) * p->tile, n = seq.nq - first < p->tile ? seq.nq - first : p->tile;
        float *mean = s->mean + i * dim, one[MAX_DIM];
        memset(mean, 0, (size_t)dim * sizeof *mean);
        for (int64_t h = 0; h < p->hs; h++) {
            const row_source rows = rows_at(&p->args->q, seq.view_b, seq.q0 + first, head0 + h, n);
            p->kernels->sum_rows(&rows, one);
            p->kernels->rows->add_scaled(mean, one, p->attend.scale / (float)(n * p->hs), dim);
        }
        const int64_t last = select_seen(p, &seq, first + n - 1);
        if (last > seen) seen = last;
    }
    products(p, keys, &seq, t->units == t->heads ? list_head / t->group : list_head, count, s->mean, 0, seen,
             s->entries, p->width);
}

/* Running maxima and sums of the chunk's rows, then their LSEs in units of log 2. */
static void make_lse(const select_plan *p, const void *keys, int32_t rows, int64_t end, select_scratch *s)
{
    const attend_plan *t = &p->attention;
    for (int32_t r = 0; r < rows; r++) {
        s->max[r] = -INFINITY;
        s->sum[r] = 0.0f;
        s->lo[r] = 0;
    }
    for (int64_t first = 0; first < end; first += SELECT_KEYS) {
        const int64_t columns = end - first < SELECT_KEYS ? end - first : SELECT_KEYS;
        products(p, keys, &s->chunk.seq, s->chunk.kv_head, rows, s->chunk.q, first, columns, s->s,
                 SELECT_KEYS);
        for (int32_t r = 0; r < rows; r++) {
            const int64_t hi = s->seen[r] - first;
            s->tile_hi[r] = (int32_t)(hi < 0 ? 0 : hi < columns ? hi : columns);
        }
        const softmax_tile tile = {s->s,   SELECT_KEYS, rows,      (int32_t)round_up16(columns),
                                   s->lo,  s->tile_hi,  t->scale2, s->max,
                                   s->sum, s->shrink};
        t->kernels->softmax_f32(&tile);
    }
    for (int32_t r = 0; r < rows; r++) s->lse2[r] = s->max[r] * t->scale2 + log2f(s->sum[r]);
}

/* Adds the probabilities of rows [row0, row0 + rows) of the list head to their tiles' entry scores. */
static void add_rows(const select_plan *p, const void *keys, int64_t b, int64_t list_head, int64_t tile0,
                     int64_t row0, int32_t rows, select_scratch *s)
{
    const attend_plan *t = &p->attention;
    attend_chunk *c = &s->chunk;
    attend_chunk_begin(t, b, (int32_t)list_head, row0, rows, c);
    const quern_tensor *lse = &p->args->lse;
    for (int32_t r = 0; r < rows; r++) {
        const int64_t query = (row0 + r) / p->hs, head = c->head0 + (row0 + r) % p->hs;
        s->seen[r] = (int32_t)select_seen(p, &c->seq, query);
        if (is_present(lse))
            s->lse2[r] = log2_e * *(const float *)row_at(lse, c->seq.view_b, head, c->seq.q0 + query);
    }
    const int64_t end = s->seen[rows - 1], per_tile = p->tile * p->hs;
    if (!is_present(lse)) make_lse(p, keys, rows, end, s);
    for (int64_t first = 0; first < end; first += SELECT_KEYS) {
        const int64_t columns = end - first < SELECT_KEYS ? end - first : SELECT_KEYS;
        products(p, keys, &c->seq, c->kv_head, rows, c->q, first, columns, s->s, SELECT_KEYS);
        for (int32_t r = 0; r < rows;) { /* the rows of one tile at a time */
            const int64_t tile = (row0 + r) / per_tile, left = (tile + 1) * per_tile - (row0 + r);
            const int32_t n = left < rows - r ? (int32_t)left : rows - r;
            for (int32_t i = r; i < r + n; i++)
                s->tile_hi[i] = (int32_t)(s->seen[i] - first < 0 ? 0 : s->seen[i] - first);
            p->kernels->add_probabilities(s->s + (int64_t)r * SELECT_KEYS, SELECT_KEYS, n, s->tile_hi + r,
                                          (int32_t)round_up16(columns), t->scale2, s->lse2 + r,
                                          s->entries + (tile - tile0) * p->width + first);
            r += n;
        }
    }
}

void select_score(const select_plan *p, const void *keys, int64_t b, int64_t list_head, int64_t tile0,
                  int64_t count, select_scratch *s)
{
    if (p->args->rule.scorer == SELECT_MEAN_LOGIT) {
        score_mean_logits(p, keys, b, list_head, tile0, count, s);
        return;
    }
    const attend_sequence seq = attend_sequence_at(&p->attention, b);
    const int64_t first = tile0 * p->tile * p->hs;
    int64_t end = (tile0 + count) * p->tile * p->hs;
    if (end > seq.nq * p->hs) end = seq.nq * p->hs;
    memset(s->entries, 0, (size_t)(count * p->width) * sizeof *s->entries);
    for (int64_t row = first; row < end; row += SELECT_ROWS)
        add_rows(p, keys, b, list_head, tile0, row,
                 (int32_t)(end - row < SELECT_ROWS ? end - row : SELECT_ROWS), s);
}
