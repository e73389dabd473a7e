/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swiglu.cuh - SwiGLU of a gate and an up, and its gradient, in f32: stages/swiglu.h has the rule. */
#ifndef QUERN_CUDA_SWIGLU_CUH
#define QUERN_CUDA_SWIGLU_CUH

#include "common/mma.cuh"

/* NaN fails every comparison and stays. With r = e^-|x / 2|, x = alpha g, the sigmoid is 1 / (1 + r^2) or,
 * where x is negative, r^2 / (1 + r^2): each factor takes an r, as r^2 may be too small for f32 where the
 * factors are large. The fast exponential and quotient are within 2^-22 and |x| 2^-24. */
__device__ __forceinline__ float swiglu_of(const swiglu_rule &rule, float g, float u)
{
    const float limit = rule.limit > 0.0f ? rule.limit : INFINITY;
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    u += rule.beta;
    const float x = rule.alpha * g, size = fabsf(x);
    const float r = size > 160.0f ? expf(-0.5f * size) : exp2_fast(-0.72134752044f * size), /* log2(e) / 2 */
        factor = x < 0.0f ? r : 1.0f;
    return __fdividef((g * factor) * (u * factor), fmaf(r, r, 1.0f));
}

/* The same of a gate and an up that the limit has clamped, where |alpha g| is at most SWIGLU_NEAR. slope:
 * -alpha log2(e). */
static constexpr float SWIGLU_NEAR = 40.0f;
__device__ __forceinline__ float swiglu_near(float slope, float beta, float g, float u)
{
    return __fdividef(g, 1.0f + exp2_fast(slope * g)) * (u + beta);
}

/* Gradients of gate and up; d is that of SwiGLU. Beyond the limit they are 0. */
__device__ __forceinline__ void swiglu_gradient(const swiglu_rule &rule, float d, float g, float u, float *dg,
                                                float *du)
{
    const float limit = rule.limit > 0.0f ? rule.limit : INFINITY;
    const float x = g > limit ? limit : g, v = (u > limit ? limit : u < -limit ? -limit : u) + rule.beta;
    const float y = -rule.alpha * x;
    if (y > 87.0f) {
        const float root = expf(-0.5f * y), slope = root + x * root * rule.alpha;
        *dg = d * v * root * slope;
        *du = (d * root) * (x * root);
    } else {
        const float e = expf(y), s = 1.0f / (1.0f + e);
        *dg = d * v * s * (1.0f + rule.alpha * (x * (e * s)));
        *du = d * x * s;
    }
    if (g > limit) *dg = 0.0f;
    if (u > limit || u < -limit) *du = 0.0f;
}

/* Where column c of gate stands in a row that alternates gate and up by runs of q; up is q further. */
__device__ __forceinline__ int64_t gate_column(int64_t c, int64_t q)
{
    const int64_t run = c / q;
    return run * q + c;
}

#endif
