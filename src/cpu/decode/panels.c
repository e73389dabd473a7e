/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * panels.c - one step of blockwise softmax attention over a cache's rows: up to 384 keys in panels of 64.
 *
 * Entries are packed panel by panel for their scores, by the kernels that pack for a prefill: D products
 * added in order, a key a lane, so that a score has the same bits there and here. For up to 8 rows the kernel
 * of weights in place makes the same sums without storing the panel. Otherwise few query rows
 * read keys and values in place (attention_direct.h, attention_direct_f32.h); more pack them into panels,
 * which stay in L1 or L2. Either way a cache's rows are read once, in order, and the next panel is
 * prefetched meanwhile. Limit: the read bandwidth. A key and value of 128 bf16 come from memory in some 82
 * cycles a core (25 GB/s).
 */
#include "cpu/decode/panels.h"
#include "cpu/levels.h"

#include <math.h>
#include <string.h>

enum {
    DIRECT_MOST = 40, /* more query rows repay packing */
    SLICE_ROWS = 12,  /* for up to so many bf16 rows, keys are packed SLICE_KEYS at a time, so that
                      * prefetching keeps an even pace */
    SLICE_KEYS = 16
};

static const float log2_e = 1.44269504088896340736f;

decode_shape decode_shape_of(const stage_exec *exec, quern_dtype dtype, int64_t dim_k, int64_t dim_v,
                             float scale)
{
    decode_shape s = {.kernels = cpu_kernels_for(exec->cpu_level)->attention,
                      .prefetch_l2 = exec->prefetch_l2,
                      .dtype = dtype,
                      .dim_k = dim_k,
                      .dim_v = dim_v};
    s.bf16 = dtype == QUERN_BF16 && s.kernels->mm_bf16 != NULL;
    s.key_words = s.bf16 ? dim_k / 2 : dim_k;
    s.value_width = round_up16(dim_v);
    s.value_panel = s.value_width < s.kernels->panel ? s.value_width : s.kernels->panel;
    s.value_panels = round_up(dim_v, s.value_panel) / s.value_panel;
    s.scale2 = scale * log2_e;
    return s;
}

void decode_rows_carve(const decode_shape *shape, int64_t most, arena *a, decode_rows *rows)
{
    const size_t n = (size_t)most * sizeof(float);
    rows->q = arena_take(a, n * (size_t)shape->key_words);
    rows->o = arena_take(a, n * (size_t)shape->value_width);
    rows->max = arena_take(a, n);
    rows->sum = arena_take(a, n);
}

void decode_scratch_carve(const decode_shape *shape, int64_t most_rows, arena *a, decode_scratch *s)
{
    const size_t word = sizeof(float), n = (size_t)most_rows * word;
    s->keys = arena_take(a, (size_t)(PANEL_KEYS * shape->key_words) * word);
    s->values = arena_take(a, (size_t)(PANEL_KEYS * shape->value_panels * shape->value_panel) * word);
    s->s = arena_take(a, n * STEP_KEYS);
    s->shrink = arena_take(a, n);
    s->lo = arena_take(a, n);
    s->hi = arena_take(a, n);
    s->ahead = (decode_panel){NULL, NULL, 0};
    s->gathered =
        arena_take(a, (size_t)(PANEL_KEYS * (shape->dim_k + shape->dim_v)) * quern_dtype_size(shape->dtype));
}

void decode_rows_pack(const decode_shape *shape, const quern_tensor *q, int64_t row, int64_t head, int64_t n,
                      int32_t at, decode_rows *rows)
{
    const row_source src = {row_at(q, 0, row, head), q->dtype, q->strides[2], n, shape->dim_k};
    float *dst = (float *)rows->q + at * shape->key_words;
    if (shape->bf16) shape->kernels->pack_rows_bf16(&src, (uint16_t *)(void *)dst, 2 * shape->key_words);
    else shape->kernels->pack_rows_f32(&src, 1.0f, dst, shape->key_words);
}

void decode_rows_reset(decode_rows *rows, int32_t n)
{
    rows->n = n;
    rows->fresh = true;
    for (int32_t r = 0; r < n; r++) {
        rows->max[r] = -INFINITY;
        rows->sum[r] = 0.0f;
    }
}

/* Whether the rows are so few that the kernels read panels in place. */
static bool is_direct(const decode_rows *rows)
{
    return rows->n <= DIRECT_MOST;
}

static row_source keys_of(const decode_shape *shape, const decode_panel *panel)
{
    return (row_source){panel->keys, shape->dtype, shape->dim_k, panel->n, shape->dim_k};
}

static row_source values_of(const decode_shape *shape, const decode_panel *panel)
{
    return (row_source){panel->values, shape->dtype, shape->dim_v, panel->n, shape->dim_v};
}

/* Prefetches part `part` of `parts` of the rows: a burst of more lines than the processor can have in flight
 * would stall it. */
static void prefetch(const decode_shape *shape, const row_source *rows, int64_t part, int64_t parts)
{
    const int64_t bytes = rows->rows * rows->dim * (int64_t)quern_dtype_size(rows->dtype);
    const char *at = (const char *)rows->data + bytes * part / parts / 64 * 64,
               *end = (const char *)rows->data + bytes * (part + 1) / parts;
    for (; shape->prefetch_l2 && at < end; at += 64) __builtin_prefetch(at, 0, 2);
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 3);
}

/* Whether so few rows and so short keys are multiplied in place, with the bits of packed panels. */
static bool is_across(const decode_shape *shape, const decode_rows *rows)
{
    return shape->bf16 && rows->n <= ACROSS_ROWS && shape->dim_k <= ACROSS_DEPTH;
}

/* Scores of one panel from column `column` on. `next`: the rows that are read after it. */
static void score_panel(const decode_shape *shape, const decode_rows *rows, const decode_panel *panel,
                        int32_t column, const row_source *next, decode_scratch *s)
{
    const attention_kernels *k = shape->kernels;
    mm_kernel *mm = shape->bf16 ? k->mm_bf16 : k->mm_f32;
    const bool across = is_across(shape, rows);
    const int32_t slice = shape->bf16 && rows->n <= SLICE_ROWS ? SLICE_KEYS : k->panel;
    for (int64_t c = 0; c < panel->n; c += slice) {
        const int64_t n = panel->n - c < slice ? panel->n - c : slice;
        row_source src = keys_of(shape, panel);
        src.data = panel->keys + c * shape->dim_k * (int64_t)quern_dtype_size(shape->dtype);
        src.rows = n;
        float *to = s->s + column + c;
        prefetch(shape, next, 2 * (c / slice), 2 * PANEL_KEYS / slice);
        if (across) {
            for (int32_t r = 0; r < rows->n && n < slice; r++)
                memset(to + r * STEP_KEYS, 0, SLICE_KEYS * sizeof *to);
            k->mm_across_bf16(rows->n, rows->q, shape->dim_k, &src, to, STEP_KEYS);
        } else if (shape->bf16) {
            k->pack_keys_bf16(&src, slice, (uint32_t *)(void *)s->keys);
        } else {
            k->pack_keys_f32(&src, slice, s->keys);
        }
        prefetch(shape, next, 2 * (c / slice) + 1, 2 * PANEL_KEYS / slice);
        if (!across)
            mm(rows->n, round_up16(n), shape->key_words, rows->q, shape->key_words, 1, s->keys, slice, to,
               STEP_KEYS, false);
    }
}

int32_t decode_scores(const decode_shape *shape, const decode_rows *rows, const decode_panel *panels,
                      int32_t count, bool packed, decode_scratch *s)
{
    const attention_kernels *k = shape->kernels;
    int32_t keys = 0;
    for (int32_t i = 0; i < count; keys += (int32_t)panels[i++].n) {
        if (!packed && is_direct(rows)) {
            const row_source src = keys_of(shape, &panels[i]);
            const read_ahead ahead = {panels[i].values, shape->prefetch_l2};
            float *to = s->s + keys;
            if (shape->bf16) k->score_rows_bf16(rows->n, rows->q, shape->dim_k, &src, ahead, to, STEP_KEYS);
            else k->score_rows_f32(rows->n, rows->q, shape->dim_k, &src, ahead, to, STEP_KEYS);
            continue;
        }
        const row_source next = i + 1 < count ? keys_of(shape, &panels[i + 1]) : values_of(shape, &panels[0]);
        score_panel(shape, rows, &panels[i], keys, &next, s);
    }
    return keys;
}

/* O (+)= P V for keys [column, column + panel->n) of the step. */
static void add_panel(const decode_shape *shape, decode_rows *rows, const decode_panel *panel, int32_t column,
                      const row_source *ahead, decode_scratch *s)
{
    const attention_kernels *k = shape->kernels;
    const int64_t pairs = shape->bf16 ? 2 : 1, depth = (panel->n + pairs - 1) / pairs;
    const int64_t panel_stride = PANEL_KEYS / pairs * shape->value_panel;
    const row_source src = values_of(shape, panel);
    const float *weights = s->s + column / pairs;
    if (is_direct(rows)) {
        const read_ahead next = {ahead->rows > 0 ? ahead->data : src.data, shape->prefetch_l2};
        const bool add = !rows->fresh;
        if (shape->bf16)
            k->add_values_bf16(rows->n, weights, STEP_KEYS, &src, next, rows->o, shape->value_width, add);
        else k->add_values_f32(rows->n, weights, STEP_KEYS, &src, next, rows->o, shape->value_width, add);
        rows->fresh = false;
        return;
    }
    mm_kernel *mm = shape->bf16 ? k->mm_bf16 : k->mm_f32;
    prefetch(shape, ahead, 0, 1);
    if (shape->bf16)
        k->pack_values_bf16(&src, (int32_t)shape->value_panel, (uint32_t *)(void *)s->values, panel_stride);
    else k->pack_values_f32(&src, (int32_t)shape->value_panel, s->values, panel_stride);
    for (int64_t j = 0; j < shape->value_panels; j++) {
        const int64_t at = j * shape->value_panel, left = shape->value_width - at;
        mm(rows->n, left < shape->value_panel ? left : shape->value_panel, depth, weights, STEP_KEYS, 1,
           s->values + j * panel_stride, shape->value_panel, rows->o + at, shape->value_width, !rows->fresh);
    }
    rows->fresh = false;
}

void decode_add(const decode_shape *shape, decode_rows *rows, const decode_panel *panels, int32_t count,
                int32_t keys, bool values, decode_scratch *s)
{
    if (keys == 0) return;
    for (int32_t r = 0; r < rows->n; r++) {
        s->lo[r] = 0;
        s->hi[r] = keys;
    }
    const softmax_tile tile = {s->s,      STEP_KEYS, rows->n,       (int32_t)round_up16(keys),
                               s->lo,     s->hi,     shape->scale2, rows->max,
                               rows->sum, s->shrink};
    if (shape->bf16) shape->kernels->softmax_bf16(&tile);
    else shape->kernels->softmax_f32(&tile);
    if (!values) return;
    for (int32_t r = 0; r < rows->n && !rows->fresh; r++)
        if (s->shrink[r] != 1.0f)
            shape->kernels->scale_row(rows->o + r * shape->value_width, s->shrink[r], shape->value_width);
    int32_t column = 0;
    for (int32_t i = 0; i < count; column += (int32_t)panels[i++].n) {
        const row_source ahead = i + 1 < count ? values_of(shape, &panels[i + 1]) : keys_of(shape, &s->ahead);
        add_panel(shape, rows, &panels[i], column, &ahead, s);
    }
}

void decode_rows_finish(const decode_shape *shape, decode_rows *rows)
{
    const double ln2 = 0.69314718055994530942;
    if (rows->fresh) memset(rows->o, 0, (size_t)(rows->n * shape->value_width) * sizeof *rows->o);
    rows->fresh = false;
    for (int32_t r = 0; r < rows->n; r++) {
        const float sum = rows->sum[r];
        if (sum != 0.0f)
            shape->kernels->scale_row(rows->o + r * shape->value_width, 1.0f / sum, shape->value_width);
        rows->sum[r] = sum == 0.0f
                           ? -INFINITY
                           : (float)((double)rows->max[r] * (double)shape->scale2 * ln2 + log((double)sum));
    }
}

decode_panel decode_next_panel(const cache_plane *plane, int64_t b, int64_t head, int64_t *key, int64_t end)
{
    const int64_t at = *key % PANEL_KEYS, size = (int64_t)quern_dtype_size(plane->blocks.dtype);
    const int64_t stop = *key - at + PANEL_KEYS < end ? *key - at + PANEL_KEYS : end;
    const char *block = cache_block(plane, b, head, *key / PANEL_KEYS);
    const decode_panel panel = {block + at * plane->dim * size,
                                block + (PANEL_KEYS * plane->dim + at * plane->dim_v) * size, stop - *key};
    *key = stop;
    return panel;
}
