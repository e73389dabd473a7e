/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.h - rows of views with any leading dimensions, and their division into pieces of work. */
#ifndef QUERN_CPU_QUANTISE_ROWS_OF_VIEWS_H
#define QUERN_CPU_QUANTISE_ROWS_OF_VIEWS_H

#include "core/half.h"

#include <quern/quern.h>

/* Values of a piece of work, a multiple of every level's group of blocks. At least as many as outweigh the
 * cost of a task, and otherwise a 64th of the tensor, so that threads share it. Pieces that threads take in
 * turns should be long: with 32 KB the prefetchers of one thread fetch what the other reads, and two threads
 * take as long as one. */
enum { LEAST_PIECE = 1 << 14, MOST_PIECE = 1 << 18, SHARES = 64 };

static inline int64_t piece_values(int64_t rows, int64_t columns)
{
    const int64_t share = rows * columns / SHARES / LEAST_PIECE * LEAST_PIECE;
    return share < LEAST_PIECE ? LEAST_PIECE : share < MOST_PIECE ? share : MOST_PIECE;
}

/* Rows of a view: all its elements by the last dimension. */
static inline int64_t view_rows(const quern_tensor *t)
{
    int64_t rows = 1;
    for (int32_t i = 0; i + 1 < t->ndim; i++) rows *= t->shape[i];
    return rows;
}

static inline int64_t view_columns(const quern_tensor *t)
{
    return t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
}

/* The first element of a row. */
static inline void *view_row(const quern_tensor *t, int64_t row)
{
    int64_t at = 0;
    for (int32_t i = t->ndim - 2; i >= 0; i--) {
        at += row % t->shape[i] * t->strides[i];
        row /= t->shape[i];
    }
    return (char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
}

/* The address of an element of a row. */
static inline void *view_at(const quern_tensor *t, int64_t row, int64_t column)
{
    return (char *)view_row(t, row) + column * (int64_t)quern_dtype_size(t->dtype);
}

static inline float element_of(const void *row, quern_dtype dtype, int64_t column)
{
    if (dtype == QUERN_F32) return ((const float *)row)[column];
    const uint16_t half = ((const uint16_t *)row)[column];
    return dtype == QUERN_BF16 ? float_from_bf16(half) : float_from_f16(half);
}

/* The division of `rows` rows of `columns` values: a piece is some whole rows, or part of one. */
typedef struct row_cut {
    int64_t rows, columns;
    int64_t rows_a_piece, columns_a_piece, pieces_a_row, pieces;
} row_cut;

/* Rows without columns make no piece, however many there are. */
static inline row_cut cut_rows(int64_t rows, int64_t columns)
{
    if (columns == 0) return (row_cut){.rows_a_piece = 1, .columns_a_piece = 1};
    const int64_t piece = piece_values(rows, columns);
    row_cut cut = {.rows = rows,
                   .columns = columns,
                   .rows_a_piece = 1,
                   .columns_a_piece = piece,
                   .pieces_a_row = (columns + piece - 1) / piece};
    if (columns < piece) cut.rows_a_piece = piece / columns;
    cut.pieces = (rows + cut.rows_a_piece - 1) / cut.rows_a_piece * cut.pieces_a_row;
    return cut;
}

/* The first `rows` rows alone, in pieces of the same size. */
static inline row_cut cut_first_rows(row_cut cut, int64_t rows)
{
    cut.rows = rows;
    cut.pieces = (rows + cut.rows_a_piece - 1) / cut.rows_a_piece * cut.pieces_a_row;
    return cut;
}

typedef struct row_piece {
    int64_t first, end, column, columns; /* rows; first column and how many */
} row_piece;

static inline row_piece piece_at(const row_cut *cut, int64_t index)
{
    row_piece p = {.first = index / cut->pieces_a_row * cut->rows_a_piece,
                   .column = index % cut->pieces_a_row * cut->columns_a_piece};
    p.end = p.first + cut->rows_a_piece < cut->rows ? p.first + cut->rows_a_piece : cut->rows;
    p.columns =
        cut->columns - p.column < cut->columns_a_piece ? cut->columns - p.column : cut->columns_a_piece;
    return p;
}

/* The expert of a row: the first whose end is past it. */
static inline int64_t expert_of_row(const quern_tensor *offsets, int64_t row)
{
    const int32_t *end = offsets->data;
    int64_t low = 0, high = offsets->shape[0];
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (end[middle] > row) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Rows that belong to an expert: all without offsets. */
static inline int64_t rows_with_expert(const quern_tensor *offsets, int64_t rows)
{
    if (offsets->ndim == 0) return rows;
    const int64_t experts = offsets->shape[0];
    return experts > 0 ? ((const int32_t *)offsets->data)[experts - 1] : 0;
}

#endif
