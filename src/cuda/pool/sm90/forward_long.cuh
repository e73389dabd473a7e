/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_long.cuh - entries of long blocks, HCA's of 128 rows: four teams a block of threads, an entry each,
 * which walk through their rows in step.
 *
 * The biases of an entry in f32 are as many bytes as its rows in 16 bits, and too many to keep, so the four
 * entries share each row of them. A warp feeds: four rows of each entry and of the biases a stage, by bulk
 * copies, three stages of 40 KB (f32 rows: of 72 KB); more of them make memory no faster. Teams take a
 * stage to registers before they merge the one before, and give it back. A merge is some 14 instructions, 0.6
 * of the time that 16-bit rows take at the copy rate. A call's code comes from memory, so entries that are
 * stored as rows have instances of half the instructions. Limit: bytes read over the copy rate.
 */
#ifndef QUERN_CUDA_POOL_SM90_FORWARD_LONG_CUH
#define QUERN_CUDA_POOL_SM90_FORWARD_LONG_CUH

#include "pool/sm90/pooling.cuh"

enum { LONG_POOL_STAGES = 3, LONG_POOL_FEED_REGISTERS = 32, LONG_POOL_TEAM_REGISTERS = 112 };

/* As bulk_load(), of bytes that nobody reads again: they leave L2 before all others, so that biases stay. */
__device__ __forceinline__ uint64_t policy_once()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_load_once(uint32_t to, const void *from, uint32_t bytes, uint32_t bar,
                                               uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1], %2, [%3], %4;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

template <typename T, typename B, int ENTRIES> struct long_pool_stage {
    T row[ENTRIES][POOL_ROWS][2][WIDTH]; /* values and logits */
    B bias[POOL_ROWS][WIDTH];
};

/* Of a block of threads that has so many entries. */
template <typename T, typename B, int ENTRIES> struct long_pool_room {
    typedef ring_place<LONG_POOL_STAGES> place;
    /* Lanes of the feeding warp that bring rows, and then the biases. */
    enum { ROW_LANES = ENTRIES * POOL_ROWS, FEED_LANES = ROW_LANES + POOL_ROWS };
    alignas(128) long_pool_stage<T, B, ENTRIES> stage[LONG_POOL_STAGES];
    float row[POOL_TEAMS][WIDTH];
    team_parts parts;
    ring<LONG_POOL_STAGES> rows;
};

/* A lane has a row of each stage, or of rows without gaps the first one all four. */
template <bool ONE, typename T, typename B, int ENTRIES>
__device__ __forceinline__ void long_pool_feed(const pool_kernel &a, long_pool_room<T, B, ENTRIES> &m,
                                               int64_t entries)
{
    const int lane = (int)threadIdx.x % 32, index = lane / POOL_ROWS, u = lane % POOL_ROWS;
    const bool biases = lane >= m.ROW_LANES;
    const int64_t step = biases ? a.bias_a_row * (int64_t)sizeof(B) : a.proj_row * (int64_t)sizeof(T),
                  bytes = biases ? WIDTH * sizeof(B) : 2 * WIDTH * sizeof(T);
    const int at_once = step == bytes ? POOL_ROWS : 1;
    const uint32_t to =
        biases ? smem_address(&m.stage[0].bias[u][0]) : smem_address(&m.stage[0].row[index][u][0][0]);
    typename long_pool_room<T, B, ENTRIES>::place at;
    const uint64_t once = policy_once();
    if (lane >= m.FEED_LANES) return;
    for (int64_t e0 = blockIdx.x; e0 < (ONE ? blockIdx.x + 1 : entries); e0 += ENTRIES * gridDim.x) {
        const int64_t e = e0 + index * (int64_t)gridDim.x;
        const char *from = (const char *)a.bias_a + u * step;
        bool some = biases;
        if (!biases && e < entries) {
            const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
            some = x.live;
            from = (const char *)((const T *)a.proj + x.view_b * a.proj_b + x.row * a.proj_row) + u * step;
        }
        some = some && u % at_once == 0;
        for (int j = 0; j < a.ratio; j += POOL_ROWS, from += POOL_ROWS * step, at.advance()) {
            m.rows.wait_free(at);
            const uint32_t place = to + at.stage * (uint32_t)sizeof(m.stage[0]),
                           all = (uint32_t)(at_once * bytes);
            if (!some) m.rows.give(at);
            else if (biases) bulk_load(place, from, all, m.rows.expect(at, all));
            else bulk_load_once(place, from, all, m.rows.expect(at, all), once);
        }
    }
}

template <typename T, typename B> struct taken_rows {
    pool_rows<T, POOL_ROWS> row;
    pool_biases<B, POOL_ROWS> bias;
};

template <typename T, typename B, typename Place>
__device__ __forceinline__ void take_rows(taken_rows<T, B> &to, long_pool_room<T, B, POOL_TEAMS> &m, int team,
                                          int channel, Place &at)
{
    m.rows.wait_full(at);
    const auto &from = m.stage[at.stage];
#pragma unroll
    for (int u = 0; u < POOL_ROWS; u++) {
        to.row.value[u] = read_channels(&from.row[team][u][0][channel]);
        to.row.logit[u] = read_channels(&from.row[team][u][1][channel]);
        to.bias.row[u] = read_channels(&from.bias[u][channel]);
    }
    m.rows.give_back(at);
    at.advance();
}

template <typename T, typename B, bool PLAIN, bool ONE>
__device__ __forceinline__ void long_pool_team(const pool_kernel &a, long_pool_room<T, B, POOL_TEAMS> &m,
                                               int64_t entries)
{
    constexpr bool AHEAD = sizeof(T) == 2; /* registers hold no second stage of f32 */
    const group g = team_group(m.parts);
    const int channel = g.lane * GROUP_CHANNELS;
    const bool rotated = channel + GROUP_CHANNELS > WIDTH - a.entry.rotated;
    const channels norm = norm_weights(a.entry, g);
    typename long_pool_room<T, B, POOL_TEAMS>::place at;
    taken_rows<T, B> even, odd;
    for (int64_t e0 = blockIdx.x; e0 < (ONE ? blockIdx.x + 1 : entries); e0 += POOL_TEAMS * gridDim.x) {
        const int64_t e = e0 + g.index * (int64_t)gridDim.x;
        pool_facts x = {};
        if (e < entries) x = pool_facts_of(a, pool_entry_at(a, e));
        const row_facts own = PLAIN && e < entries ? row_facts_of(a, x) : row_facts{};
        entry_factors angles = {};
        if (!PLAIN) angles = entry_angles(a.entry, g, x.position);
        else if (rotated && own.live) angles = pair_angles(a.entry, own.angle, channel);
        pool_sums sums;
        clear_sums(sums);
        if (AHEAD) take_rows(even, m, g.index, channel, at);
        for (int j = 0; j < a.ratio; j += 2 * POOL_ROWS) {
            if (!AHEAD) take_rows(even, m, g.index, channel, at);
            if (AHEAD) take_rows(odd, m, g.index, channel, at);
            if (x.live) merge_taken(sums, even.row, even.bias, values_are_finite(even.row));
            if (!AHEAD) take_rows(odd, m, g.index, channel, at);
            if (AHEAD && j + 2 * POOL_ROWS < a.ratio) take_rows(even, m, g.index, channel, at);
            if (x.live) merge_taken(sums, odd.row, odd.bias, values_are_finite(odd.row));
        }
        if (e >= entries) continue;
        if (PLAIN) row_emit(a, g, own, norm, angles, rotated, sums);
        else pool_emit(a, g, x, norm, angles, pooled_of(sums), m.row[g.index]);
    }
}

/* PLAIN: entries are stored as rows, and each pair of channels that turn is one thread's. ONE: a team has at
 * most one entry. */
template <typename T, typename B, bool PLAIN, bool ONE>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    pool_long_forward(const __grid_constant__ pool_kernel a, int64_t entries)
{
    extern __shared__ __align__(128) char room[];
    auto &m = *(long_pool_room<T, B, POOL_TEAMS> *)room;
    const int team = (int)threadIdx.x / POOL_TEAM;
    int teams = 1; /* that have entries */
    while (teams < POOL_TEAMS && blockIdx.x + teams * (int64_t)gridDim.x < entries) teams++;
    if (threadIdx.x == POOL_WARPS * 32) {
        m.rows.init(m.FEED_LANES, teams * POOL_TEAM);
        mbar_init_done();
    }
    if (team == POOL_TEAMS) { /* gives registers away before it waits: the teams wait for them */
        __syncthreads();
        registers_down<LONG_POOL_FEED_REGISTERS>();
        wait_for_before();
        if (threadIdx.x / 32 == POOL_WARPS) long_pool_feed<ONE>(a, m, entries);
    } else {
        __syncthreads();
        wait_for_before();
        registers_up<LONG_POOL_TEAM_REGISTERS>();
        if (team < teams) long_pool_team<T, B, PLAIN, ONE>(a, m, entries);
    }
}

#endif
