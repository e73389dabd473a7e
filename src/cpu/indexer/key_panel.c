/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * key_panel.c - a panel of the indexer's keys from any of their formats.
 *
 * A byte format's codes are exact in bf16, so the products take them as they are. A scale multiplies the
 * score, as a positive factor commutes with ReLU. FP4 has a scale for every 32 codes: the largest of a row
 * multiplies the score, and the codes are multiplied by the ratio of their own to it.
 *
 * A contiguous row's scales follow its codes. In a page they follow the codes of all slots.
 */
#include "cpu/indexer/key_panel.h"

#include "cpu/kernels/formats/e8m0.h"
#include "cpu/kernels/formats/row_formats.h"
#include "cpu/rows_at.h"

#include <string.h>

static row_place place_of(const key_panel *p, int64_t b, int64_t key)
{
    const indexer_args *a = p->args;
    return row_place_of(&a->keys, &a->table, a->page, p->row, b, key);
}

void key_panel_carve(key_panel *p, arena *a)
{
    const size_t panel = (size_t)p->kernels->panel, width = (size_t)p->width;
    p->words = arena_take(a, (size_t)key_panel_words(p) * panel * sizeof(float));
    if (p->args->format == ENTRY_ROWS) {
        p->gathered = arena_take(a, p->args->page > 0 ? panel * (size_t)p->row.data : 0);
        return;
    }
    p->rows = arena_take(a, panel * width * sizeof *p->rows);
    p->scale = arena_take(a, panel * sizeof *p->scale);
    p->halves = arena_take(a, p->bf16 ? panel * width * sizeof *p->halves : 0);
}

int64_t key_panel_bad_scale(const key_panel *p, int64_t b, int64_t key)
{
    const indexer_args *a = p->args;
    const quern_tensor *t = &a->keys;
    const uint8_t *exponent = (const uint8_t *)place_of(p, b, key).scales;
    int64_t bad = 0;
    while (bad < p->row.scales && exponent[bad] != E8M0_NAN) bad++;
    if (bad == p->row.scales) return -1;
    const bool pages = a->page > 0,
               inside = t->ndim == 3; /* a row is an element of the pages or of all keys */
    const int64_t page =
        pages ? ((const int32_t *)a->table.data)[b * a->table.strides[0] + key / a->page] : b;
    const int64_t slot = !inside ? 0
                         : pages ? key % a->page
                                 : key,
                  row = inside ? page * t->shape[1] + slot : page,
                  at = page * t->strides[0] + (inside ? slot * t->strides[1] : 0);
    return row * t->shape[t->ndim - 1] + (exponent + bad - (const uint8_t *)t->data - at);
}

static void widen_rows(key_panel *p, int64_t b, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const row_place at = place_of(p, b, first + i);
        float *row = p->rows + i * p->width;
        p->scale[i] = decode_row(p->level, p->args->format, at.data, at.scales, p->width, row);
    }
    if (p->bf16) p->packing->rows->convert(p->rows, QUERN_F32, p->halves, QUERN_BF16, n * p->width);
}

/* Rows of keys as they stand or, where they stand in several pages, a copy of them. */
static row_source plain_rows(const key_panel *p, int64_t b, int64_t first, int64_t n)
{
    const quern_tensor *t = &p->args->keys;
    const row_place whole = place_of(p, b, first);
    if (whole.rows >= n) return (row_source){whole.data, t->dtype, t->strides[1], n, p->width};
    const size_t bytes = (size_t)p->row.data;
    for (int64_t i = 0; i < n; i++)
        memcpy(p->gathered + (size_t)i * bytes, place_of(p, b, first + i).data, bytes);
    return (row_source){p->gathered, t->dtype, p->width, n, p->width};
}

void key_panel_fill(key_panel *p, int64_t b, int64_t first, int64_t n)
{
    row_source src = {p->rows, QUERN_F32, p->width, n, p->width};
    if (p->args->format == ENTRY_ROWS) {
        src = plain_rows(p, b, first, n);
    } else {
        widen_rows(p, b, first, n);
        if (p->bf16) {
            src.data = p->halves;
            src.dtype = QUERN_BF16;
        }
    }
    if (p->bf16) p->packing->pack_keys_bf16(&src, p->kernels->panel, p->words);
    else p->packing->pack_keys_f32(&src, p->kernels->panel, p->words);
}

key_bytes key_panel_bytes(const key_panel *p, int64_t b, int64_t first, int64_t n)
{
    const quern_tensor *t = &p->args->keys;
    const int64_t row = p->row.data,
                  step = t->ndim == 3 ? t->strides[1] * (int64_t)quern_dtype_size(t->dtype) : row;
    if (n <= 0 || step > 2 * row) return (key_bytes){NULL, 0};
    const row_place place = place_of(p, b, first);
    return (key_bytes){place.data, (n < place.rows ? n : place.rows) * step};
}
