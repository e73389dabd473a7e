/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* wgmma.cuh - Hopper's asynchronous warpgroup products m64nNk16 on the tiles of mma.cuh: A from shared memory
 * or registers, B from shared memory, with the columns of A as the columns of B (ss) or the rows of B
 * (rs). */
#ifndef QUERN_CUDA_HOPPER_WGMMA_CUH
#define QUERN_CUDA_HOPPER_WGMMA_CUH

#include "common/device.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__) /* the host's pass only parses */
#define QUERN_WGMMA 1

/* Descriptor of a tile swizzled by 128 bytes: groups of eight rows are 1024 bytes apart, panels `panel`
 * bytes. */
__device__ __forceinline__ uint64_t wg_tile(uint32_t address, uint32_t panel)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* The descriptor of what stands `bytes` (a multiple of 16) further in shared memory: one addition. */
__device__ __forceinline__ uint64_t wg_further(uint64_t tile, uint32_t bytes)
{
    return (tile & 0xffffffff00000000) | ((uint32_t)tile + (bytes >> 4));
}

/* Hides from the compiler where a descriptor comes from, so that a loop makes those `further` anew and does
 * not keep them all in registers. */
__device__ __forceinline__ uint64_t wg_fresh(uint64_t tile)
{
    uint32_t low = (uint32_t)tile;
    asm volatile("" : "+r"(low));
    return (tile & 0xffffffff00000000) | low;
}

#define WG4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])

#define WG_SS_64(type)                                                                                       \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n64k16.f32." type     \
                 "." type " "                                                                                \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%"  \
                 "24,%25,%26,%27,%28,%29,%30,%31}, "                                                         \
                 "%32, %33, p, 1, 1, 0, 0; }"                                                                \
                 : WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3]), WG4(c[4]), WG4(c[5]), WG4(c[6]), WG4(c[7])    \
                 : "l"(a), "l"(b))
template <typename T> __device__ __forceinline__ void wg_ss(float (&c)[8][4], uint64_t a, uint64_t b)
{
    if constexpr (__is_same(T, bf16)) WG_SS_64("bf16");
    else WG_SS_64("f16");
}

#define WG_SS_128(type)                                                                                      \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n128k16.f32." type    \
                 "." type " "                                                                                \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%"  \
                 "24,%25,%26,%27,%28,%29,%30,%31,"                                                           \
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                          \
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "                        \
                 "%64, %65, p, 1, 1, 0, 0; }"                                                                \
                 : WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3]), WG4(c[4]), WG4(c[5]), WG4(c[6]), WG4(c[7]),   \
                   WG4(c[8]), WG4(c[9]), WG4(c[10]), WG4(c[11]), WG4(c[12]), WG4(c[13]), WG4(c[14]),         \
                   WG4(c[15])                                                                                \
                 : "l"(a), "l"(b))
template <typename T> __device__ __forceinline__ void wg_ss(float (&c)[16][4], uint64_t a, uint64_t b)
{
    if constexpr (__is_same(T, bf16)) WG_SS_128("bf16");
    else WG_SS_128("f16");
}

#define WG_RS_64(type)                                                                                       \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n64k16.f32." type     \
                 "." type " "                                                                                \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%"  \
                 "24,%25,%26,%27,%28,%29,%30,%31}, "                                                         \
                 "{%32,%33,%34,%35}, %36, p, 1, 1, 1; }"                                                     \
                 : WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3]), WG4(c[4]), WG4(c[5]), WG4(c[6]), WG4(c[7])    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <typename T>
__device__ __forceinline__ void wg_rs(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    if constexpr (__is_same(T, bf16)) WG_RS_64("bf16");
    else WG_RS_64("f16");
}

/* The same for any width, over accumulators of N / 8 tiles, added to or (ADD false) overwritten. */
#define WG_LIST_32                                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31"
#define WG_LIST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_LIST_24 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_LIST_40 WG_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_LIST_48 WG_LIST_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_LIST_64                                                                                           \
    WG_LIST_32                                                                                               \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%" \
    "57,%58,%59,%60,%61,%62,%63"
#define WG_LIST_96                                                                                           \
    WG_LIST_64                                                                                               \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%" \
    "89,%90,%91,%92,%93,%94,%95"
#define WG_LIST_128                                                                                          \
    WG_LIST_96                                                                                               \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116," \
    "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_TILES_8(c, i)                                                                                     \
    WG4(c[i]), WG4(c[i + 1]), WG4(c[i + 2]), WG4(c[i + 3]), WG4(c[i + 4]), WG4(c[i + 5]), WG4(c[i + 6]),     \
        WG4(c[i + 7])
#define WG_TILES_16(c) WG4(c[0]), WG4(c[1]), WG4(c[2]), WG4(c[3])
#define WG_TILES_24(c) WG_TILES_16(c), WG4(c[4]), WG4(c[5])
#define WG_TILES_32(c) WG_TILES_8(c, 0)
#define WG_TILES_40(c) WG_TILES_8(c, 0), WG4(c[8]), WG4(c[9])
#define WG_TILES_48(c) WG_TILES_40(c), WG4(c[10]), WG4(c[11])
#define WG_TILES_64(c) WG_TILES_8(c, 0), WG_TILES_8(c, 8)
#define WG_TILES_96(c) WG_TILES_64(c), WG_TILES_8(c, 16)
#define WG_TILES_128(c) WG_TILES_96(c), WG_TILES_8(c, 24)

/* SIZE accumulators; A, B, ADD are the operands after them. */
#define WG_SS(type, n, size, at_a, at_b, at_add, rows)                                                       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #at_add ", 0; wgmma.mma_async.sync.aligned.m64n" #n      \
                 "k16.f32." type "." type " {" WG_LIST_##size "}, %" #at_a ", %" #at_b ", p, 1, 1, " #rows   \
                                                              ", " #rows "; }"                               \
                 : WG_TILES_##size(c)                                                                        \
                 : "l"(a), "l"(b), "n"((int)ADD))
#define WG_RS(type, n, size, a0, a1, a2, a3, at_b, at_add, at_rows)                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #at_add ", 0; wgmma.mma_async.sync.aligned.m64n" #n      \
                 "k16.f32." type "." type " {" WG_LIST_##size "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3         \
                                                              "}, %" #at_b ", p, 1, 1, %" #at_rows "; }"     \
                 : WG_TILES_##size(c)                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD), "n"((int)ROWS))

/* C[64][N] (+)= A[64][16] B[N][16]^T, both tiles in shared memory with the 16 in a row. */
template <typename T, int N, bool ADD>
__device__ __forceinline__ void wg_ss_wide(float (&c)[N / 8][4], uint64_t a, uint64_t b)
{
    constexpr bool B16 = __is_same(T, bf16);
    if constexpr (N == 48 && B16) WG_SS("bf16", 48, 24, 24, 25, 26, 0);
    else if constexpr (N == 48) WG_SS("f16", 48, 24, 24, 25, 26, 0);
    else if constexpr (N == 64 && B16) WG_SS("bf16", 64, 32, 32, 33, 34, 0);
    else if constexpr (N == 64) WG_SS("f16", 64, 32, 32, 33, 34, 0);
    else if constexpr (N == 80 && B16) WG_SS("bf16", 80, 40, 40, 41, 42, 0);
    else if constexpr (N == 80) WG_SS("f16", 80, 40, 40, 41, 42, 0);
    else if constexpr (N == 96 && B16) WG_SS("bf16", 96, 48, 48, 49, 50, 0);
    else if constexpr (N == 96) WG_SS("f16", 96, 48, 48, 49, 50, 0);
    else if constexpr (B16) WG_SS("bf16", 128, 64, 64, 65, 66, 0);
    else WG_SS("f16", 128, 64, 64, 65, 66, 0);
}

/* C[64][N] (+)= A[16][64]^T B[16][N], both tiles in shared memory with the 64 and the N in a row. */
template <typename T, int N, bool ADD>
__device__ __forceinline__ void wg_rows(float (&c)[N / 8][4], uint64_t a, uint64_t b)
{
    constexpr bool B16 = __is_same(T, bf16);
    if constexpr (N == 32 && B16) WG_SS("bf16", 32, 16, 16, 17, 18, 1);
    else if constexpr (N == 32) WG_SS("f16", 32, 16, 16, 17, 18, 1);
    else if constexpr (N == 64 && B16) WG_SS("bf16", 64, 32, 32, 33, 34, 1);
    else if constexpr (N == 64) WG_SS("f16", 64, 32, 32, 33, 34, 1);
    else if constexpr (B16) WG_SS("bf16", 128, 64, 64, 65, 66, 1);
    else WG_SS("f16", 128, 64, 64, 65, 66, 1);
}

/* C[64][N] (+)= A[64][16] B, A in registers, B in shared memory: ROWS: its 16 rows of N; else N rows with the
 * 16 in each. */
template <typename T, int N, bool ADD, bool ROWS>
__device__ __forceinline__ void wg_rs_wide(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b)
{
    constexpr bool B16 = __is_same(T, bf16);
    if constexpr (N == 64 && B16) WG_RS("bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
    else if constexpr (N == 64) WG_RS("f16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
    else if constexpr (N == 128 && B16) WG_RS("bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
    else if constexpr (N == 128) WG_RS("f16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
    else if constexpr (N == 192 && B16) WG_RS("bf16", 192, 96, 96, 97, 98, 99, 100, 101, 102);
    else if constexpr (N == 192) WG_RS("f16", 192, 96, 96, 97, 98, 99, 100, 101, 102);
    else if constexpr (B16) WG_RS("bf16", 256, 128, 128, 129, 130, 131, 132, 133, 134);
    else WG_RS("f16", 256, 128, 128, 129, 130, 131, 132, 133, 134);
}

#define HOPPER_SS(type, n, size, at_a, at_b, at_add, at_rows)                                                \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #at_add ", 0; wgmma.mma_async.sync.aligned.m64n" #n      \
                 "k16.f32." type "." type " {" WG_LIST_##size "}, %" #at_a ", %" #at_b                       \
                                                              ", p, 1, 1, 0, %" #at_rows "; }"               \
                 : WG_TILES_##size(c)                                                                        \
                 : "l"(a), "l"(b), "n"((int)ADD), "n"((int)ROWS))

/* C[64][N] (+)= A[64][16] B[16][N], both in shared memory, A's 16 in a row; so are B's, or else (ROWS) they
 * are rows of N. ADD false: C is overwritten. */
template <typename T, int N, bool ADD, bool ROWS>
__device__ __forceinline__ void wgmma_ss(float (&c)[N / 8][4], uint64_t a, uint64_t b)
{
    constexpr bool B16 = __is_same(T, bf16);
    static_assert(N == 64 || N == 128, "an instance a width");
    if constexpr (N == 64 && B16) HOPPER_SS("bf16", 64, 32, 32, 33, 34, 35);
    else if constexpr (N == 64) HOPPER_SS("f16", 64, 32, 32, 33, 34, 35);
    else if constexpr (N == 128 && B16) HOPPER_SS("bf16", 128, 64, 64, 65, 66, 67);
    else HOPPER_SS("f16", 128, 64, 64, 65, 66, 67);
}

#define HOPPER_COMMA ,
#define HOPPER_RS(type, n, list, tiles, a0, a1, a2, a3, at_b)                                                \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
                 "." type " {" list "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #at_b ", p, 1, 1, 0; }"    \
                 : tiles                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* C[64][N] += A[64][16] B[16][N], A in registers, B in shared memory, its 16 in a row. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_rs(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b)
{
    constexpr bool B16 = __is_same(T, bf16);
    if constexpr (N == 8 && B16) HOPPER_RS("bf16", 8, "%0,%1,%2,%3", WG4(c[0]), 4, 5, 6, 7, 8);
    else if constexpr (N == 8) HOPPER_RS("f16", 8, "%0,%1,%2,%3", WG4(c[0]), 4, 5, 6, 7, 8);
    else if constexpr (N == 16 && B16)
        HOPPER_RS("bf16", 16, "%0,%1,%2,%3,%4,%5,%6,%7", WG4(c[0]) HOPPER_COMMA WG4(c[1]), 8, 9, 10, 11, 12);
    else if constexpr (N == 16)
        HOPPER_RS("f16", 16, "%0,%1,%2,%3,%4,%5,%6,%7", WG4(c[0]) HOPPER_COMMA WG4(c[1]), 8, 9, 10, 11, 12);
    else if constexpr (N == 32 && B16) HOPPER_RS("bf16", 32, WG_LIST_16, WG_TILES_16(c), 16, 17, 18, 19, 20);
    else if constexpr (N == 32) HOPPER_RS("f16", 32, WG_LIST_16, WG_TILES_16(c), 16, 17, 18, 19, 20);
    else wg_rs_wide<T, N, true, false>(c, a, b);
}

/* C[64][128] (+)= A[64][32] B[32][128] of e4m3, both in shared memory with the 32 in a row. */
template <bool ADD> __device__ __forceinline__ void wgmma_ss_e4m3(float (&c)[16][4], uint64_t a, uint64_t b)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{" WG_LIST_64 "}, %64, %65, p, 1, 1; }"
                 : WG_TILES_64(c)
                 : "l"(a), "l"(b), "n"((int)ADD));
}

#define WG_RS_E4M3(n, size, a0, a1, a2, a3, at_b, at_add)                                                    \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #at_add ", 0; wgmma.mma_async.sync.aligned.m64n" #n      \
                 "k32.f32.e4m3.e4m3 {" WG_LIST_##size "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #at_b    \
                                                              ", p, 1, 1; }"                                 \
                 : WG_TILES_##size(c)                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD))

/* C[64][N] (+)= A[64][32] B[32][N] of e4m3, A in registers, B in shared memory with the 32 in a row. */
template <int N, bool ADD>
__device__ __forceinline__ void wgmma_rs_e4m3(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b)
{
    static_assert(N == 64 || N == 128, "an instance a width");
    if constexpr (N == 64) WG_RS_E4M3(64, 32, 32, 33, 34, 35, 36, 37);
    else WG_RS_E4M3(128, 64, 64, 65, 66, 67, 68, 69);
}
#endif

/* Before a thread's registers become operands or accumulators; after the last product of a batch. Shared
 * memory that threads filled is shown to the products by wg_show, before the barrier. Nothing where there are
 * none. */
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
