/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.h - values of a tensor of any format as f32. */
#ifndef QUERN_INSPECT_DECODE_H
#define QUERN_INSPECT_DECODE_H

#include "inspect/statistics.h"

/* Values that decode() hands out at once, at most. */
enum { DECODE_VALUES = 8192 };

/* A source as rows of `columns` values; a matrix of several rows, or stacks of such. */
typedef struct decoder {
    const statistics_source *source;
    int64_t rows, columns; /* 0 rows: its values cannot be read */
    int64_t values;        /* rows * columns */
    int64_t matrix_rows;   /* rows that share a global, where there are several */
    int64_t block;         /* FP8: rows and columns of a scale */
    float e4m3[256];       /* what a byte is worth */
} decoder;

/* False where the tensor's values cannot be read: a format without one, or scales that do not fit. */
bool decoder_begin(const statistics_source *source, decoder *d);
/* `count` values from the first one on: where a row has blocks, whole blocks. Counts blocks and bad scales
 * into `s`. A scale that is no number gives NaN. */
void decode(const decoder *d, int64_t first, int64_t count, float *values, statistics *s);

#endif
