/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tma.cuh - Hopper's bulk copies of boxes of a tensor into shared memory. Boxes are 64 16-bit columns wide and land
 * swizzled as mma.cuh's tiles are: rows of 128 bytes, 16-byte chunks permuted by row & 7. What lies outside the tensor
 * arrives as 0. */
#ifndef QUERN_CUDA_TMA_CUH
#define QUERN_CUDA_TMA_CUH

#include "common/device.cuh"

#include <cuda.h>

enum { TMA_COLUMNS = 64 };

/* Whether a [B, N, H, D] view of 16-bit elements can be described to the copy engine. */
bool tma_can(const quern_tensor &t);

/* Describes it, in boxes of `rows` tokens by `heads` heads by TMA_COLUMNS. */
quern_status tma_describe(CUtensorMap *map, const quern_tensor &t, int heads, int rows);

/* Copies the box at (batch, token, head, column) to `to`; `bar` counts its bytes. One thread calls. */
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap &map, uint32_t bar, int column, int head, int token, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(bar), "r"(column), "r"(head), "r"(token), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

#endif
