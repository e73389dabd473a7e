/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* scan.cuh - prefix sums over the lanes of a warp. */
#ifndef QUERN_CUDA_COMMON_SCAN_CUH
#define QUERN_CUDA_COMMON_SCAN_CUH

/* The sum over the lanes up to this one. All lanes call. */
template <typename X> __device__ __forceinline__ X sum_to_lane(X x)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const X lower = __shfl_up_sync(~0u, x, by);
        if (lane >= by) x += lower;
    }
    return x;
}

#endif
