/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool.h - what the pooling stages share: sequences, biases in f32, and the steps from a pooled row to a
 * stored entry and back. */
#ifndef QUERN_CPU_POOL_H
#define QUERN_CPU_POOL_H

#include "core/arena.h"
#include "cpu/kernels/formats/row_formats.h"
#include "cpu/kernels/rows/f32_rows.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/pool/pool_kernels.h"
#include "cpu/rows_at.h"
#include "stages/pool.h"

/* How pooled rows become entries. */
typedef struct entry_plan {
    const entry_args *args;
    const cpu_kernels *kernels;
    int64_t width, ratio;
    f32_rows norm;
} entry_plan;

entry_plan carve_entry(const entry_args *args, const cpu_kernels *kernels, int64_t width, int64_t ratio,
                       arena *a);
/* Turns a pooled row into the entry whose first token has `position`; angles: room for the row's width. */
void finish_entry(const entry_plan *p, float *row, int64_t position, float *angles);
/* From d, the gradient of an entry: d becomes that of `pooled`; d_norm may be NULL. scratch: room for two
 * rows. */
void entry_backward(const entry_plan *p, const float *pooled, int64_t position, float *d, float *d_norm,
                    float *scratch);

/* Stores a row in slot `slot` of pages, counted over all of them: pages [.., page, width] in rows, or
 * [.., bytes] with the data of all slots before the scales of all. bytes: room for a stored row where
 * they are of that kind, else NULL. */
void store_in_page(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width,
                   const quern_tensor *pages, int64_t page, int64_t slot, char *bytes);

/* A sequence of a call: its rows in proj, its entries in out. */
typedef struct pool_sequence {
    int64_t view_b, row0, rows; /* of the whole sequence */
    int64_t token0, blocks;     /* the first block's first row; those computed */
    int64_t entry0, entries;    /* rows that belong to the sequence */
    int64_t position;           /* of the first block's first token */
    const void *prev;           /* [ratio, 2 width], or NULL */
    int64_t prev_stride;
} pool_sequence;

/* What a varlen batch says of its sequences; reports the first that is wrong. */
quern_status pool_check(const stage_exec *exec, const pool_args *args);
pool_sequence pool_sequence_at(const pool_args *args, int64_t b);
/* Writes cu_entries, if the call has it. */
void pool_write_offsets(const pool_args *args);
/* Row n of a [B, rows, columns] view. */
static inline char *pool_row(const quern_tensor *t, int64_t b, int64_t n)
{
    return (char *)t->data + (b * t->strides[0] + n * t->strides[1]) * (int64_t)quern_dtype_size(t->dtype);
}

/* Columns of a token's projection. */
static inline int64_t pool_columns(const pool_args *args)
{
    return (args->overlap ? 4 : 2) * args->width;
}

/* Accumulators in a row of 3 width floats. */
static inline pool_sums sums_at(float *data, int64_t width)
{
    return (pool_sums){data, data + width, data + 2 * width};
}

void clear_sums(const pool_sums *sums, int64_t width);

/* Rows [j, j + rows) of a series: 0 is a, 1 is b. `first` is the projection of the block's first token. */
pool_rows series_rows(const void *first, quern_dtype dtype, int64_t stride, int64_t width, int series,
                      const f32_rows *bias, int64_t j, int64_t rows);

/* The distance in bytes of prefetches ahead of the merged rows: 8 rows. (Past the tensor's end a prefetch
 * does nothing.) The hardware's prefetcher follows a row, but not to the next block's. */
static inline int64_t pool_ahead(const pool_args *args)
{
    enum { ROWS = 8 };
    return ROWS * args->proj.strides[1] * (int64_t)quern_dtype_size(args->proj.dtype);
}

/* Merges the first `rows` rows of a block, a few at a time, so that memory is read row by row. */
void merge_block(const cpu_kernels *kernels, const pool_rows *rows, int64_t width, const pool_sums *sums);

/* The stages for args that have proj and no byte format. */
size_t pool_forward_workspace(const stage_exec *exec, const pool_args *args);
void pool_forward(const stage_exec *exec, const pool_args *args, void *workspace);
size_t pool_backward_workspace(const stage_exec *exec, const pool_args *args);
void pool_backward(const stage_exec *exec, const pool_args *args, void *workspace);

#endif
