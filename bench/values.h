/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* values.h - single elements of contiguous tensors, and random ones. */
#ifndef QUERN_BENCH_VALUES_H
#define QUERN_BENCH_VALUES_H

#include <quern/quern.h>

/* Elements of a tensor. */
int64_t value_count(const quern_tensor *t);
/* Element i, counted row-major, of a contiguous f16, bf16, f32 or f64 tensor. */
double value_at(const quern_tensor *t, int64_t i);
/* Sets element i of a contiguous f32, f16 or bf16 tensor. */
void value_set(const quern_tensor *t, int64_t i, float v);

/* Fills a contiguous f32, f16 or bf16 tensor with independent N(0,1) values. The values depend on the seed
 * and the element only, not on dtype (but for rounding) or machine. */
void fill_normal(const quern_tensor *t, uint64_t seed);
/* The same, smoothed along dimension 1 (time) of a [B, N, H, D] tensor by a Gaussian of the given standard
 * deviation in tokens, and scaled back to unit variance. False without memory. */
bool fill_smooth(const quern_tensor *t, uint64_t seed, double sigma);

#endif
