/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_chunk.c - a chunk of query rows against the packed keys: blockwise softmax attention
 * (FlashAttention-2's recurrence) in tiles of 96 rows x 128 keys.
 *
 * A tile step: S = Q K^T by panels of keys, only for the rows that see some of the panel; softmax row by row
 * with masks as intervals; O = O shrink where the maximum rose; O += P V, accumulated from zero per tile. S
 * (48 KB) and one panel of K or V (32 KB at D = 128) live in L1 and L2. Values that are not finite must not
 * reach rows that do not see them through 0 * inf, so such tiles multiply row by row over the row's interval.
 *
 * Lists of blocks are walked in one of two orders. Tile by tile: the rows that share a list fill a tile, each
 * block is a step. Key by key, for short tiles (per-token selection): the chunk's lists are inverted, and each
 * block meets the rows that chose it, gathered into a tile; its result is added to their running O. Blocks
 * come in rising order either way, so the sums have one order.
 */
#include "cpu/attend.h"

#include <math.h>
#include <string.h>

int32_t attend_chunk_rows(const attend_plan *plan)
{
    const int64_t row_bytes = 4 * (plan->key_words + plan->value_width);
    int64_t rows = (2 << 20) / row_bytes;
    const int64_t tile = (plan->args->tile > 0 ? plan->args->tile : 1) * plan->hs;
    if (rows > 4096) rows = 4096;
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
}

void attend_chunk_begin(const attend_plan *plan, int64_t b, int32_t unit, int64_t row0, int32_t rows, attend_chunk *c)
{
    const attention_kernels *k = plan->kernels;
    const quern_tensor *q = &plan->args->q;
    c->seq = attend_sequence_at(plan, b);
    c->unit = unit;
    c->kv_head = plan->units == plan->heads ? unit / plan->group : unit;
    c->head0 = plan->units == plan->heads ? unit : unit * plan->group;
    c->row0 = row0;
    c->rows = rows;
    const float scale = plan->args->scale * 1.44269504088896340736f;
    for (int32_t r = 0; r < rows;) { /* the heads of one query at a time */
        const int64_t query = (row0 + r) / plan->hs, h = (row0 + r) % plan->hs;
        const int64_t n = plan->hs - h < rows - r ? plan->hs - h : rows - r;
        const int64_t at = c->seq.view_b * q->strides[0] + (c->seq.q0 + query) * q->strides[1] + (c->head0 + h) * q->strides[2];
        const row_source src = {(const char *)q->data + at * (int64_t)quern_dtype_size(q->dtype), q->dtype, q->strides[2], n, plan->dim_k};
        if (plan->bf16) k->pack_rows_bf16(&src, (uint16_t *)((uint32_t *)c->q + r * plan->key_words), 2 * plan->key_words);
        else k->pack_rows_f32(&src, scale, (float *)c->q + r * plan->key_words, plan->key_words);
        r += (int32_t)n;
    }
}

void attend_chunk_reset(const attend_plan *plan, attend_chunk *c)
{
    memset(c->o, 0, (size_t)(c->rows * plan->value_width) * sizeof *c->o);
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

/* Up to TILE_ROWS rows: where their state stands, and where this step adds P V. */
typedef struct tile_rows {
    int32_t n, head; /* rows, kv head */
    int64_t packed0;
    const float *q; /* words */
    float *o;       /* [n][value_width] */
    const int32_t *lo, *hi;
    float *max, *sum;
    bool fresh; /* o is overwritten by this step's P V (the caller adds it up), not added to */
} tile_rows;

/* O[a .. b) += P[a .. b)[c0 .. c1) V. */
static void add_values(const attend_plan *p, const attend_packed *packed, const tile_rows *t, const float *s, int64_t base,
                       int32_t a, int32_t b, int32_t c0, int32_t c1, bool accumulate)
{
    const int64_t pairs = p->bf16 ? 2 : 1, panels = (p->value_width + p->value_panel - 1) / p->value_panel;
    const int64_t stride = p->packed_rows / pairs * p->value_panel;
    const float *values = (const float *)packed->values + t->head * panels * stride + (t->packed0 + base + c0) / pairs * p->value_panel;
    mm_kernel *mm = p->bf16 ? p->kernels->mm_bf16 : p->kernels->mm_f32;
    const float *pa = p->bf16 ? s + (int64_t)a * TILE_KEYS + c0 / 2 : s + (int64_t)a * TILE_KEYS + c0;
    const int64_t depth = (c1 - c0 + pairs - 1) / pairs;
    for (int64_t j = 0; j < panels; j++) {
        const int64_t column = j * p->value_panel;
        const int64_t n = p->value_width - column < p->value_panel ? p->value_width - column : p->value_panel;
        mm(b - a, n, depth, pa, TILE_KEYS, 1, values + j * stride, p->value_panel, t->o + a * p->value_width + column, p->value_width, accumulate);
    }
}

/* O[r] += P[r][c] V of the single column c, whose pair partner row r does not see. */
static void add_half_pair(const attend_plan *p, const attend_packed *packed, const tile_rows *t, const float *s, int64_t base, int32_t r, int32_t c)
{
    const uint32_t keep = c % 2 == 0 ? 0xffffu : 0xffff0000u;
    const int64_t panels = (p->value_width + p->value_panel - 1) / p->value_panel, stride = p->packed_rows / 2 * p->value_panel;
    const uint32_t *values = (const uint32_t *)packed->values + t->head * panels * stride + (t->packed0 + base + c) / 2 * p->value_panel;
    for (int64_t j = 0; j < panels; j++) {
        uint32_t half[KEY_ALIGN];
        const int64_t column = j * p->value_panel;
        const int64_t n = p->value_width - column < p->value_panel ? p->value_width - column : p->value_panel;
        for (int64_t i = 0; i < n; i++) half[i] = values[j * stride + i] & keep;
        p->kernels->mm_bf16(1, n, 1, s + (int64_t)r * TILE_KEYS + c / 2, TILE_KEYS, 1, half, p->value_panel, t->o + r * p->value_width + column,
                            p->value_width, true);
    }
}

/* O[r] += P V over exactly the columns [c0, c1) that row r sees: a value that is not finite must not come in as
 * 0 * inf, not even from the other half of a pair. */
static void add_values_exactly(const attend_plan *p, const attend_packed *packed, const tile_rows *t, const float *s, int64_t base, int32_t r,
                               int32_t c0, int32_t c1)
{
    if (!p->bf16) {
        add_values(p, packed, t, s, base, r, r + 1, c0, c1, !t->fresh);
        return;
    }
    const int32_t even0 = (c0 + 1) & ~1, even1 = c1 & ~1;
    if (t->fresh) memset(t->o + r * p->value_width, 0, (size_t)p->value_width * sizeof *t->o);
    if (c0 < even0) add_half_pair(p, packed, t, s, base, r, c0);
    if (even0 < even1) add_values(p, packed, t, s, base, r, r + 1, even0, even1, true);
    if (even1 < c1) add_half_pair(p, packed, t, s, base, r, c1 - 1);
}

/* Whether a value of keys [key0, key1) is infinite or NaN. */
static bool any_special(const attend_plan *p, const attend_packed *packed, const tile_rows *t, int64_t key0, int64_t key1)
{
    const uint8_t *special = packed->special + (t->head * p->packed_rows + t->packed0) / KEY_ALIGN;
    for (int64_t at = key0 / KEY_ALIGN; at <= (key1 - 1) / KEY_ALIGN; at++)
        if (special[at]) return true;
    return false;
}

/* Rows [row, row + n) of the tile against keys [key0, key1): S, softmax and P V while all of it is in L1. The
 * keys are first cut to those that some of the rows see. */
static void step_rows(const attend_plan *p, const attend_packed *packed, const tile_rows *tile, int32_t row, int32_t n, int64_t key0,
                      int64_t key1, attend_scratch *s)
{
    const attention_kernels *k = p->kernels;
    tile_rows t = *tile;
    t.q += row * p->key_words, t.o += row * p->value_width;
    t.lo += row, t.hi += row, t.max += row, t.sum += row;
    float *shrink = s->shrink + row;
    int32_t *tile_lo = s->tile_lo + row, *tile_hi = s->tile_hi + row;
    if (t.lo[0] > key0) key0 = t.lo[0]; /* neither bound falls from row to row */
    if (t.hi[n - 1] < key1) key1 = t.hi[n - 1];
    if (key0 >= key1) {
        for (int32_t r = 0; r < n && t.fresh; r++) shrink[r] = 1.0f;
        if (t.fresh) memset(t.o, 0, (size_t)(n * p->value_width) * sizeof *t.o);
        return;
    }
    const int64_t base = key0 & ~(int64_t)15;
    const int32_t last = (int32_t)(key1 - base), columns = (last + 15) & ~15;
    /* Every row sees every key, and none has half a bf16 pair past its last. */
    const bool whole = t.lo[n - 1] <= base && t.hi[0] >= key1 && base == key0 && !(p->bf16 && last % 2);
    for (int32_t r = 0; r < n; r++) {
        const int64_t lo = t.lo[r] > key0 ? t.lo[r] - base : key0 - base, hi = t.hi[r] < key1 ? t.hi[r] - base : last;
        tile_lo[r] = lo < hi ? (int32_t)lo : 0;
        tile_hi[r] = lo < hi ? (int32_t)hi : 0;
    }

    const float *keys = (const float *)packed->keys + (t.head * p->packed_rows + t.packed0) * p->key_words;
    mm_kernel *mm = p->bf16 ? k->mm_bf16 : k->mm_f32;
    for (int32_t c = 0; c < columns;) {
        const int64_t key = base + c, in_panel = key % k->panel;
        const int32_t width = (int32_t)(k->panel - in_panel < columns - c ? k->panel - in_panel : columns - c);
        mm(n, width, p->key_words, t.q, p->key_words, 1, keys + (key - in_panel) * p->key_words + in_panel, k->panel, s->s + c, TILE_KEYS, false);
        c += width;
    }
    const softmax_tile soft = {s->s, TILE_KEYS, n, columns, tile_lo, tile_hi, p->scale2, t.max, t.sum, shrink};
    if (p->bf16) k->softmax_bf16(&soft);
    else k->softmax_f32(&soft);
    if (!t.fresh)
        for (int32_t r = 0; r < n; r++)
            if (shrink[r] != 1.0f) k->scale_row(t.o + r * p->value_width, shrink[r], p->value_width);

    if (whole || !any_special(p, packed, &t, key0, key1)) {
        add_values(p, packed, &t, s->s, base, 0, n, 0, last, !t.fresh);
        return;
    }
    for (int32_t r = 0; r < n; r++) {
        if (tile_lo[r] < tile_hi[r]) add_values_exactly(p, packed, &t, s->s, base, r, tile_lo[r], tile_hi[r]);
        else if (t.fresh) memset(t.o + r * p->value_width, 0, (size_t)p->value_width * sizeof *t.o);
    }
}

/* One step: rows t against keys [key0, key1), at most TILE_KEYS - 15 of them unless key0 is a multiple of 16. */
static void tile_step(const attend_plan *p, const attend_packed *packed, const tile_rows *t, int64_t key0, int64_t key1, attend_scratch *s)
{
    for (int32_t row = 0; row < t->n; row += STEP_ROWS)
        step_rows(p, packed, t, row, t->n - row < STEP_ROWS ? t->n - row : STEP_ROWS, key0, key1, s);
}

static tile_rows rows_of(const attend_plan *p, const attend_chunk *c, int32_t first, int32_t n)
{
    return (tile_rows){n, c->kv_head, c->seq.packed0, (const float *)c->q + (int64_t)first * p->key_words, c->o + (int64_t)first * p->value_width,
                       c->lo + first, c->hi + first, c->max + first, c->sum + first, false};
}

static void run_range(const attend_plan *p, const attend_packed *packed, const attend_chunk *c, attend_scratch *s)
{
    for (int32_t first = 0; first < c->rows; first += TILE_ROWS) {
        const int32_t n = c->rows - first < TILE_ROWS ? c->rows - first : TILE_ROWS;
        const tile_rows t = rows_of(p, c, first, n);
        const int64_t end = t.hi[n - 1];
        for (int64_t key = t.lo[0] / KEY_ALIGN * KEY_ALIGN; key < end; key += TILE_KEYS)
            tile_step(p, packed, &t, key, key + TILE_KEYS < end ? key + TILE_KEYS : end, s);
    }
}

/* Steps through the keys of block `block`. */
static void run_block(const attend_plan *p, const attend_packed *packed, const tile_rows *t, int64_t block, int64_t nk, attend_scratch *s,
                      void (*after)(const attend_plan *, const tile_rows *, attend_chunk *, attend_scratch *), attend_chunk *chunk)
{
    const int64_t end = (block + 1) * p->list_block < nk ? (block + 1) * p->list_block : nk;
    for (int64_t key = block * p->list_block; key < end;) {
        int64_t stop = (key & ~(int64_t)15) + TILE_KEYS;
        if (stop > end) stop = end;
        tile_step(p, packed, t, key, stop, s);
        if (after != NULL) after(p, t, chunk, s);
        key = stop;
    }
}

static void run_lists_by_tile(const attend_plan *p, const attend_packed *packed, const attend_chunk *c, attend_scratch *s)
{
    const int64_t tile_rows_n = p->args->tile * p->hs;
    int32_t *list = s->lists.list;
    attend_lists_reset(p, &c->seq, &s->lists);
    for (int32_t first = 0; first < c->rows;) {
        const int64_t tile = (c->row0 + first) / tile_rows_n, tile_end = (tile + 1) * tile_rows_n - c->row0;
        const int32_t stop = tile_end < c->rows ? (int32_t)tile_end : c->rows;
        const int32_t n = attend_list_clean(p, &c->seq, c->unit, tile, c->hi[stop - 1], (int32_t)(tile - c->row0 / tile_rows_n) + 1, &s->lists);
        for (int32_t i = 1; i < n; i++) { /* rising order: given lists may have any */
            const int32_t x = list[i];
            int32_t j = i;
            for (; j > 0 && list[j - 1] > x; j--) list[j] = list[j - 1];
            list[j] = x;
        }
        for (; first < stop; first += TILE_ROWS) {
            const tile_rows t = rows_of(p, c, first, stop - first < TILE_ROWS ? stop - first : TILE_ROWS);
            for (int32_t i = 0; i < n; i++) run_block(p, packed, &t, list[i], c->seq.nk, s, NULL, NULL);
        }
        first = stop;
    }
}

/* Adds a gathered tile's P V to the chunk's rows and returns their running softmax. */
static void scatter(const attend_plan *p, const tile_rows *t, attend_chunk *c, attend_scratch *s)
{
    for (int32_t i = 0; i < t->n; i++) {
        const int32_t r = s->rows[i];
        p->kernels->scale_add_row(c->o + (int64_t)r * p->value_width, s->shrink[i], s->gather_o + (int64_t)i * p->value_width, p->value_width);
        c->max[r] = s->max[i];
        c->sum[r] = s->sum[i];
    }
}

static void run_lists_by_key(const attend_plan *p, const attend_packed *packed, attend_chunk *c, attend_scratch *s)
{
    const int64_t per_tile = p->args->tile * p->hs;
    const size_t row_bytes = (size_t)p->key_words * 4;
    const int64_t blocks = attend_lists_invert(p, &c->seq, c->unit, c->row0, c->rows, c->hi, &s->lists);
    const int32_t *start = s->lists.start;
    for (int64_t x = 0; x < blocks; x++) {
        int32_t n = 0;
        for (int32_t e = start[x]; e < start[x + 1]; e++) {
            const int64_t from = s->lists.entries[e] * per_tile, to = from + per_tile < c->rows ? from + per_tile : c->rows;
            for (int64_t r = from; r < to; r++) {
                if (c->hi[r] > x * p->list_block) {
                    memcpy((char *)s->gather_q + n * row_bytes, (const char *)c->q + r * row_bytes, row_bytes);
                    s->max[n] = c->max[r], s->sum[n] = c->sum[r];
                    s->lo[n] = c->lo[r], s->hi[n] = c->hi[r];
                    s->rows[n++] = (int32_t)r;
                }
                if (n == TILE_ROWS || (n > 0 && e + 1 == start[x + 1] && r + 1 == to)) {
                    const tile_rows t = {n, c->kv_head, c->seq.packed0, s->gather_q, s->gather_o, s->lo, s->hi, s->max, s->sum, true};
                    run_block(p, packed, &t, x, c->seq.nk, s, scatter, c);
                    n = 0;
                }
            }
        }
    }
}

void attend_chunk_run(const attend_plan *p, const attend_packed *packed, attend_chunk *c, attend_scratch *s)
{
    if (c->rows == 0) return;
    if (attend_list_length(p) == 0) {
        if (p->args->list.ndim == 0) run_range(p, packed, c, s);
    } else if (p->args->tile * p->hs >= TILE_ROWS / 2) {
        run_lists_by_tile(p, packed, c, s);
    } else {
        run_lists_by_key(p, packed, c, s);
    }
}

void attend_chunk_finish(const attend_plan *p, attend_chunk *c)
{
    const double ln2 = 0.69314718055994530942;
    for (int32_t r = 0; r < c->rows; r++) {
        const float sum = c->sum[r];
        if (sum != 0.0f) p->kernels->scale_row(c->o + (int64_t)r * p->value_width, 1.0f / sum, p->value_width);
        c->sum[r] = sum == 0.0f ? -INFINITY : (float)((double)c->max[r] * (double)p->scale2 * ln2 + log((double)sum));
    }
}

void attend_chunk_store(const attend_plan *p, const attend_chunk *c)
{
    const quern_tensor *o = &p->args->o, *lse = &p->args->lse;
    for (int32_t r = 0; r < c->rows; r++) {
        const int64_t query = c->seq.q0 + (c->row0 + r) / p->hs, head = c->head0 + (c->row0 + r) % p->hs;
        if (o->ndim > 0)
            p->kernels->store_row(c->o + (int64_t)r * p->value_width, o->dtype, o->data,
                                  c->seq.view_b * o->strides[0] + query * o->strides[1] + head * o->strides[2], p->dim_v);
        if (lse->ndim > 0)
            ((float *)lse->data)[c->seq.view_b * lse->strides[0] + head * lse->strides[1] + query * lse->strides[2]] = c->sum[r];
    }
}
