/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_few.cuh - entries of long blocks where a multiprocessor has one or two: two teams an entry, two
 * channels a thread, so that each scheduler has warps enough to issue merges in most clocks. The pooled row
 * goes through shared memory to the first of the teams, whose threads have four channels as everywhere.
 */
#ifndef QUERN_CUDA_POOL_SM90_FORWARD_FEW_CUH
#define QUERN_CUDA_POOL_SM90_FORWARD_FEW_CUH

#include "pool/sm90/forward_long.cuh"

enum { FEW_TEAMS = 2, FEW_ENTRIES = POOL_TEAMS / FEW_TEAMS, FEW_THREADS = FEW_TEAMS * POOL_TEAM };

/* Two channels as they stand in memory. */
template <typename T> struct raw_pair {
    uint32_t w[sizeof(T) / 2];
    __device__ __forceinline__ float at(int i) const
    {
        if constexpr (sizeof(T) == 4) return __uint_as_float(w[i]);
        else return i == 0 ? unpack2<T>(w[0]).x : unpack2<T>(w[0]).y;
    }
};

template <typename T> __device__ __forceinline__ raw_pair<T> read_pair(const T *p)
{
    raw_pair<T> c;
    if constexpr (sizeof(T) == 4) {
        const uint2 x = *(const uint2 *)p;
        c.w[0] = x.x;
        c.w[1] = x.y;
    } else {
        c.w[0] = *(const uint32_t *)p;
    }
    return c;
}

template <typename T, typename B> struct taken_pairs {
    raw_pair<T> value[POOL_ROWS], logit[POOL_ROWS];
    raw_pair<B> bias[POOL_ROWS];
};

template <typename T, typename B, typename Place>
__device__ __forceinline__ void take_pairs(taken_pairs<T, B> &to, long_pool_room<T, B, FEW_ENTRIES> &m,
                                           int entry, int channel, Place &at)
{
    m.rows.wait_full(at);
    const auto &from = m.stage[at.stage];
#pragma unroll
    for (int u = 0; u < POOL_ROWS; u++) {
        to.value[u] = read_pair(&from.row[entry][u][0][channel]);
        to.logit[u] = read_pair(&from.row[entry][u][1][channel]);
        to.bias[u] = read_pair(&from.bias[u][channel]);
    }
    m.rows.give_back(at);
    at.advance();
}

template <typename T, typename B>
__device__ __forceinline__ void merge_pairs(pool_sums &sums, const taken_pairs<T, B> &x)
{
#pragma unroll
    for (int u = 0; u < POOL_ROWS; u++)
#pragma unroll
        for (int i = 0; i < 2; i++) merge_row(sums, i, x.logit[u].at(i) + x.bias[u].at(i), x.value[u].at(i));
}

template <typename T, typename B>
__device__ __forceinline__ void few_pool_team(const pool_kernel &a, long_pool_room<T, B, FEW_ENTRIES> &m)
{
    const group g = team_group(m.parts);
    const int entry = g.index / FEW_TEAMS, channel = (int)threadIdx.x % FEW_THREADS * 2;
    const bool stores = g.index % FEW_TEAMS == 0;
    const pool_facts x = pool_facts_of(a, pool_entry_at(a, blockIdx.x + entry * (int64_t)gridDim.x));
    channels norm = {};
    entry_factors angles = {};
    if (stores) {
        norm = norm_weights(a.entry, g);
        angles = entry_angles(a.entry, g, x.position);
    }
    typename long_pool_room<T, B, FEW_ENTRIES>::place at;
    taken_pairs<T, B> even, odd;
    pool_sums sums;
    clear_sums(sums);
    take_pairs(even, m, entry, channel, at);
    for (int j = 0; j < a.ratio; j += 2 * POOL_ROWS) {
        take_pairs(odd, m, entry, channel, at);
        if (x.live) merge_pairs(sums, even);
        if (j + 2 * POOL_ROWS < a.ratio) take_pairs(even, m, entry, channel, at);
        if (x.live) merge_pairs(sums, odd);
    }
    const channels pooled = pooled_of(sums);
    *(float2 *)&m.row[entry][channel] = make_float2(pooled.x[0], pooled.x[1]);
    named_sync(POOL_TEAMS + 1 + entry, FEW_THREADS);
    if (!stores) return;
    const float4 v = *(const float4 *)&m.row[entry][g.lane * GROUP_CHANNELS];
    pool_emit(a, g, x, norm, angles, channels{{v.x, v.y, v.z, v.w}}, m.row[FEW_ENTRIES + entry]);
}

template <typename T, typename B>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    pool_long_few(const __grid_constant__ pool_kernel a, int64_t entries)
{
    extern __shared__ __align__(128) char room[];
    auto &m = *(long_pool_room<T, B, FEW_ENTRIES> *)room;
    const int own = blockIdx.x + (int64_t)gridDim.x < entries ? 2 : 1;
    if (threadIdx.x == 0) {
        m.rows.init(m.FEED_LANES, own * FEW_THREADS);
        mbar_init_done();
    }
    __syncthreads();
    wait_for_before();
    if (threadIdx.x / 32 == POOL_WARPS) long_pool_feed<true>(a, m, entries);
    else if (threadIdx.x < own * FEW_THREADS) few_pool_team(a, m);
}

/* Whether a call is a line. */
template <typename T, typename B>
static bool long_pool_call_of(const pool_kernel &a, int64_t entries, long_pool_call *c)
{
    const int64_t entry = a.ratio * a.proj_row;
    const bool whole = a.start == 0 && a.blocks == a.entries && a.proj_b == a.entries * entry;
    const int64_t live = a.batch == 1 && a.blocks < entries ? a.blocks : entries;
    *c = {entries,
          entry * (int64_t)sizeof(T),
          (const char *)((const T *)a.proj + a.start * a.proj_row),
          (const char *)a.bias_a,
          (int32_t)(a.ratio / POOL_ROWS),
          (int32_t)live};
    return a.plan == NULL && (a.batch == 1 || whole) && a.proj_row == 2 * WIDTH && a.bias_a_row == WIDTH;
}

template <typename T, typename B>
static quern_status pool_sm90_forward_long(const pool_kernel &a, int64_t entries, int multiprocessors,
                                           cudaStream_t stream)
{
    const unsigned grid = (unsigned)(entries < multiprocessors ? entries : multiprocessors);
    typedef long_pool_room<T, B, FEW_ENTRIES> few;
    typedef long_pool_room<T, B, POOL_TEAMS> many;
    static_assert(sizeof(few) <= POOL_SM90_SHARED && sizeof(many) <= POOL_SM90_SHARED, "a block has room");
    if (entries <= FEW_ENTRIES * (int64_t)multiprocessors)
        return launch_behind(stream, pool_long_few<T, B>, dim3(grid), POOL_THREADS, sizeof(few),
                             "pool of a few long blocks", a, entries);
    long_pool_call c;
    const bool plain = a.entry.format == ENTRY_ROWS && !a.entry.hadamard && a.entry.rotated % 2 == 0,
               line = long_pool_call_of<T, B>(a, entries, &c) &&
                      entries <= POOL_TEAMS * (int64_t)multiprocessors;
    return launch_behind(stream,
                         !plain ? pool_long_forward<T, B, false, false>
                         : line ? pool_long_forward<T, B, true, true>
                                : pool_long_forward<T, B, true, false>,
                         dim3(grid), POOL_THREADS, sizeof(many), "pool of long blocks", a, c);
}

#endif
