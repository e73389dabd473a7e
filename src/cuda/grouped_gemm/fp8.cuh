/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp8.cuh - the layout of the grouped product's e4m3 operands in the workspace.
 *
 * A's rows are rounded by 128 of K, the last group padded with zeros. On Hopper a value is a byte, and
 * of each 16 of K byte 4 L + b holds number {2 L, 2 L + 8, 2 L + 1, 2 L + 9}[b], the order in which weights
 * are decoded (weights.cuh). Elsewhere a value is a bf16 number, in K's order.
 *
 * Scales of A are [groups][places]. An expert's places begin at a multiple of 16 and go by 16 rows, of which
 * place 4 q + 2 h + b has row 8 h + 2 q + b: so a lane loads those of two products' columns at once.
 *
 * A column's power of two is a float, [experts][panels of 64].
 */
#ifndef QUERN_CUDA_GROUPED_GEMM_FP8_CUH
#define QUERN_CUDA_GROUPED_GEMM_FP8_CUH

#include "grouped_gemm/params.cuh"

enum { FP8_GROUP = 128, FP8_TILE = 256 /* rows that a copy of scales takes, at most */ };

struct fp8_params {
    gemm_params p;
    const float *row_scale, *power;
    int64_t scale_stride; /* of a group's scales */
    int32_t groups;
};

/* Where the scale of row r of an expert stands. */
__device__ __forceinline__ int64_t scale_place_of(const expert_ends &ends, int32_t e, int64_t r)
{
    const int64_t in_16 = ((r & 6) << 1) + (r >> 3 & 1) * 2 + (r & 1);
    return (ends.first_of(e) + 15) / 16 * 16 + 16 * (int64_t)e + r / 16 * 16 + in_16;
}

/* The power of two of a column. */
__device__ __forceinline__ float power_at(const fp8_params &f, int32_t expert, int column)
{
    return f.power[(int64_t)expert * f.p.panels * UNIT + column];
}

/* A number in e4m3's range of magnitudes to the nearest e4m3, as a number. */
__device__ __forceinline__ float e4m3_rounded(float x)
{
    return copysignf(e4m3_value(saturated_e4m3(fabsf(x))), x);
}

fp8_params fp8_params_of(const gemm_plan &plan);
/* Computes both operands: rows and scales of A (`bytes`: as bytes), powers of B's columns. */
quern_status fp8_ready(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan,
                       bool bytes);

#endif
