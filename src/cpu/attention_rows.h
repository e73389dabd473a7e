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

INLINE void store_p(float *s, int32_t c, f32x16 p, bool narrow)
{
    if (narrow) {
        const u16x16 h = narrow16(p);
        memcpy((uint16_t *)s + c, &h, sizeof h);
    } else {
        store16(s + c, p);
    }
}

/* Takes the maximum `seen` of row r's tile into account: the row's shrink; returns what its exponents
 * subtract. */
INLINE f32x16 raise_max(const softmax_tile *t, int32_t r, float seen)
{
    float shrink = 1.0f;
    if (seen > t->max[r]) {
        shrink = exp2_16(splat16((t->max[r] - seen) * t->scale2))[0];
        t->max[r] = seen;
    }
    t->shrink[r] = shrink;
    return splat16(t->max[r] == -INFINITY ? 0.0f : -t->max[r] * t->scale2);
}

/* A row that sees every column: the inner tiles' case. */
INLINE void softmax_whole_row(const softmax_tile *t, int32_t r, bool narrow)
{
    float *s = t->s + r * t->lds;
    const f32x16 scale2 = splat16(t->scale2);
    f32x16 top = splat16(-INFINITY), sum = {0};
    for (int32_t c = 0; c < t->columns; c += LANES) top = max16(load16(s + c), top);
    const f32x16 base = raise_max(t, r, max_of(top));
    for (int32_t c = 0; c < t->columns; c += LANES) {
        const f32x16 p = exp2_16(fma16(load16(s + c), scale2, base));
        sum += p;
        store_p(s, c, p, narrow);
    }
    t->sum[r] = t->sum[r] * t->shrink[r] + sum_of(sum);
}

INLINE void softmax_masked_row(const softmax_tile *t, int32_t r, bool narrow)
{
    float *s = t->s + r * t->lds;
    const int32_t lo = t->lo[r], hi = t->hi[r], first = lo / LANES * LANES, last = (hi + LANES - 1) / LANES * LANES;
    const f32x16 scale2 = splat16(t->scale2), none = splat16(-INFINITY), zero = {0};
    f32x16 top = none, sum = zero;
    for (int32_t c = first; c < last; c += LANES) top = max16(select16(lanes_in(c, lo, hi), load16(s + c), none), top);
    const f32x16 base = raise_max(t, r, max_of(top));
    for (int32_t c = 0; c < first; c += LANES) store_p(s, c, zero, narrow);
    for (int32_t c = first; c < last; c += LANES) {
        const f32x16 p = select16(lanes_in(c, lo, hi), exp2_16(fma16(load16(s + c), scale2, base)), zero);
        sum += p;
        store_p(s, c, p, narrow);
    }
    for (int32_t c = last; c < t->columns; c += LANES) store_p(s, c, zero, narrow);
    t->sum[r] = t->sum[r] * t->shrink[r] + sum_of(sum);
}

INLINE void softmax_rows(const softmax_tile *t, bool narrow)
{
    for (int32_t r = 0; r < t->rows; r++) {
        if (t->lo[r] == 0 && t->hi[r] == t->columns) softmax_whole_row(t, r, narrow);
        else softmax_masked_row(t, r, narrow);
    }
}

static void softmax_f32(const softmax_tile *t)
{
    softmax_rows(t, false);
}

__attribute__((unused)) static void softmax_bf16(const softmax_tile *t)
{
    softmax_rows(t, true);
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
            f32x16 p = exp2_16(fma16(load16(s + c), splat16(t->scale2), -lse2));
            f32x16 ds = p * fma16(load16(dp + c), row_scale, -delta);
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
