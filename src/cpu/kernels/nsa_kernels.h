/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_kernels.h - the row kernels of NSA's own stages (compress, select, gate, convert): one table per CPU
 * level. They get pointers and sizes; they never validate, allocate or start threads. n is any number >= 0;
 * all sums have a fixed order.
 */
#ifndef QUERN_CPU_NSA_KERNELS_H
#define QUERN_CPU_NSA_KERNELS_H

#include "cpu/kernels/attention_kernels.h"

/* Rows of tokens and heads. The row of (token, head) begins token * g.token + head * g.head elements after
 * data. NULL: absent. */
typedef struct row_grid {
    void *data;
    int64_t token, head;
} row_grid;

/* w_gate: row b of head h begins at h * step + b * ld elements; f32 or the activations' dtype. */
typedef struct gate_weights {
    const void *data;
    quern_dtype dtype;
    int64_t step, ld;
} gate_weights;

/* Makes the gates of some tokens (f32, three a row) and combines the branches' rows. There are few enough
 * tokens that a cache keeps the gates. `stream`: non-temporal stores write out, whose rows fill whole lines
 * of 64 bytes. */
typedef struct gate_block {
    quern_dtype dtype;
    int64_t tokens, heads, dim, dim_v;
    row_grid q, o[3]; /* an absent branch counts as 0 */
    gate_weights w;   /* data NULL: the gates are given */
    row_grid gates;
    row_grid out; /* absent: gates only */
    bool stream, prefetch_l2;
} gate_block;

/* The gate's backward, stage_gate_backward.c. All outputs may be absent. */
typedef struct gate_backward_block {
    quern_dtype dtype, d_q_dtype;
    int64_t tokens, heads, dim, dim_v;
    row_grid d_o, o[3], gates; /* absent gates: 1/3 each */
    row_grid d_o_b[3], delta[3], d_gates;
    row_grid d_q; /* needs w */
    gate_weights w;
    float *dl;                  /* [tokens][heads][3] */
    bool accumulate, stream[4]; /* d_o_b, d_q */
    bool prefetch_l2;
} gate_backward_block;

typedef struct nsa_kernels {
    quern_cpu_level level;
    const row_kernels *rows;
    /* out[0 .. dim) = sum of the source's rows. */
    void (*sum_rows)(const row_source *src, float *out);
    /* dst[r * stride + i] = scale * row[i] for r < rows. `stream`: non-temporal stores; rows fill whole lines
     * of 64 bytes. */
    void (*spread_row)(const float *row, float scale, int64_t n, quern_dtype dtype, void *dst, int64_t stride,
                       int64_t rows, bool stream);
    void (*gate_rows)(const gate_block *t);
    void (*gate_backward)(const gate_backward_block *t);
    /* d_w[h][b][n] += sum over tokens t of s[t][h][b] q[t][h]. */
    void (*gate_weight)(const float *s, const row_grid *q, quern_dtype dtype, int64_t tokens, int64_t heads,
                        int64_t n, float *d_w, bool prefetch_l2);

    /* acc[i] += sum over rows of exp2(s[r][i] * scale2 - lse2[r]) for i < seen[r], i < columns; columns a
     * multiple of 16. */
    void (*add_probabilities)(const float *s, int64_t lds, int32_t rows, const int32_t *seen, int32_t columns,
                              float scale2, const float *lse2, float *acc);
    /* best[r * ldb] = the greatest of what it holds and of s[r][i], i < seen[r], i < columns. NaN is the
     * greatest. */
    void (*row_maxima)(const float *s, int64_t lds, int32_t rows, const int32_t *seen, int32_t columns,
                       float *best, int64_t ldb);
    /* In columns [lo, hi) of a row, teacher[c] is multiplied by `weight` to T, and log P = s[c] scale - lse.
     * s[c] becomes P - T, and 0 in the other columns of `columns`, a multiple of 16. sums[0] = the sum of T
     * (log max(T, 1e-10) - log P), sums[1] = that of T. */
    void (*divergence)(float *s, const float *teacher, int32_t lo, int32_t hi, int32_t columns, float scale,
                       float lse, float weight, float sums[2]);
    /* Writes the `want` best of scores[from .. to) to best[], best first, as keys (see rank_index()). Returns
     * how many. */
    int64_t (*best_of)(const float *scores, int64_t from, int64_t to, int64_t want, uint64_t *best);
} nsa_kernels;

/* The index of a key of best_of(). A key has the score's order in its upper half and the index's complement
 * in its lower, so a greater key is a better entry. */
static inline int32_t rank_index(uint64_t key)
{
    return (int32_t) ~(uint32_t)key;
}

#endif
