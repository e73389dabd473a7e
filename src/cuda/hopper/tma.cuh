/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tma.cuh - Hopper's bulk copies of boxes of a tensor into shared memory. Boxes are 64 16-bit columns wide
 * and land swizzled as mma.cuh's tiles are: rows of 128 bytes, 16-byte chunks permuted by row & 7. What lies
 * outside the tensor arrives as 0. Boxes of f32 are 32 columns wide and are added to the tensor; what lies
 * outside is left out. */
#ifndef QUERN_CUDA_HOPPER_TMA_CUH
#define QUERN_CUDA_HOPPER_TMA_CUH

#include "common/device.cuh"

#include <cuda.h>

/* A tensor of 2 to 5 dims, the innermost first, and the box of it that a copy takes. Strides in bytes, of the
 * dims but the first, multiples of 16; that of a dim of 1 means nothing. */
struct tma_tensor {
    void *data;
    CUtensorMapDataType element;
    int rank;
    int64_t shape[5], strides[4];
    int32_t box[5];
    CUtensorMapSwizzle swizzle;
};
quern_status tma_describe(CUtensorMap *map, const tma_tensor &t);

/* Whether a [B, N, H, D] view of 16-bit or f32 elements can be described to the copy engine. */
bool tma_can(const quern_tensor &t);

/* Describes it, in boxes of `rows` tokens by `heads` heads by 128 bytes. */
quern_status tma_describe(CUtensorMap *map, const quern_tensor &t, int heads, int rows);

/* Copies the box at (batch, token, head, column) to `to`; `bar` counts its bytes. One thread calls. */
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap &map, uint32_t bar, int column,
                                         int head, int token, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(bar), "r"(column), "r"(head), "r"(token), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap &map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* Adds the box at `from`; no barrier counts it. One thread calls. It belongs to the thread's next
 * commit; what was committed has been read, or has been added, when the waits end. */
__device__ __forceinline__ void tma_add(const CUtensorMap &map, uint32_t from, int column, int head,
                                        int token, int batch)
{
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, "
                 "%5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(column), "r"(head), "r"(token), "r"(batch)
                 : "memory");
}
/* The same, in place of what is there. */
__device__ __forceinline__ void tma_store(const CUtensorMap &map, uint32_t from, int column, int head,
                                          int token, int batch)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            &map),
        "r"(from), "r"(column), "r"(head), "r"(token), "r"(batch)
        : "memory");
}
/* `bytes` in a row; they and both addresses are multiples of 16. `bar` counts them. */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar)
        : "memory");
}
/* Both, of `bytes` in a row; they and both addresses are multiples of 16. */
__device__ __forceinline__ void bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
        "r"(from), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void tma_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void tma_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void tma_wait_written()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
