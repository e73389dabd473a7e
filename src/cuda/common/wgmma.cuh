/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* wgmma.cuh - Hopper's asynchronous warpgroup products m64nNk16 on the tiles of mma.cuh: A from shared memory or
 * registers, B from shared memory, with the columns of A as the columns of B (ss) or the rows of B (rs). */
#ifndef QUERN_CUDA_WGMMA_CUH
#define QUERN_CUDA_WGMMA_CUH

#include "common/device.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define QUERN_WGMMA 1

/* Descriptor of a tile swizzled by 128 bytes: groups of eight rows are 1024 bytes apart, panels `panel` bytes. */
__device__ __forceinline__ uint64_t wg_tile(uint32_t address, uint32_t panel)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define WG4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])

#define WG_SS_64(type) \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, " \
                 "%32, %33, p, 1, 1, 0, 0; }" \
                 : WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3]), WG4(c[4]), WG4(c[5]), WG4(c[6]), WG4(c[7]) \
                 : "l"(a), "l"(b))
template <typename T> __device__ __forceinline__ void wg_ss(float (&c)[8][4], uint64_t a, uint64_t b)
{
    if constexpr (__is_same(T, bf16)) WG_SS_64("bf16");
    else WG_SS_64("f16");
}

#define WG_SS_128(type) \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, " \
                 "%64, %65, p, 1, 1, 0, 0; }" \
                 : WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3]), WG4(c[4]), WG4(c[5]), WG4(c[6]), WG4(c[7]), \
                   WG4(c[8]), WG4(c[9]), WG4(c[10]), WG4(c[11]), WG4(c[12]), WG4(c[13]), WG4(c[14]), WG4(c[15]) \
                 : "l"(a), "l"(b))
template <typename T> __device__ __forceinline__ void wg_ss(float (&c)[16][4], uint64_t a, uint64_t b)
{
    if constexpr (__is_same(T, bf16)) WG_SS_128("bf16");
    else WG_SS_128("f16");
}

#define WG_RS_64(type) \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, " \
                 "{%32,%33,%34,%35}, %36, p, 1, 1, 1; }" \
                 : WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3]), WG4(c[4]), WG4(c[5]), WG4(c[6]), WG4(c[7]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <typename T> __device__ __forceinline__ void wg_rs(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    if constexpr (__is_same(T, bf16)) WG_RS_64("bf16");
    else WG_RS_64("f16");
}
#endif

/* Before a thread's registers become operands or accumulators; after the last product of a batch. Shared memory
 * that threads filled is shown to the products by wg_show, before the barrier. Nothing where there are none. */
__device__ __forceinline__ void wg_start()
{
#ifdef QUERN_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wg_finish()
{
#ifdef QUERN_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
__device__ __forceinline__ void wg_commit()
{
#ifdef QUERN_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/* Waits until at most N groups are under way; `acc` is complete then. */
template <int N, int TILES> __device__ __forceinline__ void wg_wait(float (&acc)[TILES][4])
{
#ifdef QUERN_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
    for (int i = 0; i < TILES; i++) asm volatile("" : WG4(acc[i])::"memory");
#endif
}
__device__ __forceinline__ void wg_show()
{
#ifdef QUERN_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#endif
