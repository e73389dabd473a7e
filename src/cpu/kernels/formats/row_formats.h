/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * row_formats.h - rows in the formats of caches (stages/pool.h). A row is its data, then its scales; in a
 * page of bytes the data of all rows stand before the scales of all.
 */
#ifndef QUERN_CPU_ROW_FORMATS_H
#define QUERN_CPU_ROW_FORMATS_H

#include "cpu/levels.h"
#include "stages/pool.h"

enum { FP4_BLOCK = 32, ROW584_WIDTH = 512, ROW584_DATA = 576, ROW584_SCALES = 8 };

/* Bytes of a row of `width` values; `dtype` counts for ENTRY_ROWS alone. */
int64_t row_bytes(entry_format format, int64_t width, quern_dtype dtype);
/* Of these, the bytes before the scales: all of ENTRY_ROWS. */
int64_t row_data_bytes(entry_format format, int64_t width, quern_dtype dtype);
/* Whether a row can be encoded: all values are finite, or the format takes any. */
bool row_is_encodable(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width);
void encode_row(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width, void *to,
                quern_dtype dtype);

/* Decodes codes, exact in bf16. Returns the positive factor that is still missing. */
float decode_fp8_codes(const cpu_kernels *kernels, const void *data, const void *scales, int64_t width,
                       float *row);
/* A code is multiplied by the ratio of its scale to the row's largest. */
float decode_fp4_codes(const cpu_kernels *kernels, const void *data, const void *scales, int64_t width,
                       float *row);
void decode_row584(const cpu_kernels *kernels, const void *data, const void *scales, float row[ROW584_WIDTH]);

#endif
