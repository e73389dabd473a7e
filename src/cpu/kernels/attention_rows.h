/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_rows.h - the row kernels of the attention table (packing, softmax), written once over the
 * level's vectors and compiled by each level's file under its own flags.
 *
 * At D = 128 the products of the forward pass do 512 operations per score, these kernels about 12. Measured
 * per 16 scores: 1.3 ns for exp2 alone, 1.7 with the maximum; 4 to 6% of an f32 tile's time and 8 to 10% of a
 * bf16 tile's.
 */
#ifndef QUERN_CPU_ATTENTION_ROWS_H
#define QUERN_CPU_ATTENTION_ROWS_H

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector_dtype.h"

INLINE const void *source_row(const row_source *s, int64_t row)
{
    const int64_t at = row * s->stride;
    return s->dtype == QUERN_F32 ? (const void *)((const float *)s->data + at)
                                 : (const void *)((const uint16_t *)s->data + at);
}

enum { ROWS_AHEAD = 12 };

/* Prefetches row `row`. Where all heads of a token are neighbours, a head's rows lie pages apart, and the
 * hardware's prefetchers do not follow. Into L2, because rows 4096 bytes apart share sets of L1, which holds
 * no 12. */
INLINE void prefetch_row(const row_source *s, int64_t row)
{
    if (row >= s->rows) return;
    const char *p = source_row(s, row);
    const int64_t bytes = s->dim * (s->dtype == QUERN_F32 ? 4 : 2);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

/* n elements of a source row as f32. The element pointer needs no alignment beyond its own. (A row is too
 * short for a call of memcpy().) */
INLINE void widen_row(const void *src, quern_dtype dtype, float *dst, int64_t n)
{
#define CALL(t)                                                                                              \
    for (int64_t c = 0; c < n; c += LANES) store_some(dst, QUERN_F32, c, n, load_some(src, t, c, n))
    BY_DTYPE(dtype, CALL);
#undef CALL
}

static void pack_rows_f32(const row_source *src, float scale, float *dst, int64_t ldd)
{
    for (int64_t r = 0; r < src->rows; r++) {
        float *d = dst + r * ldd;
        prefetch_row(src, r + ROWS_AHEAD);
        widen_row(source_row(src, r), src->dtype, d, src->dim);
        for (int64_t c = 0; c < src->dim; c++) d[c] *= scale;
        for (int64_t c = src->dim; c < ldd; c++) d[c] = 0.0f;
    }
}

static void pack_rows_bf16(const row_source *src, uint16_t *dst, int64_t ldd)
{
    for (int64_t r = 0; r < src->rows; r++) {
        prefetch_row(src, r + ROWS_AHEAD);
        memcpy(dst + r * ldd, source_row(src, r), (size_t)src->dim * sizeof *dst);
        memset(dst + r * ldd + src->dim, 0, (size_t)(ldd - src->dim) * sizeof *dst);
    }
}

/* Columns c0 ... c0 + LANES - 1 of a panel from LANES rows of `words` 32-bit words, reading and writing in
 * order. Whole vectors of a row can be read. `apart`: the rows share sets of L1, which hold fewer lines, so
 * each line is read once; else parts of vectors are read, which takes fewer shuffles. */
INLINE void pack_columns(const float *const rows[LANES], const bool apart, int64_t words, int32_t panel,
                         float *dst)
{
    vfloat v[LANES];
    int64_t d = 0;
    for (; d + LANES <= words; d += LANES) {
        if (apart) {
            for (int i = 0; i < LANES; i++) v[i] = v_load(rows[i] + d);
            v_transpose(v);
        } else v_load_transposed(rows, d, v);
        for (int j = 0; j < LANES; j++) v_store(dst + (d + j) * panel, v[j]);
    }
    if (d == words) return;
    v_load_transposed(rows, d, v);
    for (int64_t j = 0; j < words - d; j++) v_store(dst + (d + j) * panel, v[j]);
}

/* Floats from copied row to copied row: an odd number of whole lines, so that 16 rows spread over L1. */
enum { COPY_PITCH = MAX_DIM + 16 };

static void pack_keys_f32(const row_source *src, int32_t panel, float *dst)
{
    float copies[LANES][COPY_PITCH] __attribute__((aligned(64)));
    const float *rows[LANES];
    /* Read in place; but 16 lines a multiple of 4096 bytes apart share a set of L1, which holds fewer. */
    const bool stands = src->dtype == QUERN_F32 && src->dim % LANES == 0 && src->stride % 1024 != 0;
    for (int32_t c0 = 0; c0 < panel; c0 += LANES) {
        for (int32_t i = 0; i < LANES; i++) {
            prefetch_row(src, c0 + i + ROWS_AHEAD);
            rows[i] = c0 + i < src->rows && stands ? source_row(src, c0 + i) : copies[i];
            if (c0 + i >= src->rows) memset(copies[i], 0, (size_t)src->dim * sizeof(float));
            else if (!stands) widen_row(source_row(src, c0 + i), src->dtype, copies[i], src->dim);
        }
        pack_columns(rows, false, src->dim, panel, dst + c0);
    }
}

static void pack_keys_bf16(const row_source *src, int32_t panel, uint32_t *dst)
{
    float copies[LANES][MAX_DIM]; /* of words: pairs along D */
    const float *rows[LANES];
    const bool stands = src->dim / 2 % LANES == 0; /* rows of whole vectors are read in place */
    const bool apart = stands && src->stride % 2048 == 0;
    for (int32_t c0 = 0; c0 < panel; c0 += LANES) {
        for (int32_t i = 0; i < LANES; i++) {
            prefetch_row(src, c0 + i + ROWS_AHEAD);
            rows[i] = c0 + i < src->rows && stands ? source_row(src, c0 + i) : copies[i];
            if (c0 + i >= src->rows) memset(copies[i], 0, (size_t)src->dim * 2);
            else if (!stands) memcpy(copies[i], source_row(src, c0 + i), (size_t)src->dim * 2);
        }
        if (apart) pack_columns(rows, true, src->dim / 2, panel, (float *)dst + c0);
        else pack_columns(rows, false, src->dim / 2, panel, (float *)dst + c0);
    }
}

static void pack_values_f32(const row_source *src, int32_t panel, float *dst, int64_t panel_stride)
{
    const int64_t element = src->dtype == QUERN_F32 ? 4 : 2, padded = (src->dim + panel - 1) / panel * panel;
    for (int64_t r = 0; r < src->rows; r++) {
        const char *row = source_row(src, r);
        prefetch_row(src, r + ROWS_AHEAD);
        for (int64_t c = 0; c < padded; c += panel) {
            float *d = dst + c / panel * panel_stride + r * panel;
            const int64_t n = src->dim - c < panel ? src->dim - c : panel;
            widen_row(row + c * element, src->dtype, d, n);
            for (int64_t i = n; i < panel; i++) d[i] = 0.0f;
        }
    }
}

static void pack_values_bf16(const row_source *src, int32_t panel, uint32_t *dst, int64_t panel_stride)
{
    const uint16_t zero[MAX_DIM] = {0};
    const int64_t padded = (src->dim + panel - 1) / panel * panel;
    for (int64_t r = 0; r < src->rows; r += 2) {
        prefetch_row(src, r + ROWS_AHEAD);
        prefetch_row(src, r + ROWS_AHEAD + 1);
        const uint16_t *even = source_row(src, r), *odd = r + 1 < src->rows ? source_row(src, r + 1) : zero;
        for (int64_t c0 = 0; c0 < padded; c0 += panel) {
            uint32_t *d = dst + c0 / panel * panel_stride + r / 2 * panel;
            const int64_t n = src->dim - c0 < panel ? src->dim - c0 : panel;
            for (int64_t c = 0; c < n; c++) d[c] = even[c0 + c] | (uint32_t)odd[c0 + c] << 16;
            for (int64_t c = n; c < panel; c++) d[c] = 0;
        }
    }
}

INLINE void store_p(float *s, int32_t c, vfloat p, bool narrow)
{
    if (narrow) {
        const vhalf h = v_narrow(p);
        memcpy((uint16_t *)s + c, &h, sizeof h);
    } else {
        v_store(s + c, p);
    }
}

/* A vector, one of whose lanes is the row's maximum. */
INLINE vfloat max_of_row(const float *s, int32_t lo, int32_t hi, bool whole)
{
    vfloat top = v_splat(-INFINITY);
    if (whole) {
        vfloat odd = top; /* two chains, because a maximum takes longer than a load */
        int32_t c = 0;
        for (; c + LANES < hi; c += 2 * LANES) {
            top = v_max(v_load(s + c), top);
            odd = v_max(v_load(s + c + LANES), odd);
        }
        if (c < hi) top = v_max(v_load(s + c), top);
        top = v_max(odd, top);
    } else
        for (int32_t c = lo / LANES * LANES; c < hi; c += LANES)
            top = v_max(v_select(lanes_in(c, lo, hi), v_load(s + c), v_splat(-INFINITY)), top);
    return top;
}

/* s = 2^((s - max) scale2) over the row's columns; returns a vector whose lanes add up to the sum. The
 * difference comes first: large scores close to the maximum lose nothing in it. */
INLINE vfloat exp2_of_row(float *s, int32_t lo, int32_t hi, int32_t columns, vfloat scale2, vfloat max,
                          bool whole, bool narrow)
{
    vfloat sum = {0};
    if (whole) {
#pragma GCC unroll 4
        for (int32_t c = 0; c < columns; c += LANES) {
            const vfloat p = v_exp2((v_load(s + c) - max) * scale2);
            sum += p;
            store_p(s, c, p, narrow);
        }
        return sum;
    }
    const int32_t first = lo / LANES * LANES, last = (hi + LANES - 1) / LANES * LANES;
    for (int32_t c = 0; c < first; c += LANES) store_p(s, c, (vfloat){0}, narrow);
    for (int32_t c = first; c < last; c += LANES) {
        const vfloat p = v_select(lanes_in(c, lo, hi), v_exp2((v_load(s + c) - max) * scale2), (vfloat){0});
        sum += p;
        store_p(s, c, p, narrow);
    }
    for (int32_t c = last; c < columns; c += LANES) store_p(s, c, (vfloat){0}, narrow);
    return sum;
}

/* `n` rows from r0 on, at most `most`: their maxima, then the running maxima and sums with a row per lane,
 * then the exponentials. */
INLINE void softmax_some(const softmax_tile *t, int32_t r0, int32_t n, int most, bool narrow)
{
    const vfloat scale2 = v_splat(t->scale2);
    vfloat lanes[LANES];
    float max[LANES];
    for (int32_t i = 0; i < n; i++) {
        const int32_t lo = t->lo[r0 + i], hi = t->hi[r0 + i];
        const float *s = t->s + (r0 + i) * t->lds;
        lanes[i] = lo == 0 && hi == t->columns ? max_of_row(s, lo, hi, true) : max_of_row(s, lo, hi, false);
    }
    for (int32_t i = n; i < most; i++) lanes[i] = v_splat(-INFINITY);
    const vfloat before = v_load_first(t->max + r0, n, v_splat(-INFINITY)),
                 after = v_max(lane_maxima(lanes, most), before);
    const vfloat fall = v_select(after > before, v_exp2((before - after) * scale2), v_splat(1.0f));
    v_store(max, v_select(after == -INFINITY, (vfloat){0}, after));
    v_store_first(t->max + r0, n, after);
    v_store_first(t->shrink + r0, n, fall);
    for (int32_t i = 0; i < n; i++) {
        const int32_t lo = t->lo[r0 + i], hi = t->hi[r0 + i];
        float *s = t->s + (r0 + i) * t->lds;
        lanes[i] = lo == 0 && hi == t->columns
                       ? exp2_of_row(s, lo, hi, t->columns, scale2, v_splat(max[i]), true, narrow)
                       : exp2_of_row(s, lo, hi, t->columns, scale2, v_splat(max[i]), false, narrow);
    }
    for (int32_t i = n; i < most; i++) lanes[i] = (vfloat){0};
    v_store_first(t->sum + r0, n, v_load_first(t->sum + r0, n, (vfloat){0}) * fall + lane_sums(lanes, most));
}

/* Decoding has few rows: a key/value head's group. */
INLINE void softmax_rows(const softmax_tile *t, bool narrow)
{
    enum { FEW = 4 };
    _Static_assert((int)FEW <= (int)LANES, "as many vectors as rows");
    for (int32_t r0 = 0; r0 < t->rows; r0 += LANES) {
        const int32_t n = t->rows - r0 < LANES ? t->rows - r0 : LANES;
        if (n <= FEW) softmax_some(t, r0, n, FEW, narrow);
        else softmax_some(t, r0, n, LANES, narrow);
    }
}

static void softmax_f32(const softmax_tile *t)
{
    softmax_rows(t, false);
}

static void softmax_bf16(const softmax_tile *t)
{
    softmax_rows(t, true);
}

static void scale_row(float *o, float shrink, int64_t n)
{
    for (int64_t i = 0; i < n; i++) o[i] = o[i] * shrink + 0.0f;
}

static void scale_add_row(float *o, float shrink, const float *t, int64_t n)
{
    for (int64_t i = 0; i < n; i++) o[i] = o[i] * shrink + t[i];
}

/* The entries that every level's table has; bf16 ones only where the level has the dot product. */
#define ATTENTION_ROW_KERNELS                                                                                \
    .pack_rows_f32 = pack_rows_f32, .pack_keys_f32 = pack_keys_f32, .pack_values_f32 = pack_values_f32,      \
    .softmax_f32 = softmax_f32, .scale_row = scale_row, .scale_add_row = scale_add_row
#define ATTENTION_ROW_KERNELS_BF16                                                                           \
    .pack_rows_bf16 = pack_rows_bf16, .pack_keys_bf16 = pack_keys_bf16,                                      \
    .pack_values_bf16 = pack_values_bf16, .softmax_bf16 = softmax_bf16

#endif
