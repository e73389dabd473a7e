/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * topk.cuh - the k best of scores that a warp meets in the order of their indices. What beats the k-th best
 * so far is appended; once the room is full, the k best stay (`best_cut`): the k-th best rank is found digit
 * by digit from histograms of 8 bits. The list stays in the order of indices, so equal ranks keep the lowest,
 * and the end is ascending without a sort.
 */
#ifndef QUERN_CUDA_TOPK_CUH
#define QUERN_CUDA_TOPK_CUH

#include <stdint.h>

enum { BEST_BINS = 256 };

struct best_list {
    uint32_t *rank; /* shared memory, `room` each */
    int32_t *index;
    uint32_t *bins; /* BEST_BINS */
    int n;
    uint32_t least; /* what a rank must exceed */
};

/* Numbers in the order of scores; -0 equals 0, NaN comes last. All exceed 0. */
__device__ __forceinline__ uint32_t rank_of(float score)
{
    const uint32_t bits = __float_as_uint(score + 0.0f);
    if (score != score) return 1;
    return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

/* A score a lane, of indices that rise with the lanes and from call to call. There is room. */
__device__ __forceinline__ void best_add(best_list &b, bool here, uint32_t rank, int32_t index)
{
    const bool better = here && rank > b.least;
    const unsigned bits = __ballot_sync(~0u, better);
    const int at = b.n + __popc(bits & ((1u << threadIdx.x % 32) - 1));
    if (better) {
        b.rank[at] = rank;
        b.index[at] = index;
    }
    b.n += __popc(bits);
}

/* The rank of the k-th best of b.n > k; *equal: how many of its equals are among the k. */
__device__ inline uint32_t best_kth(const best_list &b, int k, int *equal)
{
    const int lane = threadIdx.x % 32;
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = lane; i < BEST_BINS; i += 32) b.bins[i] = 0;
        __syncwarp();
        for (int i = lane; i < b.n; i += 32)
            if ((b.rank[i] & mask) == found) atomicAdd(&b.bins[b.rank[i] >> shift & 255], 1);
        __syncwarp();
        int own = 0, before; /* lane 0 has the eight highest bins */
        for (int i = 0; i < 8; i++) own += (int)b.bins[255 - lane * 8 - i];
        before = own;
        for (int apart = 1; apart < 32; apart *= 2) {
            const int lower = __shfl_up_sync(~0u, before, apart);
            if (lane >= apart) before += lower;
        }
        before -= own;
        int digit = 255 - lane * 8, left = k - before;
        const bool mine = left > 0 && left <= own;
        for (; mine && left > (int)b.bins[digit]; digit--) left -= (int)b.bins[digit];
        const int from = __ffs(__ballot_sync(~0u, mine)) - 1;
        found |= (uint32_t)__shfl_sync(~0u, digit, from) << shift;
        mask |= 255u << shift;
        k = __shfl_sync(~0u, left, from);
        __syncwarp();
    }
    *equal = k;
    return found;
}

/* Keeps the k best. */
__device__ inline void best_cut(best_list &b, int k)
{
    const int lane = threadIdx.x % 32;
    int equal, kept = 0;
    __syncwarp();
    if (b.n <= k) return;
    b.least = best_kth(b, k, &equal);
    for (int first = 0; first < b.n; first += 32) {
        const bool here = first + lane < b.n;
        const uint32_t rank = here ? b.rank[first + lane] : 0;
        const int32_t index = here ? b.index[first + lane] : 0;
        const unsigned below = (1u << lane) - 1, same = __ballot_sync(~0u, here && rank == b.least);
        const bool keep = here && (rank > b.least || (rank == b.least && __popc(same & below) < equal));
        const unsigned bits = __ballot_sync(~0u, keep);
        __syncwarp();
        if (keep) {
            b.rank[kept + __popc(bits & below)] = rank;
            b.index[kept + __popc(bits & below)] = index;
        }
        kept += __popc(bits);
        equal -= __popc(same) < equal ? __popc(same) : equal;
        __syncwarp();
    }
    b.n = kept;
}

#endif
