/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward.c - gradients of attention for a chunk of query rows, in one pass over tiles of 96 rows x
 * 192 keys:
 *   S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (row_scale dP - delta),
 *   dV += (row_scale P)^T dO, dK += dS^T Q, dQ += dS K.
 * All five products are the same micro-kernel: the transposed operands are broadcast from S and dP as they
 * stand. Keys outermost: dK and dV of 192 keys (196 KB at D = 128) and the tile's S and dP (144 KB) stay in
 * L2 while the chunk's rows pass; dQ of the chunk (1 MB) is added to. For bf16, P and dS are narrowed into the
 * pair layouts that each product reads.
 *
 * Q carries scale * log2 e in f32 (so dK is multiplied by ln 2 at the end, dQ by scale); bf16 operands are
 * never scaled. Where a row or key is not finite, 0 * inf would reach gradients that do not depend on it, so
 * such tiles add pair by pair. Listed blocks: the chunk's lists are inverted and each block meets the rows
 * that chose it, gathered, in rising order of blocks and rows.
 */
#include "cpu/attend_backward.h"

#include "core/half.h"

#include <math.h>
#include <string.h>

static int64_t grad_width(const attend_plan *p)
{
    return (p->dim_k + 15) / 16 * 16;
}

static int64_t value_words(const attend_plan *p)
{
    return p->bf16 ? p->dim_v / 2 : p->dim_v;
}

int64_t backward_chunk_rows(const attend_plan *plan)
{
    const int64_t tile = (plan->args->tile > 0 ? plan->args->tile : 1) * plan->hs;
    const int64_t rows = (plan->dim_k > 128 || plan->dim_v > 128 ? 960 : 1920) / tile * tile;
    return rows < tile ? tile : rows;
}

void backward_packed_carve(const attend_plan *plan, arena *a, backward_packed *packed)
{
    const size_t rows = (size_t)(plan->packed_rows * plan->kv_heads), half = plan->bf16 ? 2 : 1;
    packed->k_columns = arena_take(a, rows * (size_t)plan->key_words * 4);
    packed->v_columns = arena_take(a, rows * (size_t)value_words(plan) * 4);
    packed->k_rows = arena_take(a, rows / half * (size_t)(attend_row_panels(plan, plan->dim_k) * attend_row_panel(plan, plan->dim_k)) * 4);
    packed->special = arena_take(a, rows / KEY_ALIGN);
}

void backward_pack(const quern_exec *exec, const attend_plan *plan, const backward_packed *packed)
{
    const attend_pack_target targets[] = {
        {&plan->args->k, packed->k_columns, packed->k_rows, packed->special, attend_row_panel(plan, plan->dim_k)},
        {&plan->args->v, packed->v_columns, NULL, packed->special, 0}};
    attend_pack_all(exec, plan, targets, 2);
}

/* Floats (or words) of one row panel set for `rows` rows of `dim` elements. */
static size_t panel_words(const attend_plan *p, int64_t rows, int64_t dim)
{
    const int64_t pairs = p->bf16 ? 2 : 1;
    return (size_t)((rows + pairs - 1) / pairs * attend_row_panels(p, dim) * attend_row_panel(p, dim));
}

void backward_chunk_carve(const attend_plan *plan, int64_t capacity, arena *a, backward_chunk *c)
{
    const size_t n = (size_t)capacity;
    c->capacity = (int32_t)capacity;
    c->q = arena_take(a, n * (size_t)plan->key_words * 4);
    c->d_o = arena_take(a, n * (size_t)value_words(plan) * 4);
    c->q_panels = arena_take(a, panel_words(plan, capacity, plan->dim_k) * 4);
    c->o_panels = arena_take(a, panel_words(plan, capacity, plan->dim_v) * 4);
    c->d_q = arena_take(a, n * (size_t)grad_width(plan) * 4);
    float **floats[] = {&c->lse2, &c->delta, &c->row_scale};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) *floats[i] = arena_take(a, n * 4);
    c->lo = arena_take(a, n * 4);
    c->hi = arena_take(a, n * 4);
    c->special = arena_take(a, n);
}

void backward_scratch_carve(const attend_plan *plan, int64_t capacity, arena *a, backward_scratch *s)
{
    const size_t tile = (size_t)TILE_ROWS * STEP_KEYS * 4;
    s->s = arena_take(a, tile);
    s->dp = arena_take(a, tile);
    s->p_pairs = s->ds_pairs = s->ds_words = NULL;
    if (plan->bf16) {
        s->p_pairs = arena_take(a, tile / 2);
        s->ds_pairs = arena_take(a, tile / 2);
        s->ds_words = arena_take(a, tile / 2);
    }
    backward_chunk_carve(plan, TILE_ROWS, a, &s->gather);
    s->tile_lo = arena_take(a, TILE_ROWS * 4);
    s->tile_hi = arena_take(a, TILE_ROWS * 4);
    s->rows = arena_take(a, TILE_ROWS * 4);
    attend_lists_carve(plan, capacity, a, &s->lists);
}

static const void *element(const quern_tensor *t, int64_t b, int64_t n, int64_t h)
{
    return (const char *)t->data + (b * t->strides[0] + n * t->strides[1] + h * t->strides[2]) * (int64_t)quern_dtype_size(t->dtype);
}

static float statistic(const quern_tensor *t, int64_t b, int64_t h, int64_t n)
{
    return ((const float *)t->data)[b * t->strides[0] + h * t->strides[1] + n * t->strides[2]];
}

static bool finite_words(const void *row, int64_t words, bool pairs)
{
    const uint32_t *w = row;
    uint32_t special = 0;
    for (int64_t i = 0; i < words; i++) {
        special |= (w[i] & 0x7f800000u) == 0x7f800000u;
        if (pairs) special |= (w[i] & 0x7f80u) == 0x7f80u;
    }
    return special == 0;
}

/* Packed rows [0, rows) of a chunk, from its contiguous A operands to the panels. */
static void make_panels(const attend_plan *p, const backward_chunk *c)
{
    const quern_dtype dtype = p->bf16 ? QUERN_BF16 : QUERN_F32;
    const int64_t pairs = p->bf16 ? 2 : 1;
    const struct { const void *rows; void *panels; int64_t dim; } side[] = {{c->q, c->q_panels, p->dim_k}, {c->d_o, c->o_panels, p->dim_v}};
    for (int i = 0; i < 2; i++) {
        const int32_t panel = attend_row_panel(p, side[i].dim);
        const int64_t stride = (c->capacity + pairs - 1) / pairs * panel;
        const row_source src = {side[i].rows, dtype, side[i].dim, c->rows, side[i].dim};
        if (p->bf16) p->kernels->pack_values_bf16(&src, panel, side[i].panels, stride);
        else p->kernels->pack_values_f32(&src, panel, side[i].panels, stride);
    }
}

void backward_chunk_begin(const attend_plan *plan, int64_t b, int32_t unit, int64_t row0, int32_t rows, backward_chunk *c)
{
    const attend_args *args = plan->args;
    const attention_kernels *k = plan->kernels;
    const float scale = args->scale * 1.44269504088896340736f;
    c->seq = attend_sequence_at(plan, b);
    c->unit = unit;
    c->kv_head = plan->units == plan->heads ? unit / plan->group : unit;
    c->head0 = plan->units == plan->heads ? unit : unit * plan->group;
    c->row0 = row0;
    c->rows = rows;
    memset(c->d_q, 0, (size_t)(rows * grad_width(plan)) * sizeof *c->d_q);
    int64_t lo = 0, hi = 0, at_query = -1;
    for (int32_t r = 0; r < rows; r++) {
        const int64_t query = (row0 + r) / plan->hs, head = c->head0 + (row0 + r) % plan->hs, n = c->seq.q0 + query;
        const row_source q = {element(&args->q, c->seq.view_b, n, head), args->q.dtype, 0, 1, plan->dim_k};
        const row_source d_o = {element(&args->d_o, c->seq.view_b, n, head), args->d_o.dtype, 0, 1, plan->dim_v};
        uint32_t *pq = (uint32_t *)c->q + r * plan->key_words, *po = (uint32_t *)c->d_o + r * value_words(plan);
        if (plan->bf16) {
            k->pack_rows_bf16(&q, (uint16_t *)pq, plan->dim_k);
            k->pack_rows_bf16(&d_o, (uint16_t *)po, plan->dim_v);
        } else {
            k->pack_rows_f32(&q, scale, (float *)pq, plan->dim_k);
            k->pack_rows_f32(&d_o, 1.0f, (float *)po, plan->dim_v);
        }
        c->special[r] = !finite_words(pq, plan->key_words, plan->bf16) || !finite_words(po, value_words(plan), plan->bf16);
        if (query != at_query) {
            attend_interval(args, &c->seq, query, &lo, &hi);
            at_query = query;
        }
        const float lse = statistic(&args->lse, c->seq.view_b, head, n);
        c->lse2[r] = lse == -INFINITY ? INFINITY : lse * 1.44269504088896340736f;
        c->delta[r] = statistic(&args->delta, c->seq.view_b, head, n);
        c->row_scale[r] = args->row_scale.ndim > 0 ? statistic(&args->row_scale, c->seq.view_b, head, n) : 1.0f;
        c->lo[r] = (int32_t)lo;
        c->hi[r] = (int32_t)hi;
    }
    make_panels(plan, c);
}

/* Rows [*first, *end) whose tile interval meets columns [c0, c1). */
static void rows_meeting(const backward_scratch *s, int32_t n, int32_t c0, int32_t c1, int32_t *first, int32_t *end)
{
    int32_t a = 0, b = n;
    while (a < b && (s->tile_hi[a] <= c0 || s->tile_lo[a] >= c1)) a++;
    while (b > a && (s->tile_hi[b - 1] <= c0 || s->tile_lo[b - 1] >= c1)) b--;
    *first = a;
    *end = b;
}

/* A tile with infinities or NaN: every product pair by pair, inside the intervals only. */
static void add_pairwise(const attend_plan *p, const backward_chunk *c, int32_t first, int32_t n, int64_t base, const backward_sums *sums,
                         const backward_scratch *s)
{
    const attend_args *args = p->args;
    const int64_t gw = grad_width(p), vw = p->value_width;
    for (int32_t i = 0; i < n; i++) {
        const float *pr = s->s + (int64_t)i * STEP_KEYS, *ds = s->dp + (int64_t)i * STEP_KEYS;
        float *d_q = c->d_q + (first + i) * gw;
        for (int32_t col = s->tile_lo[i]; col < s->tile_hi[i]; col++) {
            const int64_t key = base + col;
            const void *k_row = element(&args->k, c->seq.view_b, c->seq.k0 + key, c->kv_head);
            for (int64_t e = 0; e < p->dim_k; e++) {
                float kx, qx;
                if (p->bf16) {
                    kx = float_from_bf16(((const uint16_t *)k_row)[e]);
                    qx = float_from_bf16(((const uint16_t *)c->q)[(first + i) * p->dim_k + e]);
                } else {
                    kx = args->k.dtype == QUERN_F32 ? ((const float *)k_row)[e]
                         : args->k.dtype == QUERN_BF16 ? float_from_bf16(((const uint16_t *)k_row)[e])
                                                       : float_from_f16(((const uint16_t *)k_row)[e]);
                    qx = ((const float *)c->q)[(first + i) * p->dim_k + e];
                }
                d_q[e] += ds[col] * kx;
                sums->d_k[key * gw + e] += ds[col] * qx;
            }
            for (int64_t e = 0; e < p->dim_v; e++) {
                const float ox = p->bf16 ? float_from_bf16(((const uint16_t *)c->d_o)[(first + i) * p->dim_v + e])
                                         : ((const float *)c->d_o)[(first + i) * p->dim_v + e];
                sums->d_v[key * vw + e] += pr[col] * ox;
            }
        }
    }
}

/* Rows [first, first + n) of chunk c against keys [key0, key1), key0 rounded down to 16, at most STEP_KEYS. */
static void tile_step(const attend_plan *p, const backward_packed *packed, const backward_chunk *c, int32_t first, int32_t n, int64_t key0,
                      int64_t key1, const backward_sums *sums, backward_scratch *s)
{
    const attention_kernels *k = p->kernels;
    const int64_t base = key0 & ~(int64_t)15, panel = k->panel, pairs = p->bf16 ? 2 : 1;
    const int32_t columns = (int32_t)((key1 - base + 15) & ~(int64_t)15), last = (int32_t)(key1 - base);
    bool whole = true, special = false;
    for (int32_t r = 0; r < n; r++) {
        const int64_t lo = c->lo[first + r] > key0 ? c->lo[first + r] : key0, hi = c->hi[first + r] < key1 ? c->hi[first + r] : key1;
        const bool seen = lo < hi && c->lse2[first + r] != INFINITY;
        s->tile_lo[r] = seen ? (int32_t)(lo - base) : 0;
        s->tile_hi[r] = seen ? (int32_t)(hi - base) : 0;
        whole = whole && seen && lo == base && hi == key1;
        special = special || c->special[first + r];
    }
    int32_t r0, r1;
    rows_meeting(s, n, 0, columns, &r0, &r1);
    if (r0 >= r1) return;
    const int64_t head_rows = c->kv_head * p->packed_rows + c->seq.packed0;
    for (int64_t at = (head_rows + base) / KEY_ALIGN; at <= (head_rows + key1 - 1) / KEY_ALIGN; at++) special = special || packed->special[at];

    mm_kernel *mm = p->bf16 ? k->mm_bf16 : k->mm_f32;
    const float *q = (const float *)c->q + first * p->key_words, *d_o = (const float *)c->d_o + first * value_words(p);
    const float *kc = (const float *)packed->k_columns + head_rows * p->key_words, *vc = (const float *)packed->v_columns + head_rows * value_words(p);
    for (int32_t col = 0; col < columns;) {
        const int64_t key = base + col, in_panel = key % panel;
        const int32_t width = (int32_t)(panel - in_panel < columns - col ? panel - in_panel : columns - col);
        int32_t a, b;
        rows_meeting(s, n, col, col + width, &a, &b);
        if (a < b) {
            mm(b - a, width, p->key_words, q + a * p->key_words, p->key_words, 1, kc + (key - in_panel) * p->key_words + in_panel, panel,
               s->s + (int64_t)a * STEP_KEYS + col, STEP_KEYS, false);
            mm(b - a, width, value_words(p), d_o + a * value_words(p), value_words(p), 1, vc + (key - in_panel) * value_words(p) + in_panel, panel,
               s->dp + (int64_t)a * STEP_KEYS + col, STEP_KEYS, false);
        }
        col += width;
    }
    r0 &= ~1; /* row pairs stay together */
    const softmax_backward_tile soft = {s->s + (int64_t)r0 * STEP_KEYS, s->dp + (int64_t)r0 * STEP_KEYS, STEP_KEYS, r1 - r0, columns,
                                        s->tile_lo + r0, s->tile_hi + r0, p->scale2, c->lse2 + first + r0, c->delta + first + r0,
                                        c->row_scale + first + r0};
    k->softmax_backward(&soft);
    if (special) {
        add_pairwise(p, c, first, n, base, sums, s);
        return;
    }
    const float *pt = s->s, *dst = s->dp, *ds = s->dp; /* P^T, dS^T and dS as A operands */
    int64_t t_row = 1, t_k = STEP_KEYS, ds_row = STEP_KEYS;
    if (p->bf16) {
        k->narrow_rows(s->s + (int64_t)r0 * STEP_KEYS, STEP_KEYS, r1 - r0, columns, s->p_pairs + r0 / 2 * STEP_KEYS, STEP_KEYS);
        k->narrow_rows(s->dp + (int64_t)r0 * STEP_KEYS, STEP_KEYS, r1 - r0, columns, s->ds_pairs + r0 / 2 * STEP_KEYS, STEP_KEYS);
        k->narrow_columns(s->dp + (int64_t)r0 * STEP_KEYS, STEP_KEYS, r1 - r0, columns, s->ds_words + r0 * (STEP_KEYS / 2), STEP_KEYS / 2);
        pt = (const float *)s->p_pairs, dst = (const float *)s->ds_pairs, ds = (const float *)s->ds_words;
        ds_row = STEP_KEYS / 2;
    }
    const int32_t qp = attend_row_panel(p, p->dim_k), op = attend_row_panel(p, p->dim_v);
    const int64_t chunk_stride = (c->capacity + pairs - 1) / pairs, gw = grad_width(p), vw = p->value_width;
    const float *k_rows = (const float *)packed->k_rows + c->kv_head * attend_row_panels(p, p->dim_k) * (p->packed_rows / pairs) * qp;
    /* Pieces of keys that the same rows meet: the whole step, or 64 at a time at a border. */
    const int32_t piece = whole ? columns : KEY_ALIGN;
    for (int32_t col = 0; col < last; col += piece) {
        const int32_t stop = col + piece < last ? col + piece : last;
        int32_t a, b;
        rows_meeting(s, n, col, stop, &a, &b);
        if (a >= b) continue;
        a &= ~1;
        const int64_t depth = (b - a + pairs - 1) / pairs, row_at = (first + a) / pairs;
        for (int64_t j = 0; j * op < vw; j++)
            mm(stop - col, vw - j * op < op ? vw - j * op : op, depth, pt + a / pairs * t_k + col, t_row, t_k,
               (const float *)c->o_panels + (j * chunk_stride + row_at) * op, op, sums->d_v + (base + col) * vw + j * op, vw, true);
        for (int64_t j = 0; j * qp < gw; j++)
            mm(stop - col, gw - j * qp < qp ? gw - j * qp : qp, depth, dst + a / pairs * t_k + col, t_row, t_k,
               (const float *)c->q_panels + (j * chunk_stride + row_at) * qp, qp, sums->d_k + (base + col) * gw + j * qp, gw, true);
        const int64_t keys = (stop - col + pairs - 1) / pairs, key_at = (c->seq.packed0 + base + col) / pairs;
        for (int64_t j = 0; j * qp < gw; j++)
            mm(b - a, gw - j * qp < qp ? gw - j * qp : qp, keys, ds + a * ds_row + col / pairs, ds_row, 1,
               k_rows + (j * (p->packed_rows / pairs) + key_at) * qp, qp, c->d_q + (first + a) * gw + j * qp, gw, true);
    }
}

static void run_range(const attend_plan *p, const backward_packed *packed, const backward_chunk *c, const backward_sums *sums, backward_scratch *s)
{
    const int64_t end = c->hi[c->rows - 1];
    for (int64_t key = c->lo[0] / KEY_ALIGN * KEY_ALIGN; key < end; key += STEP_KEYS) {
        const int64_t stop = key + STEP_KEYS < end ? key + STEP_KEYS : end;
        for (int32_t first = 0; first < c->rows; first += TILE_ROWS) {
            const int32_t n = c->rows - first < TILE_ROWS ? c->rows - first : TILE_ROWS;
            if (c->hi[first + n - 1] > key && c->lo[first] < stop) tile_step(p, packed, c, first, n, key, stop, sums, s);
        }
    }
}

/* The gathered rows against block x; their dQ goes back to the chunk's rows. */
static void run_gathered(const attend_plan *p, const backward_packed *packed, const backward_chunk *c, int64_t x, const backward_sums *sums,
                         backward_scratch *s)
{
    backward_chunk *g = &s->gather;
    const int64_t end = (x + 1) * p->list_block < c->seq.nk ? (x + 1) * p->list_block : c->seq.nk;
    make_panels(p, g);
    memset(g->d_q, 0, (size_t)(g->rows * grad_width(p)) * sizeof *g->d_q);
    for (int64_t key = x * p->list_block; key < end;) {
        int64_t stop = (key & ~(int64_t)15) + STEP_KEYS;
        if (stop > end) stop = end;
        tile_step(p, packed, g, 0, g->rows, key, stop, sums, s);
        key = stop;
    }
    for (int32_t i = 0; i < g->rows; i++)
        p->kernels->scale_add_row(c->d_q + s->rows[i] * grad_width(p), 1.0f, g->d_q + i * grad_width(p), grad_width(p));
    g->rows = 0;
}

static void run_lists(const attend_plan *p, const backward_packed *packed, const backward_chunk *c, const backward_sums *sums, backward_scratch *s)
{
    const int64_t per_tile = p->args->tile * p->hs;
    const int64_t blocks = attend_lists_invert(p, &c->seq, c->unit, c->row0, c->rows, c->hi, &s->lists);
    const size_t q_bytes = (size_t)p->key_words * 4, o_bytes = (size_t)value_words(p) * 4;
    backward_chunk *g = &s->gather;
    g->seq = c->seq;
    g->unit = c->unit, g->kv_head = c->kv_head, g->head0 = c->head0, g->row0 = c->row0;
    g->rows = 0;
    for (int64_t x = 0; x < blocks; x++) {
        for (int32_t e = s->lists.start[x]; e < s->lists.start[x + 1]; e++) {
            const int64_t from = s->lists.entries[e] * per_tile, to = from + per_tile < c->rows ? from + per_tile : c->rows;
            for (int64_t r = from; r < to; r++) {
                if (c->hi[r] <= x * p->list_block || c->lse2[r] == INFINITY) continue;
                const int32_t i = g->rows++;
                memcpy((char *)g->q + i * q_bytes, (const char *)c->q + r * q_bytes, q_bytes);
                memcpy((char *)g->d_o + i * o_bytes, (const char *)c->d_o + r * o_bytes, o_bytes);
                g->lse2[i] = c->lse2[r], g->delta[i] = c->delta[r], g->row_scale[i] = c->row_scale[r];
                g->lo[i] = c->lo[r], g->hi[i] = c->hi[r], g->special[i] = c->special[r];
                s->rows[i] = (int32_t)r;
                if (g->rows == TILE_ROWS) run_gathered(p, packed, c, x, sums, s);
            }
        }
        if (g->rows > 0) run_gathered(p, packed, c, x, sums, s);
    }
}

void backward_chunk_run(const attend_plan *plan, const backward_packed *packed, backward_chunk *c, const backward_sums *sums, backward_scratch *s)
{
    if (c->rows == 0) return;
    if (plan->args->list.ndim == 0) run_range(plan, packed, c, sums, s);
    else if (attend_list_length(plan) > 0) run_lists(plan, packed, c, sums, s);
}

/* f32 row -> d_q, converted or added. */
void backward_chunk_store(const attend_plan *plan, const backward_chunk *c)
{
    const quern_tensor *t = &plan->args->d_q;
    const int64_t gw = grad_width(plan);
    for (int32_t r = 0; r < c->rows; r++) {
        float *row = c->d_q + r * gw;
        const int64_t n = c->seq.q0 + (c->row0 + r) / plan->hs, head = c->head0 + (c->row0 + r) % plan->hs;
        plan->kernels->scale_row(row, plan->args->scale, plan->dim_k);
        const int64_t at = c->seq.view_b * t->strides[0] + n * t->strides[1] + head * t->strides[2];
        if (plan->args->accumulate_q) plan->kernels->scale_add_row((float *)t->data + at, 1.0f, row, plan->dim_k);
        else plan->kernels->store_row(row, t->dtype, t->data, at, plan->dim_k);
    }
}
