/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * indexer_kernels.h - the tile kernels of the indexer. They get pointers and sizes; they never validate,
 * allocate or start threads.
 */
#ifndef QUERN_CPU_INDEXER_KERNELS_H
#define QUERN_CPU_INDEXER_KERNELS_H

#include <quern/quern.h>

/* One query against a panel of keys. Words are floats, or pairs of bf16 values. */
typedef struct indexer_tile {
    const void *q; /* [heads][words] */
    const float *w;
    int64_t heads, words;
    const void *keys;  /* [words][panel] */
    float *sum;        /* [panel], out: sum over h in order of w[h] max(0, q[h] . key) */
    const char *ahead; /* prefetched into L2 between groups of heads */
    int64_t ahead_bytes;
} indexer_tile;

/* Scores that may be among the best, in the order of their entries. */
typedef struct indexer_best {
    int32_t *rank, *index; /* a score as an integer of the same order: NaN below -inf, both zeros alike */
    int64_t n;
    int32_t least; /* scores of this rank or below are not taken */
} indexer_best;
enum { RANK_NAN = INT32_MIN + 1 };

typedef struct indexer_kernels {
    quern_cpu_level level;
    int32_t panel; /* columns of a panel, a multiple of 16 */
    void (*score_f32)(const indexer_tile *t);
    void (*score_bf16)(const indexer_tile *t); /* NULL where the level has no bf16 dot product */
    /* x[i] = x[i] * scale + 0, or x[i] * key_scale[i] * scale + 0. */
    void (*scale_scores)(float *x, const float *key_scale, float scale, int64_t n);
    /* sum[i] = scale * the sum over h in order of w[h] max(0, z[h][i]), i < n. NaN stays. */
    void (*relu_sum)(const float *z, int64_t ldz, int64_t heads, const float *w, float scale, int64_t n,
                     float *sum);
    /* The gradient of that, d that of the sums: d_w[h] += scale * the sum of d[i] max(0, z[h][i]), and
     * z[h][i] becomes scale w[h] d[i], 0 where z[h][i] <= 0. */
    void (*relu_backward)(float *z, int64_t ldz, int64_t heads, const float *w, float scale, const float *d,
                          int64_t n, float *d_w);
    /* Appends entries first ... first + n - 1; there is room for n. */
    void (*collect)(const float *score, int64_t n, int32_t first, indexer_best *best);
    /* Drops all but the k >= 1 best, which keep their order; of equal ones the first stay. From then on
     * scores that cannot be among them are not taken. */
    void (*cut)(indexer_best *best, int64_t k);
} indexer_kernels;

#endif
