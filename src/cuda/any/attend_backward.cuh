/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_backward.cuh - what the two kernels of attention's backward for bf16 and f16 share. */
#ifndef QUERN_CUDA_ATTEND_BACKWARD_CUH
#define QUERN_CUDA_ATTEND_BACKWARD_CUH

#include "any/attend.cuh"
#include "any/stages.cuh"

#include <math.h>

quern_status attend_backward_by_rows(const attend_args *args, const attend_launch &l, const launcher &to);
quern_status attend_backward_by_keys(const attend_args *args, const attend_launch &l, void *workspace, const launcher &to);
size_t attend_backward_keys_bytes(const attend_args *args);

/* The forward's lse in the exp2 domain (+inf for a row without keys), delta and row_scale of one row. */
__device__ __forceinline__ void row_statistics(const attend_kernel &a, const sequence &seq, int64_t n, int64_t head, float *lse2, float *delta,
                                               float *row_scale)
{
    const float lse = a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]];
    *lse2 = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
    *delta = a.delta.p[seq.view_b * a.delta.s[0] + head * a.delta.s[1] + n * a.delta.s[2]];
    *row_scale = a.row_scale.p == NULL ? 1.0f : a.row_scale.p[seq.view_b * a.row_scale.s[0] + head * a.row_scale.s[1] + n * a.row_scale.s[2]];
}

template <typename T> __device__ __forceinline__ void store_pair(void *base, int64_t at, float x, float y, bool f32, bool add)
{
    if (f32) {
        float *p = (float *)base + at;
        p[0] = add ? p[0] + x : x;
        p[1] = add ? p[1] + y : y;
    } else {
        T *p = (T *)base + at;
        p[0] = from_float<T>(x);
        p[1] = from_float<T>(y);
    }
}

#endif
