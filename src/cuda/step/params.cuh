/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - a step's sequences as step_tokens has left them, whose offsets and positions are sound. */
#ifndef QUERN_CUDA_STEP_PARAMS_CUH
#define QUERN_CUDA_STEP_PARAMS_CUH

#include "cache/params.cuh"

/* Positions and their sums with counts are below 2^31, so quotients take 32 bits. */

/* Sequence b: its rows of the call, also where it does not run, and the entries that become whole. */
struct step_place {
    int64_t slot, first, row, count, whole, made; /* whole: entries before */
    bool live;
};

__device__ __forceinline__ step_place step_place_at(const step_view &s, int64_t ratio, int64_t b)
{
    const int32_t *const rows = s.rows + b * s.rows_s[0];
    step_place p;
    p.slot = step_slot(s, b);
    p.first = s.positions[b * s.positions_s];
    p.row = rows[0];
    p.count = rows[s.rows_s[1]] - p.row;
    p.live = p.slot >= 0 && p.count > 0;
    p.whole = ratio > 0 ? (uint32_t)p.first / (uint32_t)ratio : 0;
    p.made = ratio > 0 ? (uint32_t)(p.first + p.count) / (uint32_t)ratio - p.whole : 0;
    return p;
}

/* The sums of all threads of a block of WARPS warps, and whether one of them found something bad. */
struct step_sums {
    int64_t before, total;
    bool bad;
};

template <int WARPS>
__device__ __forceinline__ step_sums add_threads(int64_t before, int64_t total, bool bad = false)
{
    __shared__ int64_t parts[WARPS][2];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        before += __shfl_xor_sync(~0u, before, by);
        total += __shfl_xor_sync(~0u, total, by);
    }
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32][0] = before;
        parts[threadIdx.x / 32][1] = total;
    }
    step_sums sums = {0, 0, __syncthreads_or(bad) != 0};
    for (int w = 0; w < WARPS; w++) {
        sums.before += parts[w][0];
        sums.total += parts[w][1];
    }
    return sums;
}

#endif
