/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward.cuh - entries from projections.
 *
 * A group of threads, four channels each, makes one entry after another. Each element of the projections is
 * read once: an entry reads series b of the block before and series a of its own. Rows are read four or eight
 * at a time, the next ones (of the same entry or of the next) before these are merged. A merge is some 16
 * instructions a channel and row, so at C 512 and 16-bit rows they take half of the time that memory takes.
 * Limit: bytes moved over the copy rate.
 */
#ifndef QUERN_CUDA_POOL_FORWARD_CUH
#define QUERN_CUDA_POOL_FORWARD_CUH

#include "pool/emit.cuh"
#include "pool/short.cuh"

/* Registers of a thread, and blocks of 128 threads that an SM then holds. */
enum { FORWARD_REGISTERS = 128, FORWARD_BLOCKS = 4 };

template <typename T, typename B, int N, bool HOLD, bool WIDE>
__global__ void __maxnreg__(FORWARD_REGISTERS)
    pool_forward(const __grid_constant__ pool_kernel a, int64_t entries, int lanes)
{
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[PARTS];
    const group g(parts, lanes);
    float *const row = rows_shared + g.index * lanes * GROUP_CHANNELS;
    const int64_t groups = blockDim.x / lanes, first = blockIdx.x * groups + g.index;
    const channels norm = norm_weights(a.entry, g);
    pool_walk<T, B, N, HOLD, WIDE>(
        a, g, first, gridDim.x * groups, entries,
        [&](const pool_entry &, const pool_facts &x, const entry_factors &angles, const pool_sums &sums) {
            pool_emit(a, g, x, norm, angles, pooled_of(sums), row);
        });
}

/* Blocks that a GPU holds at a time walk over the entries. */
template <typename T, typename B>
static quern_status pool_forward_of(const pool_kernel &a, int64_t entries, int multiprocessors,
                                    cudaStream_t stream)
{
    const int lanes = group_lanes(a.width), groups = groups_of_block(a.width), threads = groups * lanes;
    const bool held = a.wide && a.ratio <= HELD_ROWS;
    const int64_t blocks = (entries + groups - 1) / groups, most = (int64_t)multiprocessors * FORWARD_BLOCKS;
    const unsigned grid = (unsigned)(blocks < most ? blocks : most);
    const size_t bytes = (size_t)(threads * GROUP_CHANNELS) * sizeof(float);
    if (grid == 0) return QUERN_OK;
    if constexpr (sizeof(T) == 2)
        if (pool_is_short(a)) return pool_short_run<T, B>(a, entries, multiprocessors, stream);
    if (!a.wide)
        pool_forward<T, B, HELD_ROWS, false, false><<<grid, threads, bytes, stream>>>(a, entries, lanes);
    else if (held)
        pool_forward<T, B, HELD_ROWS, true, true><<<grid, threads, bytes, stream>>>(a, entries, lanes);
    else pool_forward<T, B, long_rows<T>(), false, true><<<grid, threads, bytes, stream>>>(a, entries, lanes);
    return LAUNCHED("pool");
}

#endif
