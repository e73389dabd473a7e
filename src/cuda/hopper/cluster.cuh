/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cluster.cuh - stages that the blocks of a cluster fill for each other: bulk copies of boxes to all of them,
 * the arrivals that free a stage in all of them, and numbers that a block sends to another one. */
#ifndef QUERN_CUDA_HOPPER_CLUSTER_CUH
#define QUERN_CUDA_HOPPER_CLUSTER_CUH

#include "hopper/ring.cuh"
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

/* cluster_sync_arrive() after reads, which waits for none of the thread's stores. */
__device__ __forceinline__ void cluster_sync_arrive_read()
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/* As cluster_load(), one float. */
__device__ __forceinline__ float cluster_load_one(uint32_t address)
{
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

/* Gives a stage back to all blocks of a cluster; a warp that has read it calls. */
template <int BLOCKS, int STAGES>
__device__ __forceinline__ void give_back_to_cluster(ring<STAGES> &stages, const ring_place<STAGES> &at)
{
    const int lane = threadIdx.x % 32;
    if (lane < BLOCKS)
        cluster_arrive_read(cluster_address(smem_address(stages.free) + at.stage * 8, (uint32_t)lane));
}

/* Two or four floats to a place in another block of the cluster, whose barrier there counts their bytes: that
 * block waits by cluster_wait(). */
__device__ __forceinline__ void cluster_send(uint32_t to, float2 x, uint32_t bar)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
        "f"(x.x), "f"(x.y), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void cluster_send(uint32_t to, float4 x, uint32_t bar)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(bar)
        : "memory");
}
/* The same of `bytes` of this block's shared memory, which an async_fence() has shown to the copy engine;
 * they and both addresses are multiples of 16. */
__device__ __forceinline__ void cluster_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "r"(from), "r"(bytes), "r"(bar)
        : "memory");
}

#endif
