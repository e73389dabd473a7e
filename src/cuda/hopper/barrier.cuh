/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* barrier.cuh - Hopper's barriers: mbarriers in shared memory, which count arrivals and the bytes of bulk
 * copies, named barriers between some warps of a block, and the hand-over of registers from one warpgroup to
 * another. An mbarrier's phases alternate: a wait for parity 0 ends when the first phase is complete; one for
 * parity 1 on a fresh barrier ends at once. */
#ifndef QUERN_CUDA_HOPPER_BARRIER_CUH
#define QUERN_CUDA_HOPPER_BARRIER_CUH

#include <stdint.h>

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
/* Shows fresh barriers to the copy engine; a __syncthreads() follows. */
__device__ __forceinline__ void mbar_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* One arrival, and `bytes` more that copies will bring. */
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* One arrival, for what this thread did before. Where lanes of a warp each read or write what ordinary
 * accesses of other warps change or read afterwards, all of them arrive (WARP_ARRIVALS): one lane's arrival
 * after a __syncwarp() orders the same, but compute-sanitizer's racecheck does not follow it. */
enum { WARP_ARRIVALS = 32 };
__device__ __forceinline__ void mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* One arrival, once this thread's cp.async so far have landed. */
__device__ __forceinline__ void mbar_arrive_copies(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra "
                 "DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* Whether a wait would end at once; true orders as the wait does. A wait takes some 140 clocks even then: a
 * test well before saves them. */
__device__ __forceinline__ bool mbar_test(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

/* Named barrier `id` of `threads` threads, those that only arrive included. __syncthreads() is 0. */
__device__ __forceinline__ void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Blocks of a cluster: a barrier of all their threads, in two halves; an address in
 * another block's shared memory; an arrival there, for what this thread did before, and the wait for such
 * arrivals. */
__device__ __forceinline__ void cluster_sync_arrive()
{
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync_wait()
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void cluster_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
                 "[%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ float4 cluster_load(uint32_t address)
{
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

/* All warps of a warpgroup call; only code compiled for sm_90a may. */
template <int REGISTERS> __device__ __forceinline__ void registers_up()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void registers_down()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* Orders this thread's ordinary accesses to shared memory before the tensor cores' and the copy engine's. */
__device__ __forceinline__ void async_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same, of global memory and what others did there. */
__device__ __forceinline__ void async_fence_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* A counter in global memory that orders what threads of different blocks do: everything before an addition
 * comes before what follows a load that saw it. */
__device__ __forceinline__ int32_t load_acquire(const int32_t *p)
{
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void add_release(int32_t *p, int32_t x)
{
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

#endif
