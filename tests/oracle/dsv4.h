/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4.h - DeepSeek-V4's compressed attention in double, straight from the equations, for one sequence.
 *
 * Arrays are contiguous. Series a is what a block reads of its own tokens, series b what the next block reads of them.
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
/* d_out -> every d_ that is given, from proj, and from pooled as it is (a rounding passes gradients unchanged). */
void oracle_dsv4_compress_backward(const oracle_compressor *c, const oracle_compress_arrays *x);

/* y = x W, x [rows, k], w [k, n]. */
void oracle_dsv4_multiply(const double *x, const double *w, int64_t rows, int64_t k, int64_t n, double *y);
/* In place: pairs (2m, 2m + 1) of the last `dim` of `width` channels by the angles of a position; `inverse`: back. */
void oracle_dsv4_rotate(double *row, int64_t width, const double *cos_sin, int64_t dim, int64_t position, bool inverse);
/* cos and sin of pos * inv_freq, [max_pos, dim]; factor 0: plain. In float at each step, as the definition has it. */
void oracle_dsv4_rope_table(int64_t max_pos, int64_t dim, float base, float factor, float length, float beta_fast, float beta_slow, double *table);

/* The row formats of caches, from f32 values to bytes. False where a value is NaN or infinite. */
bool oracle_dsv4_quantise_fp8(const float *row, int64_t n, bool power_of_two, unsigned char *bytes);
bool oracle_dsv4_quantise_fp4(const float *row, int64_t n, unsigned char *bytes);
bool oracle_dsv4_quantise_row584(const float *row, unsigned char bytes[584]);
/* What the bytes mean. */
void oracle_dsv4_widen_fp8(const unsigned char *bytes, int64_t n, double *row);
void oracle_dsv4_widen_fp4(const unsigned char *bytes, int64_t n, double *row);
void oracle_dsv4_widen_row584(const unsigned char bytes[584], double *row);

#endif
