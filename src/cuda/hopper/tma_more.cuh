/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tma_more.cuh - bulk copies of boxes to all blocks of a cluster. */
#ifndef QUERN_CUDA_HOPPER_TMA_MORE_CUH
#define QUERN_CUDA_HOPPER_TMA_MORE_CUH

#include "hopper/tma.cuh"

/* As tma_load(), to that place in each block of the cluster whose bit is set in `blocks`: that block's
 * barrier counts the bytes. */
__device__ __forceinline__ void tma_load_all(uint16_t blocks, uint32_t to, const CUtensorMap &map,
                                             uint32_t bar, int column, int head, int token, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
                 "multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(&map), "r"(bar), "r"(column), "r"(head), "r"(token), "r"(batch), "h"(blocks)
                 : "memory");
}
/* An arrival at a barrier of another block of the cluster, for what products or this thread have read and
 * nobody wrote: cluster_arrive() would wait for the thread's stores to all of the GPU, at each stage. */
__device__ __forceinline__ void cluster_arrive_read(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

#endif
