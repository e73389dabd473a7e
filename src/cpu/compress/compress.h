/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.h - what the compress stage and its backward share: weights as the B of products, tiles of
 * gathered tokens as their A.
 *
 * The weights of a head are l matrices of D rows, one a position (mean: one). A step is a group of
 * neighbouring positions, about STEP_WIDTH rows: the depth of a forward product, the columns of a backward
 * one. A gathered tile of a step holds the group's tokens side by side, entry by entry, so that memory is
 * read in order: with position by position the reads are d tokens apart, and rows of one position fall into
 * the same few sets of the caches.
 */
#ifndef QUERN_CPU_COMPRESS_H
#define QUERN_CPU_COMPRESS_H

#include "core/arena.h"
#include "cpu/gemm.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/rows_at.h"

enum {
    COMPRESS_ENTRIES = 256,
    STEP_WIDTH = 512
}; /* entries of a product's tile; its width: 512 KiB in f32 */

typedef struct compress_matrix {
    const void *data;  /* NULL: no weights */
    void *copy;        /* not NULL where pack_matrix() has to fill it */
    quern_dtype dtype; /* f32, or bf16: words of two rows */
    bool transposed;
    int64_t dim, columns;     /* rows of a position, columns of W */
    int64_t run, group;       /* positions of a run (runs start new steps), of a full step */
    int64_t steps, run_steps; /* of a head, of a run */
    int64_t head_stride, step_stride, ld, panel_stride; /* of 4 bytes */
    gemm product; /* over full steps; its A and C stand as the caller said */
} compress_matrix;

/* Positions of a step, of which a run has `run`. */
static inline int64_t step_group(int64_t run, int64_t dim, int64_t width)
{
    const int64_t most = width / dim > 0 ? width / dim : 1;
    return run < most ? run : most;
}

/* Carves a copy where w cannot be used as it stands, and plans products of `rows` rows. Positions of w come
 * in runs of `run`. Forward: [rows][group D] x [group D][columns]. Transposed: [rows][lda >= columns] x
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

/* Its first position. */
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

/* The mean of entry i's tokens for head h ... as many heads as `joined`, into out. */
void mean_of_entry(const nsa_kernels *k, const compress_args *args, const quern_tensor *x,
                   const sequence_rows *seq, int64_t i, int64_t h, int64_t joined, float *out);

/* A tile: for `count` entries i from `first` the rows x[i d + p] + pe[p], p0 <= p < p0 + positions, side by
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
