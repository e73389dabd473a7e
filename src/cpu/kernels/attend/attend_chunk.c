/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_chunk.c - a chunk of query rows of one sequence and head group, from packing Q to storing O, under
 * any mask. It decides which tiles of keys the rows are multiplied with, and in which order.
 *
 * A range (causal, window, compressed entries) is walked in tiles of 384 keys. Lists of blocks are walked in
 * one of two orders. Tile by tile, where the rows that share a list fill a tile: the blocks are laid side by
 * side into tiles of keys. Key by key, for short tiles (per-token selection, where only the heads of a group
 * share a list): the chunk's lists are inverted, the rows that chose a block are gathered into a tile, and
 * its result is added to their running O. A block's K and V (64 KB at f32, 64 keys, D = 128) are then read
 * once per chunk, not once per query. Gathering Q and adding O moves 1.5 KB a row and block, 10% of the time
 * of its products. Both walks take blocks in ascending order, so the sums have one order.
 */
#include "cpu/kernels/attend/attend_tile.h"
#include "cpu/rows_at.h"

#include <math.h>
#include <string.h>

enum { CHUNK_BYTES = 2 << 20 /* of q and o */, CHUNK_MOST = 4096 /* rows */ };

int32_t attend_chunk_rows(const attend_plan *plan)
{
    const int64_t row_bytes = 4 * (plan->key_words + plan->value_width);
    int64_t rows = CHUNK_BYTES / row_bytes;
    const int64_t tile = (plan->args->tile > 0 ? plan->args->tile : 1) * plan->hs;
    if (rows > CHUNK_MOST) rows = CHUNK_MOST;
    rows = rows / tile * tile;
    return (int32_t)(rows < tile ? tile : rows);
}

void attend_chunk_carve(const attend_plan *plan, int32_t capacity, arena *a, attend_chunk *chunk)
{
    const size_t n = (size_t)capacity;
    chunk->capacity = capacity;
    chunk->q = arena_take(a, n * (size_t)plan->key_words * 4);
    chunk->o = arena_take(a, n * (size_t)plan->value_width * 4);
    chunk->max = arena_take(a, n * 4);
    chunk->sum = arena_take(a, n * 4);
    chunk->lo = arena_take(a, n * 4);
    chunk->hi = arena_take(a, n * 4);
}

void attend_scratch_carve(const attend_plan *plan, int32_t capacity, arena *a, attend_scratch *s)
{
    s->s = arena_take(a, (size_t)STEP_ROWS * TILE_KEYS * 4);
    s->gather_q = arena_take(a, (size_t)(TILE_ROWS * plan->key_words) * 4);
    s->gather_o = arena_take(a, (size_t)(TILE_ROWS * plan->value_width) * 4);
    float **floats[] = {&s->max, &s->sum, &s->shrink};
    int32_t **ints[] = {&s->lo, &s->hi, &s->rows, &s->tile_lo, &s->tile_hi};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) *floats[i] = arena_take(a, TILE_ROWS * 4);
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) *ints[i] = arena_take(a, TILE_ROWS * 4);
    attend_lists_carve(plan, capacity, a, &s->lists);
    s->expected = (expected_rows){.end = 0};
}

enum { QUERIES_AHEAD = 4 };

/* Prefetches the rows of a query's heads: the kernel that packs one query has no later rows to prefetch. */
static void prefetch_query(const quern_tensor *q, int64_t at, int64_t heads, int64_t dim)
{
    const int64_t size = (int64_t)quern_dtype_size(q->dtype);
    for (int64_t h = 0; h < heads; h++) {
        const char *row = (const char *)q->data + (at + h * q->strides[2]) * size;
        for (int64_t i = 0; i < dim * size; i += 64) __builtin_prefetch(row + i);
    }
}

void attend_chunk_begin(const attend_plan *plan, int64_t b, int32_t unit, int64_t row0, int32_t rows,
                        attend_chunk *c)
{
    const attention_kernels *k = plan->kernels;
    const quern_tensor *q = &plan->args->q;
    c->seq = attend_sequence_at(plan, b);
    c->unit = unit;
    c->kv_head = plan->units == plan->heads ? unit / plan->group : unit;
    c->head0 = plan->units == plan->heads ? unit : unit * plan->group;
    c->row0 = row0;
    c->rows = rows;
    for (int32_t r = 0;
         r < rows;) { /* the heads of one query at a time; of all queries, where that is one head */
        const int64_t query = (row0 + r) / plan->hs, h = (row0 + r) % plan->hs;
        const int64_t n = plan->hs > 1 && plan->hs - h < rows - r ? plan->hs - h : rows - r;
        const int64_t at = c->seq.view_b * q->strides[0] + (c->seq.q0 + query) * q->strides[1] +
                           (c->head0 + h) * q->strides[2];
        const int64_t stride = q->strides[plan->hs > 1 ? 2 : 1];
        if (plan->hs > 1 && r + QUERIES_AHEAD * plan->hs < rows)
            prefetch_query(q, at + QUERIES_AHEAD * q->strides[1], n, plan->dim_k);
        const row_source src = {(const char *)q->data + at * (int64_t)quern_dtype_size(q->dtype), q->dtype,
                                stride, n, plan->dim_k};
        if (plan->bf16)
            k->pack_rows_bf16(&src, (uint16_t *)((uint32_t *)c->q + r * plan->key_words),
                              2 * plan->key_words);
        else k->pack_rows_f32(&src, 1.0f, (float *)c->q + r * plan->key_words, plan->key_words);
        r += (int32_t)n;
    }
}

expected_rows attend_expect(const attend_plan *plan, int64_t index, int64_t pieces, int64_t chunk_rows)
{
    if (index >= plan->sequences * plan->units * pieces) return (expected_rows){.end = 0};
    const int64_t b = index / pieces / plan->units, unit = index / pieces % plan->units;
    const int64_t row0 = (pieces - 1 - index % pieces) * chunk_rows;
    const quern_tensor *q = &plan->args->q;
    const attend_sequence seq = attend_sequence_at(plan, b);
    const int64_t size = (int64_t)quern_dtype_size(q->dtype),
                  head = plan->units == plan->heads ? unit : unit * plan->group;
    const int64_t left = seq.nq * plan->hs - row0, query = row0 / plan->hs;
    const int64_t at = seq.view_b * q->strides[0] + (seq.q0 + query) * q->strides[1] + head * q->strides[2];
    const int64_t most = chunk_rows < TILE_ROWS ? chunk_rows : TILE_ROWS;
    const int32_t first = (int32_t)(row0 % plan->hs), n = (int32_t)(left < most ? left : most);
    return (expected_rows){(const char *)q->data + at * size,
                           q->strides[1] * size,
                           q->strides[2] * size,
                           plan->dim_k * size,
                           plan->hs,
                           first,
                           first + n};
}

static void clear_o(const attend_plan *plan, const attend_chunk *c)
{
    memset(c->o, 0, (size_t)(c->rows * plan->value_width) * sizeof *c->o);
}

void attend_chunk_reset(const attend_plan *plan, attend_chunk *c)
{
    int64_t query = -1, lo = 0, hi = 0;
    for (int32_t r = 0; r < c->rows; r++) {
        if ((c->row0 + r) / plan->hs != query) {
            query = (c->row0 + r) / plan->hs;
            attend_interval(plan->args, &c->seq, query, &lo, &hi);
        }
        c->lo[r] = (int32_t)lo;
        c->hi[r] = (int32_t)hi;
        c->max[r] = -INFINITY;
        c->sum[r] = 0.0f;
    }
}

static tile_rows rows_of(const attend_plan *p, const attend_chunk *c, int32_t first, int32_t n)
{
    return (tile_rows){&c->seq,
                       n,
                       c->kv_head,
                       (const float *)c->q + (int64_t)first * p->key_words,
                       c->o + (int64_t)first * p->value_width,
                       c->lo + first,
                       c->hi + first,
                       c->max + first,
                       c->sum + first,
                       false};
}

/* The keys from `key` on of the rows' intervals, at most a tile of them. */
static key_tile range_tile(int64_t key, int64_t end)
{
    if (key >= end) return (key_tile){.n = 0};
    return (key_tile){1, {{key, key + TILE_KEYS < end ? key + TILE_KEYS : end}}};
}

static void run_range(const attend_plan *p, const attend_packed *packed, const attend_chunk *c,
                      attend_scratch *s)
{
    for (int32_t first = 0; first < c->rows; first += TILE_ROWS) {
        const int32_t n = c->rows - first < TILE_ROWS ? c->rows - first : TILE_ROWS;
        tile_rows t = rows_of(p, c, first, n);
        const int64_t end = t.hi[n - 1];
        key_tile next = range_tile(t.lo[0] / KEY_ALIGN * KEY_ALIGN, end);
        if (next.n == 0) memset(t.o, 0, (size_t)(n * p->value_width) * sizeof *t.o);
        for (t.fresh = true; next.n > 0; t.fresh = false) {
            const key_tile keys = next;
            next = range_tile(keys.run[0].first + TILE_KEYS, end);
            attend_tile_step(p, packed, &t, &keys, &next, s);
        }
    }
}

/* Appends as much of run [*key, end) as fits to a tile, and moves *key on. Returns whether the tile is full.
 * Blocks whose length is not a multiple of 16 get tiles of their own. */
static bool take_keys(const attend_plan *p, key_tile *tile, int32_t *columns, int64_t *key, int64_t end)
{
    const int64_t base = *key & ~(int64_t)15;
    int64_t stop = base + TILE_KEYS - *columns;
    if (stop > end) stop = end;
    if (stop <= *key || (tile->n > 0 && p->list_block % 16 != 0)) return true;
    if (tile->n > 0 && tile->run[tile->n - 1].end == *key) tile->run[tile->n - 1].end = stop;
    else tile->run[tile->n++] = (key_run){*key, stop};
    *columns += (int32_t)((stop - base + 15) & ~(int64_t)15);
    *key = stop;
    return *columns == TILE_KEYS;
}

/* An ascending list of blocks as tiles of keys. */
typedef struct list_walk {
    const int32_t *list;
    int32_t n, at;
    int64_t key; /* the next of block list[at], or -1 for its first */
} list_walk;

static key_tile next_tile(const attend_plan *p, int64_t nk, list_walk *w)
{
    key_tile tile = {.n = 0};
    int32_t columns = 0;
    for (; w->at < w->n; w->at++, w->key = -1) {
        const int64_t end =
            (w->list[w->at] + 1) * p->list_block < nk ? (w->list[w->at] + 1) * p->list_block : nk;
        if (w->key < 0) w->key = w->list[w->at] * p->list_block;
        const bool full = take_keys(p, &tile, &columns, &w->key, end);
        if (w->key < end) return tile;
        if (full) {
            w->at++;
            w->key = -1;
            return tile;
        }
    }
    return tile;
}

static void run_lists_by_tile(const attend_plan *p, const attend_packed *packed, const attend_chunk *c,
                              attend_scratch *s)
{
    const int64_t tile_rows_n = p->args->tile * p->hs;
    int32_t *list = s->lists.list;
    attend_lists_reset(p, &c->seq, &s->lists);
    for (int32_t first = 0; first < c->rows;) {
        const int64_t tile = (c->row0 + first) / tile_rows_n, tile_end = (tile + 1) * tile_rows_n - c->row0;
        const int32_t stop = tile_end < c->rows ? (int32_t)tile_end : c->rows;
        const int32_t n = attend_list_clean(p, &c->seq, c->unit, tile, c->hi[stop - 1],
                                            (int32_t)(tile - c->row0 / tile_rows_n) + 1, &s->lists);
        attend_list_sort(list, n); /* the caller's lists may have any order */
        for (; first < stop; first += TILE_ROWS) {
            const tile_rows t = rows_of(p, c, first, stop - first < TILE_ROWS ? stop - first : TILE_ROWS);
            list_walk walk = {list, n, 0, -1};
            key_tile next = next_tile(p, c->seq.nk, &walk);
            while (next.n > 0) {
                const key_tile keys = next;
                next = next_tile(p, c->seq.nk, &walk);
                attend_tile_step(p, packed, &t, &keys, &next, s);
            }
        }
        first = stop;
    }
}

/* Adds a gathered tile's P V to the chunk's rows and returns their running softmax. */
static void scatter(const attend_plan *p, int32_t n, attend_chunk *c, attend_scratch *s)
{
    for (int32_t i = 0; i < n; i++) {
        const int32_t r = s->rows[i];
        p->kernels->scale_add_row(c->o + (int64_t)r * p->value_width, s->shrink[i],
                                  s->gather_o + (int64_t)i * p->value_width, p->value_width);
        c->max[r] = s->max[i];
        c->sum[r] = s->sum[i];
    }
}

/* The gathered rows against block x. */
static void run_gathered(const attend_plan *p, const attend_packed *packed, int32_t n, int32_t x,
                         const key_tile *after, attend_chunk *c, attend_scratch *s)
{
    const tile_rows t = {&c->seq, n,     c->kv_head, s->gather_q, s->gather_o,
                         s->lo,   s->hi, s->max,     s->sum,      true};
    list_walk walk = {&x, 1, 0, -1};
    key_tile next = next_tile(p, c->seq.nk, &walk);
    while (next.n > 0) {
        const key_tile keys = next;
        next = next_tile(p, c->seq.nk, &walk);
        attend_tile_step(p, packed, &t, &keys, next.n > 0 ? &next : after, s);
        scatter(p, n, c, s);
    }
}

static void run_lists_by_key(const attend_plan *p, const attend_packed *packed, attend_chunk *c,
                             attend_scratch *s)
{
    const int64_t per_tile = p->args->tile * p->hs;
    const size_t row_bytes = (size_t)p->key_words * 4;
    const int32_t blocks =
        (int32_t)attend_lists_invert(p, &c->seq, c->unit, c->row0, c->rows, c->hi, &s->lists);
    const int32_t *start = s->lists.start, *entries = s->lists.entries;
    for (int32_t x = 0, next_x; x < blocks; x = next_x) {
        for (next_x = x + 1; next_x < blocks && start[next_x] == start[next_x + 1];) next_x++;
        list_walk walk = {&next_x, next_x < blocks ? 1 : 0, 0, -1};
        const key_tile after = next_tile(p, c->seq.nk, &walk);
        int32_t n = 0;
        for (int32_t e = start[x]; e < start[x + 1]; e++) {
            const int64_t from = entries[e] * per_tile,
                          to = from + per_tile < c->rows ? from + per_tile : c->rows;
            for (int64_t r = from; r < to; r++) {
                if (c->hi[r] <= x * p->list_block) continue;
                memcpy((char *)s->gather_q + n * row_bytes, (const char *)c->q + r * row_bytes, row_bytes);
                for (int64_t i = 0; i < p->value_width; i += 16)
                    __builtin_prefetch(c->o + r * p->value_width + i, 1, 2);
                s->max[n] = c->max[r];
                s->sum[n] = c->sum[r];
                s->lo[n] = c->lo[r];
                s->hi[n] = c->hi[r];
                s->rows[n++] = (int32_t)r;
                if (n < TILE_ROWS) continue;
                run_gathered(p, packed, n, x, &after, c, s);
                n = 0;
            }
        }
        if (n > 0) run_gathered(p, packed, n, x, &after, c, s);
    }
}

void attend_chunk_run(const attend_plan *p, const attend_packed *packed, attend_chunk *c, attend_scratch *s)
{
    if (c->rows == 0) return;
    if (p->args->list.ndim == 0) {
        run_range(p, packed, c, s);
        return;
    }
    clear_o(p, c);
    if (attend_walks_by_key(p)) run_lists_by_key(p, packed, c, s);
    else if (attend_list_length(p) > 0) run_lists_by_tile(p, packed, c, s);
}

void attend_chunk_finish(const attend_plan *p, attend_chunk *c)
{
    const double ln2 = 0.69314718055994530942;
    for (int32_t r = 0; r < c->rows; r++) {
        const float sum = c->sum[r], sink = attend_sink(p->args, c->head0 + (c->row0 + r) % p->hs);
        float *o = c->o + (int64_t)r * p->value_width;
        const double lse =
            sum == 0.0f ? -INFINITY : (double)c->max[r] * (double)p->scale2 * ln2 + log((double)sum);
        c->sum[r] = (float)lse;
        if (sink == INFINITY) memset(o, 0, (size_t)p->value_width * sizeof *o);
        else if (sink != -INFINITY)
            p->kernels->scale_row(o, sum == 0.0f ? 0.0f : (float)(attend_keys_share(lse, sink) / (double)sum),
                                  p->value_width);
        else if (sum != 0.0f) p->kernels->scale_row(o, 1.0f / sum, p->value_width);
    }
}

void attend_chunk_store(const attend_plan *p, const attend_chunk *c)
{
    const quern_tensor *o = &p->args->o, *lse = &p->args->lse;
    for (int32_t r = 0; r < c->rows; r++) {
        const int64_t query = c->seq.q0 + (c->row0 + r) / p->hs, head = c->head0 + (c->row0 + r) % p->hs;
        if (o->ndim > 0)
            p->kernels->rows->convert(c->o + (int64_t)r * p->value_width, QUERN_F32,
                                      row_at(o, c->seq.view_b, query, head), o->dtype, p->dim_v);
        if (lse->ndim > 0)
            ((float *)lse
                 ->data)[c->seq.view_b * lse->strides[0] + head * lse->strides[1] + query * lse->strides[2]] =
                c->sum[r];
    }
}
