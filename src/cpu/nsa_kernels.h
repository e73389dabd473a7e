/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_kernels.h - the row kernels of NSA's own stages (compress, select, gate, convert): one table per CPU level.
 * They get pointers and sizes; they never validate, allocate or start threads. Elements at index i of a typed
 * pointer stand i elements further; n is any number >= 0; all sums have a fixed order.
 */
#ifndef QUERN_CPU_NSA_KERNELS_H
#define QUERN_CPU_NSA_KERNELS_H

#include "cpu/attention_kernels.h"

typedef struct nsa_kernels {
    quern_cpu_level level;
    /* out[0 .. dim) = sum of the source's rows. */
    void (*sum_rows)(const row_source *src, float *out);
    /* dst[r * stride + i] = scale * row[i] for r < rows; `stream`: past the caches, whole vectors only. */
    void (*spread_row)(const float *row, float scale, int64_t n, quern_dtype dtype, void *dst, int64_t stride, int64_t rows, bool stream);
    /* dst = src in another dtype. */
    void (*convert_row)(const void *src, quern_dtype from, void *dst, quern_dtype to, int64_t n);
    /* dst[i] += scale * src[i]. */
    void (*add_scaled)(const float *src, float scale, int64_t n, float *dst);

    /* The gate. w: three rows, ldw apart. An absent o[b] (NULL) counts as 0. */
    void (*gate_logits)(const void *q, quern_dtype dtype, const void *w, quern_dtype w_dtype, int64_t ldw, int64_t n, float logits[3]);
    void (*sigmoid)(float *x, int64_t n); /* in place */
    void (*gate_combine)(const void *const o[3], quern_dtype dtype, const float gates[3], int64_t n, void *dst, bool stream);
    /* dots[b] = d_o . o[b]. */
    void (*gate_dots)(const void *d_o, const void *const o[3], quern_dtype dtype, int64_t n, float dots[3]);
    /* d_q (+)= sum_b s[b] w[b]; d_w[b] += s[b] q. */
    void (*gate_query)(const float s[3], const void *w, quern_dtype w_dtype, int64_t ldw, int64_t n, float *d_q, bool accumulate);
    void (*gate_weight)(const float s[3], const void *q, quern_dtype dtype, int64_t n, float *d_w, int64_t ldw);

    /* acc[i] += sum over rows of exp2(s[r][i] * scale2 - lse2[r]) for i < seen[r], i < columns; columns a multiple
     * of 16. */
    void (*add_probabilities)(const float *s, int64_t lds, int32_t rows, const int32_t *seen, int32_t columns, float scale2,
                              const float *lse2, float *acc);
    /* The `want` best of scores[from .. to): best[] holds index order keys, see rank_key(). Returns how many. */
    int64_t (*best_of)(const float *scores, int64_t from, int64_t to, int64_t want, uint64_t *best);
    /* Stores past the caches are seen by other threads after this. */
    void (*fence)(void);
} nsa_kernels;

/* An entry of best_of(): the score's order above, the index below, so that a greater key is a better entry. */
static inline int32_t rank_index(uint64_t key)
{
    return (int32_t)~(uint32_t)key;
}

const nsa_kernels *nsa_kernels_for(quern_cpu_level level);
extern const nsa_kernels nsa_kernels_portable, nsa_kernels_avx2, nsa_kernels_avx512;

#endif
