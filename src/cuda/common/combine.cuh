/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* combine.cuh - attention over keys that were split: each share has a row's maximum, its sum and its values
 * from zero, which are added in the order of the keys, so their bits are the same whoever computed them. */
#ifndef QUERN_CUDA_COMMON_COMBINE_CUH
#define QUERN_CUDA_COMMON_COMBINE_CUH

#include "common/mma.cuh"

/* A row's running maximum, in powers of two, and sum of 2^(score - maximum). */
struct row_sums {
    float top, sum;
};

/* What a row's values so far, and those of the next share, are multiplied by. */
struct fold_factors {
    float held, come;
};

/* Folds the sums of the next share into those so far. */
__device__ __forceinline__ fold_factors fold_sums(row_sums &held, const row_sums &come)
{
    const float top = come.top > held.top || come.top != come.top ? come.top : held.top;
    const fold_factors f = {held.top == -INFINITY ? 0.0f : exp2_fast(held.top - top),
                            come.top == -INFINITY ? 0.0f : exp2_fast(come.top - top)};
    held = {top, fmaf(come.sum, f.come, __fmul_rn(held.sum, f.held))};
    return f;
}
__device__ __forceinline__ float fold_value(float held, float come, const fold_factors &f)
{
    return fmaf(come, f.come, __fmul_rn(held, f.held));
}

/* Calls add(share, values) for each share in order; four values of a share stand at from + share * stride.
 * Eight shares are loaded at a time. here: whether this thread has values. ONCE: nobody reads them again. */
template <bool ONCE, typename Add>
__device__ __forceinline__ void add_shares(const float *from, int64_t stride, int shares, bool here, Add add)
{
    enum { AT_ONCE = 8 };
    for (int s0 = 0; s0 < shares; s0 += AT_ONCE) {
        float4 x[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
            const float4 *const at = (const float4 *)(from + (s0 + s) * stride);
            if (here && s0 + s < shares) x[s] = ONCE ? __ldcs(at) : *at;
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++)
            if (s0 + s < shares) add(s0 + s, x[s]);
    }
}

#endif
