/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4.h - DeepSeek-V4's compressed attention in double, straight from the equations, for one sequence.
 *
 * Arrays are contiguous. Series a is what a block reads of its own tokens, series b what the next block reads
 * of them.
 */
#ifndef QUERN_ORACLE_DSV4_H
#define QUERN_ORACLE_DSV4_H

#include <stdbool.h>
#include <stdint.h>

typedef struct oracle_compressor {
    int64_t ratio, width; /* r, C */
    bool overlap;         /* CSA: proj [T, 4C] = C_a Z_a C_b Z_b. HCA: [T, 2C] = C Z */
    int64_t start_token, blocks;
    int64_t start_abs_pos, rope_dim; /* rope_dim 0: no rotation */
    bool rope_last, hadamard;
    double eps;
} oracle_compressor;

/* The parts; NULL where absent. b_b only with overlap; prev_b [r, 2C] = C_b Z_b of the block before. */
typedef struct oracle_compress_arrays {
    const double *proj, *b_a, *b_b, *prev_b, *norm_weight, *cos_sin;
    double *pooled, *out; /* [blocks, C] */
    const double *d_out;
    double *d_proj, *d_b_a, *d_b_b, *d_prev_b, *d_norm_weight; /* added to */
} oracle_compress_arrays;

/* proj -> pooled. */
void oracle_dsv4_pool(const oracle_compressor *c, const oracle_compress_arrays *x);
/* pooled -> out: norm, rotation, Hadamard transform. */
void oracle_dsv4_finish(const oracle_compressor *c, const oracle_compress_arrays *x);
/* d_out -> every d_ that is given, from proj, and from pooled as it is (a rounding passes gradients
 * unchanged). */
void oracle_dsv4_compress_backward(const oracle_compressor *c, const oracle_compress_arrays *x);

/* y = x W, x [rows, k], w [k, n]. */
void oracle_dsv4_multiply(const double *x, const double *w, int64_t rows, int64_t k, int64_t n, double *y);
/* In place: pairs (2m, 2m + 1) of the last `dim` of `width` channels by the angles of a position; `inverse`:
 * back. */
void oracle_dsv4_rotate(double *row, int64_t width, const double *cos_sin, int64_t dim, int64_t position,
                        bool inverse);
/* cos and sin of pos * inv_freq, [max_pos, dim]; factor 0: plain. In float at each step, as the definition
 * has it. */
void oracle_dsv4_rope_table(int64_t max_pos, int64_t dim, float base, float factor, float length,
                            float beta_fast, float beta_slow, double *table);

/* The row formats of caches, from f32 values to bytes. False where a value is NaN or infinite. */
bool oracle_dsv4_quantise_fp8(const float *row, int64_t n, bool power_of_two, unsigned char *bytes);
bool oracle_dsv4_quantise_fp4(const float *row, int64_t n, unsigned char *bytes);
bool oracle_dsv4_quantise_row584(const float *row, unsigned char bytes[584]);
/* What the bytes mean. */
void oracle_dsv4_widen_fp8(const unsigned char *bytes, int64_t n, double *row);
void oracle_dsv4_widen_fp4(const unsigned char *bytes, int64_t n, double *row);
void oracle_dsv4_widen_row584(const unsigned char bytes[584], double *row);

/* A weight's e4m3 [n, k] with a scale for every 128 x 128, as a power of two (bytes) or in f32, to w [k,
 * n]. */
void oracle_dsv4_widen_weight(const unsigned char *codes, const unsigned char *powers, const float *scales,
                              int64_t n, int64_t k, double *w);

/* The indexer of one sequence: query t stands at position start + t and sees entries s < (start + t + 1) /
 * ratio. */
typedef struct oracle_indexer {
    int64_t queries, heads, width, entries, ratio, start;
} oracle_indexer;

/* Entries that query t sees. */
int64_t oracle_dsv4_visible(int64_t entries, int64_t ratio, int64_t position);
/* scores [T, S] = c sum_h w[t,h] max(0, q[t,h] . k[s]), of entries that are seen; elsewhere they stay as they
 * are. */
void oracle_dsv4_scores(const oracle_indexer *x, const double *q, const double *k, const double *w,
                        double *scores);
/* The k best of n scores, ties to the lowest index, NaN after all others: indices ascending, then -1. Returns
 * how many. */
int64_t oracle_dsv4_best(const double *scores, int64_t n, int64_t k, int32_t *idx);

/* The attention core of one sequence: query t stands at start + t, raw row j at start + queries - raw + j. */
typedef struct oracle_core {
    int64_t queries, raw, entries, heads, dim, window, ratio, start, rope_dim;
    int64_t chosen; /* extent of a query's list; -1: there is none, every visible entry is attended */
} oracle_core;

/* NULL where absent: kv_cmp, idx, count, sink, cos_sin; lse_win and the gradients are optional outputs. */
typedef struct oracle_core_arrays {
    const double *q, *kv, *kv_cmp, *sink, *cos_sin; /* [T,H,D] [N,D] [S,D] [H] [P,R] */
    const int32_t *idx, *count;                     /* [T,chosen] [T] */
    double *o, *lse, *lse_win;                      /* [T,H,D] [H,T] [H,T] */
    const double *d_o;
    double *d_q, *d_kv, *d_kv_cmp, *d_sink; /* added to */
} oracle_core_arrays;

void oracle_dsv4_attend(const oracle_core *c, const oracle_core_arrays *x);
/* Every gradient that is given, from the inputs, d_o and o (which may be rounded: it gives delta = rowsum(d_o
 * o)). */
void oracle_dsv4_attend_backward(const oracle_core *c, const oracle_core_arrays *x);

#endif
