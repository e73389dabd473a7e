/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * key_panel.c - a panel of the indexer's keys from any of their formats.
 *
 * A byte format's codes are exact in bf16, so the products take them as they are. A scale multiplies the
 * score, as a positive factor commutes with ReLU. FP4 has a scale for every 32 codes: the largest of a row
 * multiplies the score, and the codes are multiplied by the ratio of their own to it.
 */
#include "cpu/indexer/key_panel.h"

#include "cpu/rows_at.h"

#include <math.h>
#include <string.h>

enum { FP4_BLOCK = 32 };

void key_panel_carve(key_panel *p, arena *a)
{
    const size_t panel = (size_t)p->kernels->panel, width = (size_t)p->width;
    p->words = arena_take(a, (size_t)key_panel_words(p) * panel * sizeof(float));
    if (p->format == ENTRY_ROWS) return;
    p->rows = arena_take(a, panel * width * sizeof *p->rows);
    p->scale = arena_take(a, panel * sizeof *p->scale);
    p->halves = arena_take(a, p->bf16 ? panel * width * sizeof *p->halves : 0);
}

static float widen_fp8(const key_panel *p, const uint8_t *bytes, float *row)
{
    float scale;
    memcpy(&scale, bytes + p->width, sizeof scale);
    p->kernels->widen_e4m3(bytes, p->width, row);
    if (!signbit(scale)) return scale;
    for (int64_t i = 0; i < p->width; i++) row[i] = -row[i];
    return -scale;
}

static float widen_fp4(const key_panel *p, const uint8_t *bytes, float *row)
{
    const uint8_t *exponent = bytes + p->width / 2;
    float scales[MAX_DIM / FP4_BLOCK];
    int most = 0;
    for (int64_t i = 0; i < p->width / FP4_BLOCK; i++) most = exponent[i] > most ? exponent[i] : most;
    for (int64_t i = 0; i < p->width / FP4_BLOCK; i++) scales[i] = ldexpf(1.0f, exponent[i] - most);
    p->kernels->widen_e2m1(bytes, scales, p->width, row);
    return most == 255 ? NAN : ldexpf(1.0f, most - 127);
}

static void widen_rows(key_panel *p, const quern_tensor *keys, int64_t b, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *bytes =
            (const uint8_t *)keys->data + b * keys->strides[0] + (first + i) * keys->strides[1];
        float *row = p->rows + i * p->width;
        p->scale[i] = p->format == ENTRY_FP4 ? widen_fp4(p, bytes, row) : widen_fp8(p, bytes, row);
    }
    if (p->bf16) p->packing->rows->convert(p->rows, QUERN_F32, p->halves, QUERN_BF16, n * p->width);
}

void key_panel_fill(key_panel *p, const quern_tensor *keys, int64_t b, int64_t first, int64_t n)
{
    row_source src = {p->rows, QUERN_F32, p->width, n, p->width};
    if (p->format == ENTRY_ROWS) {
        const int64_t at = b * keys->strides[0] + first * keys->strides[1];
        src = (row_source){(const char *)keys->data + at * (int64_t)quern_dtype_size(keys->dtype),
                           keys->dtype, keys->strides[1], n, p->width};
    } else {
        widen_rows(p, keys, b, first, n);
        if (p->bf16) {
            src.data = p->halves;
            src.dtype = QUERN_BF16;
        }
    }
    if (p->bf16) p->packing->pack_keys_bf16(&src, p->kernels->panel, p->words);
    else p->packing->pack_keys_f32(&src, p->kernels->panel, p->words);
}
