/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mqa.c - tiles of keys, and their products with a query's heads. */
#include "cpu/attend_mqa/mqa.h"

#include "core/half.h"
#include "cpu/rows_at.h"

#include <string.h>

enum { ENTRIES_AHEAD = 8, ROWS_BETWEEN = 12 /* a multiple of the micro-kernel's */ };

static int64_t panels_of(const mqa_plan *plan, int64_t columns)
{
    return (columns + plan->panel - 1) / plan->panel;
}

void mqa_tile_carve(const mqa_plan *plan, arena *a, mqa_tile *tile)
{
    const size_t panels = (size_t)panels_of(plan, plan->width);
    tile->rows = arena_take(a, (size_t)(MQA_TILE * plan->pitch) * sizeof *tile->rows);
    tile->pairs =
        arena_take(a, plan->bf16 ? panels * MQA_TILE / 2 * (size_t)plan->panel * sizeof *tile->pairs : 0);
}

/* Row `row` of a sequence's raw rows, or of its entries. */
static row_place place_of(const mqa_plan *plan, const mqa_sequence *s, bool entries, int64_t row)
{
    const attend_mqa_args *a = plan->args;
    const quern_tensor *t = entries ? &a->entries : &a->kv,
                       *table = entries ? &a->entries_table : &a->kv_table;
    const int64_t b = is_present(table) ? s->b : s->view_b;
    return row_place_of(t, table, a->page, plan->row, b, row + (entries ? s->entry0 : s->raw0));
}

/* Decodes a row into words of a tile. */
static void widen(const mqa_plan *plan, const char *data, const char *scales, float *to)
{
    float row[MQA_DIM_MOST];
    (void)decode_row(plan->level, plan->args->format, data, scales, plan->dim, row);
    plan->level->rows->convert(row, QUERN_F32, to, plan->bf16 ? QUERN_BF16 : QUERN_F32, plan->dim);
}

/* Copies rows first ... first + n - 1 to rows at, at + 1, ... of the tile. */
static void copy_rows(const mqa_plan *plan, const mqa_sequence *s, bool entries, int64_t first, int64_t n,
                      int64_t at, mqa_tile *tile)
{
    const quern_tensor *t = entries ? &plan->args->entries : &plan->args->kv;
    for (int64_t done = 0, rows; done < n; done += rows) {
        const row_place place = place_of(plan, s, entries, first + done);
        float *to = tile->rows + (at + done) * plan->pitch;
        rows = n - done < place.rows ? n - done : place.rows;
        const row_source src = {place.data, t->dtype, t->strides[1], rows, plan->dim};
        for (int64_t i = 0; plan->args->format != ENTRY_ROWS && i < rows; i++)
            widen(plan, place.data + i * place.step, place.scales + i * place.scale_step,
                  to + i * plan->pitch);
        if (plan->args->format != ENTRY_ROWS) continue;
        if (plan->bf16) plan->kernels->pack_rows_bf16(&src, (uint16_t *)to, 2 * plan->pitch);
        else plan->kernels->pack_rows_f32(&src, 1.0f, to, plan->pitch);
    }
}

static void prefetch_entry(const mqa_plan *plan, const mqa_sequence *s, int64_t row)
{
    const char *data = place_of(plan, s, true, row).data;
    for (int64_t at = 0; at < plan->row.data; at += 64) __builtin_prefetch(data + at);
}

/* The rows of keys [first, end) of a query. */
static void find_rows(const mqa_plan *plan, const mqa_sequence *s, const mqa_keys *keys, int64_t first,
                      int64_t end, const void **row)
{
    for (int64_t key = first; key < end;) {
        const bool entry = key >= keys->raw, listed = entry && keys->list != NULL;
        const int64_t at = entry ? key - keys->raw : keys->raw0 + key, stop = entry ? end : keys->raw;
        const row_place place = place_of(plan, s, entry, listed ? keys->list[at] : at);
        const int64_t left = (end < stop ? end : stop) - key, rows = listed ? 1
                                                                     : left < place.rows ? left : place.rows;
        for (int64_t i = 0; i < rows; i++) row[i] = place.data + i * place.step;
        row += rows;
        key += rows;
    }
}

void mqa_ahead_keys(const mqa_plan *plan, const mqa_sequence *s, const mqa_keys *keys, int64_t first,
                    int64_t end, mqa_ahead *ahead)
{
    const int64_t room = MQA_AHEAD - ahead->rows, n = end - first < room ? end - first : room;
    find_rows(plan, s, keys, first, first + n, ahead->row + ahead->rows);
    ahead->rows += n;
    if (plan->row.data > ahead->bytes) ahead->bytes = plan->row.data;
}

void mqa_ahead_heads(const row_source *heads, mqa_ahead *ahead)
{
    const int64_t size = (int64_t)quern_dtype_size(heads->dtype);
    for (int64_t h = 0; h < heads->rows && ahead->rows < MQA_AHEAD; h++)
        ahead->row[ahead->rows++] = (const char *)heads->data + h * heads->stride * size;
    if (heads->dim * size > ahead->bytes) ahead->bytes = heads->dim * size;
}

/* Requests into L2 the share of the rows ahead that falls to one of `parts` parts of products that are left.
 * All rows at once would be more lines than can be in flight. */
static void request_share(mqa_ahead *ahead, int64_t parts)
{
    if (ahead == NULL) return;
    const int64_t end = ahead->next + (ahead->rows - ahead->next + parts - 1) / parts;
    for (; ahead->next < end; ahead->next++)
        for (int64_t at = 0; at < ahead->bytes; at += 64)
            __builtin_prefetch((const char *)ahead->row[ahead->next] + at, 0, 2);
}

/* Makes the pairs of keys, in slices of columns that the packing kernel takes. */
static void pack_pairs(const mqa_plan *plan, mqa_tile *tile)
{
    const int64_t panel_words = MQA_TILE / 2 * plan->panel;
    for (int64_t c = 0; c < plan->dim; c += MAX_DIM) {
        const int64_t dim = plan->dim - c < MAX_DIM ? plan->dim - c : MAX_DIM;
        const row_source src = {(const uint16_t *)tile->rows + c, QUERN_BF16, 2 * plan->pitch, tile->n, dim};
        plan->kernels->pack_values_bf16(&src, (int32_t)plan->panel,
                                        (uint32_t *)tile->pairs + c / plan->panel * panel_words, panel_words);
    }
}

void mqa_tile_fill(const mqa_plan *plan, const mqa_sequence *s, const mqa_keys *keys, int64_t first,
                   int64_t n, mqa_tile *tile)
{
    const int64_t raw_end = first + n < keys->raw ? first + n : keys->raw,
                  raw = raw_end > first ? raw_end - first : 0;
    tile->n = n;
    if (plan->gathers) {
        const void *row[MQA_TILE];
        find_rows(plan, s, keys, first, first + n, row);
        plan->kernels->gather_pairs_bf16(row, n, plan->dim, (uint16_t *)tile->rows, 2 * plan->pitch,
                                         (int32_t)plan->panel, (uint32_t *)tile->pairs,
                                         MQA_TILE / 2 * plan->panel);
        return;
    }
    if (raw > 0) copy_rows(plan, s, false, keys->raw0 + first, raw, 0, tile);
    const int64_t entry = first + raw - keys->raw;
    if (raw < n && keys->list == NULL) copy_rows(plan, s, true, entry, n - raw, raw, tile);
    if (keys->list != NULL) {
        for (int64_t i = raw; i < n; i++) {
            const int64_t at = first + i - keys->raw;
            if (at + ENTRIES_AHEAD < keys->n - keys->raw)
                prefetch_entry(plan, s, keys->list[at + ENTRIES_AHEAD]);
            copy_rows(plan, s, true, keys->list[at], 1, i, tile);
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
    const int64_t slice = plan->bf16 ? 2 * MAX_DIM : MAX_DIM,
                  element = (int64_t)quern_dtype_size(heads->dtype);
    for (int64_t h = 0; h < plan->columns; h += plan->panel, to += plan->words * plan->panel) {
        for (int64_t c = 0; c < plan->dim; c += slice) {
            row_source src = *heads;
            src.data = (const char *)heads->data + (h * heads->stride + c) * element;
            src.rows = heads->rows - h < plan->panel ? heads->rows - h : plan->panel;
            src.dim = plan->dim - c < slice ? plan->dim - c : slice;
            if (plan->bf16)
                plan->kernels->pack_keys_bf16(&src, (int32_t)plan->panel,
                                              (uint32_t *)to + c / 2 * plan->panel);
            else plan->kernels->pack_keys_f32(&src, (int32_t)plan->panel, to + c * plan->panel);
        }
    }
}

void mqa_scores(const mqa_plan *plan, const mqa_tile *tile, const float *columns, float *s,
                mqa_ahead *ahead)
{
    mm_kernel *mm = plan->bf16 ? plan->kernels->mm_bf16 : plan->kernels->mm_f32;
    const int64_t panels = panels_of(plan, plan->columns),
                  blocks = (tile->n + ROWS_BETWEEN - 1) / ROWS_BETWEEN;
    for (int64_t panel = 0; panel < panels; panel++, columns += plan->words * plan->panel) {
        const int64_t c = panel * plan->panel,
                      n = plan->columns - c < plan->panel ? plan->columns - c : plan->panel;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t i = block * ROWS_BETWEEN,
                          rows = tile->n - i < ROWS_BETWEEN ? tile->n - i : ROWS_BETWEEN;
            request_share(ahead, 2 * panels * blocks - panel * blocks - block);
            mm(rows, n, plan->words, tile->rows + i * plan->pitch, plan->pitch, 1, columns, plan->panel,
               s + i * plan->columns + c, plan->columns, false);
        }
    }
}

void mqa_values(const mqa_plan *plan, const mqa_tile *tile, const float *p, float *o, bool accumulate,
                mqa_ahead *ahead)
{
    mm_kernel *mm = plan->bf16 ? plan->kernels->mm_bf16 : plan->kernels->mm_f32;
    const int64_t depth = plan->bf16 ? (tile->n + 1) / 2 : tile->n, panels = panels_of(plan, plan->width),
                  blocks = (plan->heads + ROWS_BETWEEN - 1) / ROWS_BETWEEN;
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t c = panel * plan->panel,
                      n = plan->width - c < plan->panel ? plan->width - c : plan->panel;
        const float *b =
            plan->bf16 ? tile->pairs + panel * (MQA_TILE / 2 * plan->panel) : tile->rows + c;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t h = block * ROWS_BETWEEN,
                          heads = plan->heads - h < ROWS_BETWEEN ? plan->heads - h : ROWS_BETWEEN;
            request_share(ahead, panels * blocks - panel * blocks - block);
            mm(heads, n, depth, p + h, 1, plan->columns, b, plan->bf16 ? plan->panel : plan->pitch,
               o + h * plan->width + c, plan->width, accumulate);
        }
    }
}

void mqa_angles(const mqa_plan *plan, int64_t position, float *angles)
{
    const quern_tensor *t = &plan->args->cos_sin;
    const char *row = (const char *)t->data + position * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
    const row_source src = {row, t->dtype, plan->rope, 1, plan->rope};
    plan->kernels->pack_rows_f32(&src, 1.0f, angles, plan->rope);
}
