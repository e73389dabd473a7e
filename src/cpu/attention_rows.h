/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_rows.h - the row kernels of the attention table (packing, softmax, its backward, narrowing),
 * written once over 16-lane vectors and compiled by each level's file under its own flags.
 *
 * A product at D = 128 does 512 operations per score in the forward pass, these about 12: at 16 lanes and
 * 4 GHz they take 2 to 4% of the time, most of it exp2 (five FMAs).
 */
#ifndef QUERN_CPU_ATTENTION_ROWS_H
#define QUERN_CPU_ATTENTION_ROWS_H

#include "core/half.h"
#include "cpu/attention_kernels.h"
#include "cpu/vector.h"

INLINE const void *source_row(const row_source *s, int64_t row)
{
    const int64_t at = row * s->stride;
    return s->dtype == QUERN_F32 ? (const void *)((const float *)s->data + at)
                                 : (const void *)((const uint16_t *)s->data + at);
}

/* Eight or more elements of a source row as f32. The element pointer needs no alignment beyond its own. */
INLINE void widen_row(const void *src, quern_dtype dtype, float *dst, int64_t n)
{
    if (dtype == QUERN_F32) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
    } else if (dtype == QUERN_BF16) {
        const uint16_t *p = src;
        for (int64_t i = 0; i < n; i++) dst[i] = float_from_bf16(p[i]);
    } else {
        const uint16_t *p = src;
#if defined(__F16C__)
        for (int64_t i = 0; i < n; i++) {
            typedef _Float16 half;
            half h;
            memcpy(&h, &p[i], sizeof h);
            dst[i] = (float)h;
        }
#else
        for (int64_t i = 0; i < n; i++) dst[i] = float_from_f16(p[i]);
#endif
    }
}

enum { MAX_DIM = 256 };

static void pack_rows_f32(const row_source *src, float scale, float *dst, int64_t ldd)
{
    for (int64_t r = 0; r < src->rows; r++) {
        float *d = dst + r * ldd;
        widen_row(source_row(src, r), src->dtype, d, src->dim);
        for (int64_t c = 0; c < src->dim; c++) d[c] *= scale;
        for (int64_t c = src->dim; c < ldd; c++) d[c] = 0.0f;
    }
}

__attribute__((unused)) static void pack_rows_bf16(const row_source *src, uint16_t *dst, int64_t ldd)
{
    for (int64_t r = 0; r < src->rows; r++) {
        memcpy(dst + r * ldd, source_row(src, r), (size_t)src->dim * sizeof *dst);
        memset(dst + r * ldd + src->dim, 0, (size_t)(ldd - src->dim) * sizeof *dst);
    }
}

/* Transposes 16 rows at a time through a small buffer, so that both sides are walked in order. */
static void pack_keys_f32(const row_source *src, int32_t panel, float *dst)
{
    float rows[LANES][MAX_DIM];
    for (int32_t c0 = 0; c0 < panel; c0 += LANES) {
        for (int32_t i = 0; i < LANES; i++) {
            if (c0 + i < src->rows) widen_row(source_row(src, c0 + i), src->dtype, rows[i], src->dim);
            else memset(rows[i], 0, (size_t)src->dim * sizeof(float));
        }
        for (int64_t d = 0; d < src->dim; d++)
            for (int32_t i = 0; i < LANES; i++) dst[d * panel + c0 + i] = rows[i][d];
    }
}

__attribute__((unused)) static void pack_keys_bf16(const row_source *src, int32_t panel, uint32_t *dst)
{
    uint32_t rows[LANES][MAX_DIM / 2];
    for (int32_t c0 = 0; c0 < panel; c0 += LANES) {
        for (int32_t i = 0; i < LANES; i++) {
            if (c0 + i < src->rows) memcpy(rows[i], source_row(src, c0 + i), (size_t)src->dim * 2);
            else memset(rows[i], 0, (size_t)src->dim * 2);
        }
        for (int64_t d = 0; d < src->dim / 2; d++)
            for (int32_t i = 0; i < LANES; i++) dst[d * panel + c0 + i] = rows[i][d];
    }
}

static void pack_values_f32(const row_source *src, int32_t panel, float *dst, int64_t panel_stride)
{
    float row[MAX_DIM + LANES];
    const int64_t padded = (src->dim + panel - 1) / panel * panel;
    for (int64_t r = 0; r < src->rows; r++) {
        widen_row(source_row(src, r), src->dtype, row, src->dim);
        for (int64_t c = 0; c < padded; c += panel) {
            float *d = dst + c / panel * panel_stride + r * panel;
            const int64_t n = src->dim - c < panel ? src->dim - c : panel;
            memcpy(d, row + c, (size_t)n * sizeof *d);
            if (n < panel) memset(d + n, 0, (size_t)(panel - n) * sizeof *d);
        }
    }
}

__attribute__((unused)) static void pack_values_bf16(const row_source *src, int32_t panel, uint32_t *dst,
                                                     int64_t panel_stride)
{
    const uint16_t zero[MAX_DIM] = {0};
    const int64_t padded = (src->dim + panel - 1) / panel * panel;
    for (int64_t r = 0; r < src->rows; r += 2) {
        const uint16_t *even = source_row(src, r), *odd = r + 1 < src->rows ? source_row(src, r + 1) : zero;
        for (int64_t c0 = 0; c0 < padded; c0 += panel) {
            uint32_t *d = dst + c0 / panel * panel_stride + r / 2 * panel;
            const int64_t n = src->dim - c0 < panel ? src->dim - c0 : panel;
            for (int64_t c = 0; c < n; c++) d[c] = even[c0 + c] | (uint32_t)odd[c0 + c] << 16;
            for (int64_t c = n; c < panel; c++) d[c] = 0;
        }
    }
}

INLINE void softmax_row(const softmax_tile *t, int32_t r, bool narrow)
{
    float *s = t->s + r * t->lds;
    const int32_t lo = t->lo[r], hi = t->hi[r];
    uint16_t *half = (uint16_t *)s;
    const f32x16 none = splat16(-INFINITY);
    t->shrink[r] = 1.0f;
    if (lo >= hi) {
        memset(s, 0, (size_t)t->columns * (narrow ? sizeof *half : sizeof *s));
        return;
    }
    /* Whole groups inside [lo, hi) take the unmasked loop. */
    const int32_t first = lo / LANES * LANES, last = (hi + LANES - 1) / LANES * LANES;
    const int32_t in0 = (lo + LANES - 1) / LANES * LANES, in1 = hi / LANES * LANES;
    f32x16 top = none;
    for (int32_t c = first; c < last; c += LANES) {
        f32x16 v = load16(s + c);
        if (c < in0 || c >= in1) v = select16(lanes_in(c, lo, hi), v, none);
        top = select16(v > top, v, top);
    }
    const float old = t->max[r], seen = max_of(top), max = seen > old ? seen : old;
    const float base2 = max == -INFINITY ? 0.0f : max * t->scale2;
    if (max != old) {
        f32x16 x = splat16(old * t->scale2 - base2);
        x = exp2_16(x);
        t->shrink[r] = x[0];
        t->max[r] = max;
    }
    const f32x16 base = splat16(base2);
    f32x16 sum = {0};
    for (int32_t c = 0; c < t->columns; c += LANES) {
        f32x16 p = {0};
        if (c >= first && c < last) {
            p = exp2_16(load16(s + c) * t->scale2 - base);
            if (c < in0 || c >= in1) p = select16(lanes_in(c, lo, hi), p, (f32x16){0});
            sum += p;
        }
        if (narrow) {
            const u16x16 h = narrow16(p);
            memcpy(half + c, &h, sizeof h);
        } else {
            store16(s + c, p);
        }
    }
    t->sum[r] = t->sum[r] * t->shrink[r] + sum_of(sum);
}

static void softmax_f32(const softmax_tile *t)
{
    for (int32_t r = 0; r < t->rows; r++) softmax_row(t, r, false);
}

__attribute__((unused)) static void softmax_bf16(const softmax_tile *t)
{
    for (int32_t r = 0; r < t->rows; r++) softmax_row(t, r, true);
}

static void softmax_backward(const softmax_backward_tile *t)
{
    for (int32_t r = 0; r < t->rows; r++) {
        float *s = t->s + r * t->lds, *dp = t->dp + r * t->lds;
        const int32_t lo = t->lo[r], hi = t->hi[r];
        const f32x16 lse2 = splat16(t->lse2[r]), delta = splat16(t->delta[r]), row_scale = splat16(t->row_scale[r]);
        for (int32_t c = 0; c < t->columns; c += LANES) {
            if (c + LANES <= lo || c >= hi || t->lse2[r] == INFINITY) {
                store16(s + c, (f32x16){0});
                store16(dp + c, (f32x16){0});
                continue;
            }
            f32x16 p = exp2_16(load16(s + c) * t->scale2 - lse2);
            f32x16 ds = p * (load16(dp + c) * row_scale - delta);
            p *= row_scale;
            if (c < lo || c + LANES > hi) {
                const i32x16 mask = lanes_in(c, lo, hi);
                p = select16(mask, p, (f32x16){0});
                ds = select16(mask, ds, (f32x16){0});
            }
            store16(s + c, p);
            store16(dp + c, ds);
        }
    }
}

__attribute__((unused)) static void narrow_columns(const float *src, int64_t lds, int64_t rows, int64_t columns,
                                                   uint32_t *dst, int64_t ldd)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const u16x16 h = narrow16(load16(src + r * lds + c));
            memcpy((uint16_t *)(dst + r * ldd) + c, &h, sizeof h);
        }
}

__attribute__((unused)) static void narrow_rows(const float *src, int64_t lds, int64_t rows, int64_t columns,
                                                uint32_t *dst, int64_t ldd)
{
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            const f32x16 odd_row = r + 1 < rows ? load16(src + (r + 1) * lds + c) : (f32x16){0};
            const u32x16 even = __builtin_convertvector(narrow16(load16(src + r * lds + c)), u32x16);
            const u32x16 odd = __builtin_convertvector(narrow16(odd_row), u32x16);
            const u32x16 pair = even | odd << 16;
            memcpy(dst + r / 2 * ldd + c, &pair, sizeof pair);
        }
}

static void scale_row(float *o, float shrink, int64_t n)
{
    for (int64_t i = 0; i < n; i++) o[i] *= shrink;
}

static void scale_add_row(float *o, float shrink, const float *t, int64_t n)
{
    for (int64_t i = 0; i < n; i++) o[i] = o[i] * shrink + t[i];
}

static void store_row(const float *row, quern_dtype dtype, void *dst, int64_t at, int64_t n)
{
    if (dtype == QUERN_F32) {
        memcpy((float *)dst + at, row, (size_t)n * sizeof *row);
    } else if (dtype == QUERN_BF16) {
        uint16_t *d = (uint16_t *)dst + at;
        for (int64_t i = 0; i < n; i++) d[i] = bf16_from_float(row[i]);
    } else {
        uint16_t *d = (uint16_t *)dst + at;
        for (int64_t i = 0; i < n; i++) d[i] = f16_from_float(row[i]);
    }
}

/* What each level's table has in common; bf16 entries only where the level has the dot product. */
#define ATTENTION_ROW_KERNELS                                                                          \
    .pack_rows_f32 = pack_rows_f32, .pack_keys_f32 = pack_keys_f32, .pack_values_f32 = pack_values_f32, \
    .softmax_f32 = softmax_f32, .softmax_backward = softmax_backward, .scale_row = scale_row,           \
    .scale_add_row = scale_add_row, .store_row = store_row
#define ATTENTION_ROW_KERNELS_BF16                                                                     \
    .pack_rows_bf16 = pack_rows_bf16, .pack_keys_bf16 = pack_keys_bf16,                                 \
    .pack_values_bf16 = pack_values_bf16, .softmax_bf16 = softmax_bf16,                                 \
    .narrow_columns = narrow_columns, .narrow_rows = narrow_rows

#endif
