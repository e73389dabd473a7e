/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gather.cuh - a warpgroup copies 64 rows of 512 elements that a list or a page table names
 * (common/gather.cuh) into a stage, by cp.async. Eight lanes copy a row, 16 bytes of each panel a lane, so a
 * thread has its part of four rows. A warp's first 16 lanes each find one of its 16 rows and pass the address
 * to the lanes that copy. */
#ifndef QUERN_CUDA_HOPPER_GATHER_CUH
#define QUERN_CUDA_HOPPER_GATHER_CUH

#include "common/mma.cuh"

namespace gather
{

enum { COPIED_ROWS = 64, ROWS_A_THREAD = 4, COPIED_PANELS = 4, COPIED_PANEL_BYTES = COPIED_ROWS * 128 };

/* The thread's i-th row, and the row that this lane of 16 finds. */
__device__ __forceinline__ int copied_row(int i)
{
    return i * 16 + threadIdx.x / 8;
}
__device__ __forceinline__ int found_row()
{
    return threadIdx.x % 16 / 4 * 16 + threadIdx.x / 32 * 4 + threadIdx.x % 4;
}

/* The address that the finder of the thread's i-th row has. */
__device__ __forceinline__ const char *passed(const char *p, int i)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)p, i * 4 + threadIdx.x % 32 / 8);
}

/* Copies half `half` of the columns of the thread's rows into four panels; a row without an address becomes
 * zeros. */
template <typename T>
__device__ __forceinline__ void copy_rows(char *stage, const char *const (&from)[ROWS_A_THREAD], int half,
                                          bool wide)
{
    const uint32_t to = smem_address(stage), at = tile_at<COPIED_ROWS>(copied_row(0), threadIdx.x % 8),
                   column = (half * COPIED_PANELS * 64 + threadIdx.x % 8 * 8) * sizeof(T);
    if (wide) {
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++)
#pragma unroll
            for (int p = 0; p < COPIED_PANELS; p++)
                cp_async16(to + at + i * 16 * 128 + p * COPIED_PANEL_BYTES, from[i] + column + p * 128,
                           from[i] != NULL);
        return;
    }
#pragma unroll 1
    for (int p = 0; p < COPIED_PANELS; p++)
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++)
            load_chunk16<T>(to, stage, at + i * 16 * 128 + p * COPIED_PANEL_BYTES,
                            (const T *)(from[i] + column + p * 128), from[i] != NULL, false);
}

} // namespace gather

#endif
