/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* row_formats.h - rows of caches (stages/row_formats.h): where they stand, to bytes and back. */
#ifndef QUERN_CPU_ROW_FORMATS_H
#define QUERN_CPU_ROW_FORMATS_H

#include "cpu/levels.h"
#include "cpu/rows_at.h"
#include "stages/row_formats.h"

/* Bytes of a row: its data, then its scales. */
typedef struct row_size {
    int64_t data, scales;
} row_size;

static inline row_size row_size_of(entry_format format, int64_t width, quern_dtype dtype)
{
    return (row_size){row_data_bytes(format, width, dtype), row_scale_bytes(format, width)};
}

/* The layout of consecutive rows. A row's scales follow its data or, in a page of bytes, the data of all. */
typedef struct row_place {
    const char *data, *scales;
    int64_t step, scale_step; /* bytes from row to row */
    int64_t rows;             /* rows with this layout, from this one on */
} row_place;

/* Row `row` of sequence b: in t, or in the pages that a table, where present, names. */
static inline row_place row_place_of(const quern_tensor *t, const quern_tensor *table, int64_t page,
                                     row_size of, int64_t b, int64_t row)
{
    const int64_t size = (int64_t)quern_dtype_size(t->dtype), step = t->strides[1] * size;
    if (!is_present(table)) {
        const char *data = (const char *)t->data + b * t->strides[0] * size + row * step;
        return (row_place){data, data + of.data, step, step, INT64_MAX};
    }
    const int64_t slot = row % page,
                  number = ((const int32_t *)table->data)[b * table->strides[0] + row / page];
    const char *base = (const char *)t->data + number * t->strides[0] * size;
    if (t->ndim == 3) {
        const char *data = base + slot * step;
        return (row_place){data, data + of.data, step, step, page - slot};
    }
    return (row_place){base + slot * of.data, base + page * of.data + slot * of.scales, of.data, of.scales,
                       page - slot};
}

/* Whether a row can be encoded: all values are finite, or the format takes any. */
bool row_is_encodable(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width);
/* `dtype` counts for rows alone. */
void encode_row(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width, void *to,
                quern_dtype dtype);
/* Decodes a row of bytes, exact in bf16. Returns the positive factor that is still missing: the scale of all
 * codes, of e2m1 the largest of a row's scales. */
float decode_row(const cpu_kernels *kernels, entry_format format, const void *data, const void *scales,
                 int64_t width, float *row);

#endif
