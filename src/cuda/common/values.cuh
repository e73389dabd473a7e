/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* values.cuh - single elements of tensors whose dtype is known at run time. */
#ifndef QUERN_CUDA_VALUES_CUH
#define QUERN_CUDA_VALUES_CUH

#include "common/device.cuh"

__device__ __forceinline__ float value_at(const void *p, quern_dtype dtype, int64_t at)
{
    return dtype == QUERN_F32    ? ((const float *)p)[at]
           : dtype == QUERN_BF16 ? to_float(((const bf16 *)p)[at])
                                 : to_float(((const f16 *)p)[at]);
}

__device__ __forceinline__ void put_at(void *p, quern_dtype dtype, int64_t at, float x)
{
    if (dtype == QUERN_F32) ((float *)p)[at] = x;
    else if (dtype == QUERN_BF16) ((bf16 *)p)[at] = from_float<bf16>(x);
    else ((f16 *)p)[at] = from_float<f16>(x);
}

#endif
