/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* group.cuh - whole warps of a block that work on one row together, four channels a thread. Sums and maxima
 * of a row have a fixed order. */
#ifndef QUERN_CUDA_GROUP_CUH
#define QUERN_CUDA_GROUP_CUH

#include "common/device.cuh"

enum {
    GROUP_CHANNELS = 4,
    GROUP_BLOCK = 128,
    GROUP_MOST = 256,
    WARPS_MOST = GROUP_MOST / 32,
    PARTS = 2 * WARPS_MOST
};

/* Threads of a row's group, and the groups of a block. */
static inline int group_lanes(int64_t width)
{
    return (int)((width + GROUP_CHANNELS * 32 - 1) / (GROUP_CHANNELS * 32)) * 32;
}
static inline int groups_of_block(int64_t width)
{
    const int lanes = group_lanes(width);
    return lanes < GROUP_BLOCK ? GROUP_BLOCK / lanes : 1;
}

struct group {
    int index, lane, lanes;
    float
        *parts; /* shared, 2 WARPS_MOST floats: of each of the block's warps, for one sum and for the next */
    mutable int turn = 0;

    __device__ __forceinline__ group(float *parts, int lanes)
        : index((int)threadIdx.x / lanes), lane((int)threadIdx.x % lanes), lanes(lanes), parts(parts)
    {
    }
    __device__ __forceinline__ void sync() const
    {
        if (lanes == 32) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(lanes) : "memory");
    }
    /* What each of the group's warps gave. A thread that writes the same place again, two calls later, knows
     * by the call between that all have read it. */
    __device__ __forceinline__ const float *exchange(float x) const
    {
        float *const now = parts + turn;
        turn ^= WARPS_MOST;
        if (lane % 32 == 0) now[threadIdx.x / 32] = x;
        sync();
        return now + index * (lanes / 32);
    }
    __device__ __forceinline__ float sum(float x) const
    {
#pragma unroll
        for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
        if (lanes == 32) return x;
        const float *const of_warps = exchange(x);
        float all = 0.0f;
        for (int w = 0; w < lanes / 32; w++) all += of_warps[w];
        return all;
    }
    /* Of numbers that are not negative. */
    __device__ __forceinline__ float max(float x) const
    {
#pragma unroll
        for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
        if (lanes == 32) return x;
        const float *const of_warps = exchange(x);
        float all = 0.0f;
        for (int w = 0; w < lanes / 32; w++) all = fmaxf(all, of_warps[w]);
        return all;
    }
};

#endif
