/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* panels.c - repacks and unpacks units: gathers the bytes of 64 columns and 64 of K as [pair of K][column],
 * then moves their nibbles into place, 16 columns at a time. */
#include "cpu/gemm4/panels.h"

#include <string.h>

enum { PAIRS = GEMM4_UNIT / 2, PAIRS_A_LINE = 4 };

typedef struct unit_bytes {
    uint8_t codes[PAIRS][GEMM4_PANEL], scales[GEMM4_BLOCKS][GEMM4_PANEL];
} unit_bytes;

weight_view weight_of(const quern_tensor *codes, const quern_tensor *scales, bool k_major, scale_order order,
                      int64_t n, int64_t k, int64_t expert)
{
    weight_view w = {.codes = (uint8_t *)codes->data + expert * codes->strides[0],
                     .pair_stride = k_major ? 1 : codes->strides[1],
                     .column_stride = k_major ? codes->strides[1] : 1,
                     .scales = (uint8_t *)scales->data + expert * scales->strides[0],
                     .swizzled = order == SCALES_SWIZZLED,
                     .n = n,
                     .k = k};
    if (!w.swizzled) {
        w.block_stride = order == SCALES_K_MAJOR ? 1 : scales->strides[1];
        w.scale_column_stride = order == SCALES_K_MAJOR ? scales->strides[1] : 1;
    }
    return w;
}

static uint8_t *scale_at(const weight_view *w, int64_t block, int64_t column)
{
    if (!w->swizzled) return w->scales + block * w->block_stride + column * w->scale_column_stride;
    const int64_t tiles = (w->k / 16 + 3) / 4;
    return w->scales + (column / 128 * tiles + block / 4) * 512 + column % 32 * 16 + column % 128 / 32 * 4 +
           block % 4;
}

/* The columns and rows of a unit that lie within the matrix. */
typedef struct unit_extent {
    int64_t column, columns, pair, pairs, block, blocks;
} unit_extent;

static int64_t at_most(int64_t n, int64_t most)
{
    return n < most ? n : most;
}

static unit_extent extent_of(const weight_view *w, int64_t panel, int64_t unit)
{
    unit_extent e = {.column = panel * GEMM4_PANEL, .pair = unit * PAIRS, .block = unit * GEMM4_BLOCKS};
    e.columns = at_most(w->n - e.column, GEMM4_PANEL);
    e.pairs = at_most(w->k / 2 - e.pair, PAIRS);
    e.blocks = at_most(w->k / 16 - e.block, GEMM4_BLOCKS);
    return e;
}

static void gather(const weight_view *w, const unit_extent *e, unit_bytes *unit)
{
    if (e->columns < GEMM4_PANEL || e->pairs < PAIRS) memset(unit, 0, sizeof *unit);
    const uint8_t *from = w->codes + e->pair * w->pair_stride + e->column * w->column_stride;
    if (w->column_stride == 1)
        for (int64_t p = 0; p < e->pairs; p++)
            memcpy(unit->codes[p], from + p * w->pair_stride, (size_t)e->columns);
    else
        for (int64_t c = 0; c < e->columns; c++)
            for (int64_t p = 0; p < e->pairs; p++) unit->codes[p][c] = from[p + c * w->column_stride];
    for (int64_t b = 0; b < e->blocks; b++)
        for (int64_t c = 0; c < e->columns; c++)
            unit->scales[b][c] = *scale_at(w, e->block + b, e->column + c);
}

/* Byte j of a column's line holds k 2 j and 2 j + 1. They become nibbles j and j + 4. */
static uint32_t word_of(const uint8_t *first)
{
    uint32_t word = 0;
    for (int j = 0; j < PAIRS_A_LINE; j++) {
        const uint32_t byte = first[j * GEMM4_PANEL];
        word |= (byte & 15) << 4 * j | byte >> 4 << (4 * j + 16);
    }
    return word;
}

static void place(const unit_bytes *unit, uint8_t *out)
{
    for (int strip = 0; strip < GEMM4_STRIPS; strip++, out += GEMM4_STRIP_BYTES) {
        for (int b = 0; b < GEMM4_BLOCKS; b++)
            for (int n = 0; n < GEMM4_STRIP; n++)
                out[b * GEMM4_STRIP + n] = gemm4_scale_byte(unit->scales[b][strip * GEMM4_STRIP + n]);
        for (int line = 0; line < GEMM4_LINES; line++) {
            uint32_t words[GEMM4_STRIP];
            for (int n = 0; n < GEMM4_STRIP; n++)
                words[n] = word_of(&unit->codes[PAIRS_A_LINE * line][strip * GEMM4_STRIP + n]);
            memcpy(out + 64 + 64 * line, words, sizeof words);
        }
    }
}

void pack_units(const weight_view *w, int64_t panel, int64_t first, int64_t count, uint8_t *out)
{
    for (int64_t u = 0; u < count; u++, out += GEMM4_UNIT_BYTES) {
        unit_bytes unit;
        const unit_extent e = extent_of(w, panel, first + u);
        gather(w, &e, &unit);
        place(&unit, out);
    }
}

void unpack_unit(const weight_view *w, int64_t panel, int64_t unit, const uint8_t *in)
{
    const unit_extent e = extent_of(w, panel, unit);
    for (int64_t c = 0; c < e.columns; c++) {
        const uint8_t *strip = in + c / GEMM4_STRIP * GEMM4_STRIP_BYTES;
        for (int64_t b = 0; b < e.blocks; b++)
            *scale_at(w, e.block + b, e.column + c) =
                gemm4_e4m3_byte(strip[b * GEMM4_STRIP + c % GEMM4_STRIP]);
        for (int64_t p = 0; p < e.pairs; p++) {
            uint32_t word;
            memcpy(&word, strip + 64 + p / PAIRS_A_LINE * 64 + c % GEMM4_STRIP * 4, sizeof word);
            word >>= 4 * (p % PAIRS_A_LINE);
            w->codes[(e.pair + p) * w->pair_stride + (e.column + c) * w->column_stride] =
                (uint8_t)((word & 15) | (word >> 16 & 15) << 4);
        }
    }
}

void largest_scales(const weight_view *w, int64_t panel, uint8_t most[GEMM4_PANEL])
{
    const int64_t column = panel * GEMM4_PANEL, columns = at_most(w->n - column, GEMM4_PANEL);
    memset(most, 0, GEMM4_PANEL);
    for (int64_t b = 0; b < w->k / 16; b++)
        for (int64_t c = 0; c < columns; c++) {
            const uint8_t scale = *scale_at(w, b, column + c);
            if (scale > most[c]) most[c] = scale;
        }
}
