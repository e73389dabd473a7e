/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.h - what the compress stage and its backward share: weights as the B of products, tiles of
 * gathered tokens as their A.
 *
 * The weights of a head are l matrices of D rows, one for each position (mean: one). A step is a group of
 * neighbouring positions, about STEP_WIDTH rows: the depth of a forward product, the columns of a backward
 * one. A gathered tile of a step holds the group's tokens side by side, entry by entry, so that memory is
 * read in order. Position by position, reads would be d tokens apart and fall into the same few sets of the
 * caches.
 */
#ifndef QUERN_CPU_COMPRESS_H
#define QUERN_CPU_COMPRESS_H

#include "core/arena.h"
#include "cpu/gemm.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/rows_at.h"

/* Entries of a product's tile, and its width: 512 KiB in f32. */
enum { COMPRESS_ENTRIES = 256, STEP_WIDTH = 512 };

typedef struct compress_matrix {
    const void *data;  /* NULL: no weights */
    void *copy;        /* panels for pack_matrix() to fill; NULL: w is read in place */
    quern_dtype dtype; /* f32, or bf16: words of two rows */
    bool transposed;
    int64_t dim, columns;     /* rows of a position, columns of W */
    int64_t run, group;       /* positions of a run (runs start new steps) and of a full step */
    int64_t steps, run_steps; /* steps of a head and of a run */
    int64_t head_stride, step_stride, ld, panel_stride; /* in units of 4 bytes */
    gemm product; /* over full steps; the caller chose the strides of A and C */
} compress_matrix;

/* Positions of a full step where a run has `run`. */
static inline int64_t step_group(int64_t run, int64_t dim, int64_t width)
{
    const int64_t most = width / dim > 0 ? width / dim : 1;
    return run < most ? run : most;
}

/* Plans products of `rows` rows, and carves a copy if w cannot be read in place. Positions of w come in runs
 * of `run`. Forward: [rows][group D] x [group D][columns]. Transposed: [rows][lda >= columns] x
 * [columns][group D]. ldc 0: rows of C are as long as a full step's. */
compress_matrix carve_matrix(const stage_exec *exec, const quern_tensor *w, quern_dtype dtype,
                             int64_t positions, int64_t run, bool transposed, int64_t rows, int64_t lda,
                             int64_t ldc, arena *a);
void pack_matrix(const stage_exec *exec, const compress_matrix *m, const quern_tensor *w);

/* Positions of a step. */
static inline int64_t step_positions(const compress_matrix *m, int64_t step)
{
    const int64_t left = m->run - step % m->run_steps * m->group;
    return left < m->group ? left : m->group;
}

/* The first position of a step. */
static inline int64_t step_first(const compress_matrix *m, int64_t step)
{
    return step / m->run_steps * m->run + step % m->run_steps * m->group;
}

/* c (+)= a times a step's matrix, for `rows` rows of a. */
void multiply_step(const compress_matrix *m, int64_t h, int64_t step, int64_t rows, const void *a, float *c,
                   bool accumulate, void *scratch);

/* Entries of a sequence of n tokens. */
static inline int64_t entries_of(const compress_args *args, int64_t n)
{
    return mask_entries(n, args->block_size, args->stride);
}

/* Writes the mean of entry i's tokens for heads h ... h + joined - 1 to out. */
void mean_of_entry(const nsa_kernels *k, const compress_args *args, const quern_tensor *x,
                   const sequence_rows *seq, int64_t i, int64_t h, int64_t joined, float *out);

/* A tile: the rows x[i d + p] + pe[p] of `count` entries i from `first`, p0 <= p < p0 + positions, side by
 * side in rows of ld elements. f32, or bf16 (x bf16, no pe). shift: room for positions x D floats. */
typedef struct tile_source {
    const compress_args *args;
    const attention_kernels *pack;
    const nsa_kernels *kernels;
    const quern_tensor *x, *pe; /* pe may be absent */
    quern_dtype dtype;
} tile_source;
void gather_tile(const tile_source *s, const sequence_rows *seq, int64_t h, int64_t first, int64_t count,
                 int64_t p0, int64_t positions, void *out, int64_t ld, float *shift);

#endif
