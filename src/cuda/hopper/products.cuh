/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* products.cuh - what follows the products of a stage: the warps that have read it return it to the feed. */
#ifndef QUERN_CUDA_HOPPER_PRODUCTS_CUH
#define QUERN_CUDA_HOPPER_PRODUCTS_CUH

#include "hopper/ring.cuh"
#include "hopper/wgmma.cuh"

/* A warp has read its part of a stage: one arrival, as 32 at one address come one after the other. */
template <int STAGES>
__device__ __forceinline__ void give_back_by_warp(ring<STAGES> &stages, const ring_place<STAGES> &at)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) stages.give_back(at);
}

#endif
