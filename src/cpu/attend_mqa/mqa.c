/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mqa.c - tiles of keys, and the products of a query's heads against them. */
#include "cpu/attend_mqa/mqa.h"

#include "cpu/rows_at.h"

#include <string.h>

enum { ENTRIES_AHEAD = 8 };

static int64_t panels_of(const mqa_plan *plan, int64_t columns)
{
    return (columns + plan->panel - 1) / plan->panel;
}

void mqa_tile_carve(const mqa_plan *plan, arena *a, mqa_tile *tile)
{
    const size_t panels = (size_t)panels_of(plan, plan->width);
    tile->rows = arena_take(a, (size_t)(MQA_TILE * plan->pitch) * sizeof *tile->rows);
    tile->pairs = arena_take(a, plan->bf16 ? panels * MQA_TILE / 2 * (size_t)plan->panel * sizeof *tile->pairs : 0);
}

/* Copies rows of one view to rows at, at + 1, ... of the tile. */
static void copy_rows(const mqa_plan *plan, const quern_tensor *t, int64_t b, int64_t first, int64_t n, int64_t at, mqa_tile *tile)
{
    const row_source src = {mqa_row(t, b, first), t->dtype, t->strides[1], n, plan->dim};
    float *to = tile->rows + at * plan->pitch;
    if (plan->bf16) plan->kernels->pack_rows_bf16(&src, (uint16_t *)to, 2 * plan->pitch);
    else plan->kernels->pack_rows_f32(&src, 1.0f, to, plan->pitch);
}

static void prefetch_entry(const mqa_plan *plan, int64_t b, int64_t row)
{
    const char *p = mqa_row(&plan->args->entries, b, row);
    const int64_t bytes = plan->dim * (int64_t)quern_dtype_size(plan->args->entries.dtype);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}

/* Pairs of keys, in slices of columns that the packing kernel takes. */
static void pack_pairs(const mqa_plan *plan, mqa_tile *tile)
{
    const int64_t panel_words = MQA_TILE / 2 * plan->panel;
    for (int64_t c = 0; c < plan->dim; c += MAX_DIM) {
        const int64_t dim = plan->dim - c < MAX_DIM ? plan->dim - c : MAX_DIM;
        const row_source src = {(const uint16_t *)tile->rows + c, QUERN_BF16, 2 * plan->pitch, tile->n, dim};
        plan->kernels->pack_values_bf16(&src, (int32_t)plan->panel, (uint32_t *)tile->pairs + c / plan->panel * panel_words, panel_words);
    }
}

void mqa_tile_fill(const mqa_plan *plan, const mqa_sequence *s, const mqa_keys *keys, int64_t first, int64_t n, mqa_tile *tile)
{
    const attend_mqa_args *a = plan->args;
    const int64_t raw_end = first + n < keys->raw ? first + n : keys->raw, raw = raw_end > first ? raw_end - first : 0;
    tile->n = n;
    if (raw > 0) copy_rows(plan, &a->kv, s->view_b, s->raw0 + keys->raw0 + first, raw, 0, tile);
    const int64_t entry = first + raw - keys->raw;
    if (raw < n && keys->list == NULL) copy_rows(plan, &a->entries, s->view_b, s->entry0 + entry, n - raw, raw, tile);
    if (keys->list != NULL) {
        for (int64_t i = raw; i < n; i++) {
            const int64_t at = first + i - keys->raw;
            if (at + ENTRIES_AHEAD < keys->n - keys->raw) prefetch_entry(plan, s->view_b, s->entry0 + keys->list[at + ENTRIES_AHEAD]);
            copy_rows(plan, &a->entries, s->view_b, s->entry0 + keys->list[at], 1, i, tile);
        }
    }
    if (plan->bf16) pack_pairs(plan, tile);
}

size_t mqa_columns_bytes(const mqa_plan *plan)
{
    return (size_t)(panels_of(plan, plan->columns) * plan->words * plan->panel) * sizeof(float);
}

void mqa_pack_columns(const mqa_plan *plan, const row_source *heads, float *to)
{
    const int64_t slice = plan->bf16 ? 2 * MAX_DIM : MAX_DIM, element = (int64_t)quern_dtype_size(heads->dtype);
    for (int64_t h = 0; h < plan->columns; h += plan->panel, to += plan->words * plan->panel) {
        for (int64_t c = 0; c < plan->dim; c += slice) {
            row_source src = *heads;
            src.data = (const char *)heads->data + (h * heads->stride + c) * element;
            src.rows = heads->rows - h < plan->panel ? heads->rows - h : plan->panel;
            src.dim = plan->dim - c < slice ? plan->dim - c : slice;
            if (plan->bf16) plan->kernels->pack_keys_bf16(&src, (int32_t)plan->panel, (uint32_t *)to + c / 2 * plan->panel);
            else plan->kernels->pack_keys_f32(&src, (int32_t)plan->panel, to + c * plan->panel);
        }
    }
}

void mqa_scores(const mqa_plan *plan, const mqa_tile *tile, const float *columns, float *s)
{
    mm_kernel *mm = plan->bf16 ? plan->kernels->mm_bf16 : plan->kernels->mm_f32;
    for (int64_t c = 0; c < plan->columns; c += plan->panel, columns += plan->words * plan->panel) {
        const int64_t n = plan->columns - c < plan->panel ? plan->columns - c : plan->panel;
        mm(tile->n, n, plan->words, tile->rows, plan->pitch, 1, columns, plan->panel, s + c, plan->columns, false);
    }
}

void mqa_values(const mqa_plan *plan, const mqa_tile *tile, const float *p, float *o, bool accumulate)
{
    mm_kernel *mm = plan->bf16 ? plan->kernels->mm_bf16 : plan->kernels->mm_f32;
    const int64_t depth = plan->bf16 ? (tile->n + 1) / 2 : tile->n;
    for (int64_t c = 0; c < plan->width; c += plan->panel) {
        const int64_t n = plan->width - c < plan->panel ? plan->width - c : plan->panel;
        const float *b = plan->bf16 ? tile->pairs + c / plan->panel * (MQA_TILE / 2 * plan->panel) : tile->rows + c;
        mm(plan->heads, n, depth, p, 1, plan->columns, b, plan->bf16 ? plan->panel : plan->pitch, o + c, plan->width, accumulate);
    }
}

void mqa_angles(const mqa_plan *plan, int64_t position, float *angles)
{
    const quern_tensor *t = &plan->args->cos_sin;
    const char *row = (const char *)t->data + position * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
    const row_source src = {row, t->dtype, plan->rope, 1, plan->rope};
    plan->kernels->pack_rows_f32(&src, 1.0f, angles, plan->rope);
}
