/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compress.h - what the compress stage and its backward share: weights as f32 matrices for the micro-kernel. */
#ifndef QUERN_CPU_COMPRESS_H
#define QUERN_CPU_COMPRESS_H

#include "core/arena.h"
#include "cpu/nsa_kernels.h"
#include "cpu/rows_at.h"

enum { COMPRESS_ENTRIES = 96 }; /* entries of a product's tile */

/* Matrices [heads][steps][rows][ld] in f32, the B of a product: w itself where it is laid out so, or a copy. A
 * step is the D rows of one position of a block (linear), or all of them (mean). */
typedef struct compress_matrix {
    const float *data;
    float *copy; /* not NULL where pack_matrix() has to fill it */
    int64_t head_stride, step_stride, ld, width; /* width: columns rounded up to 16 */
} compress_matrix;

/* Carves a copy if w cannot be used as it is. `transposed`: rows and columns of every step change places. */
compress_matrix carve_matrix(const quern_tensor *w, int64_t steps, bool transposed, arena *a);
void pack_matrix(const quern_exec *exec, const compress_matrix *m, const quern_tensor *w, int64_t steps, bool transposed);

/* c[m][width] (+)= a b over column panels of the micro-kernel. */
void multiply(const attention_kernels *k, int64_t m, int64_t width, int64_t depth, const float *a, int64_t a_row, int64_t a_k, const float *b,
              int64_t ldb, float *c, int64_t ldc, bool accumulate);

/* Entries of a sequence of n tokens. */
static inline int64_t entries_of(const compress_args *args, int64_t n)
{
    return n < args->block_size ? 0 : (n - args->block_size) / args->stride + 1;
}

/* The mean of entry i's tokens for head h ... as many heads as `joined`, into out. */
void mean_of_entry(const nsa_kernels *k, const compress_args *args, const quern_tensor *x, const sequence_rows *seq, int64_t i, int64_t h,
                   int64_t joined, float *out);
/* Rows (x[i d + p] + pe[p]) of `count` entries from `first`, head h: [count][dim] f32. */
void gather_position(const nsa_kernels *k, const compress_args *args, const quern_tensor *x, const quern_tensor *pe, const sequence_rows *seq,
                     int64_t first, int64_t count, int64_t p, int64_t h, float *out);

#endif
