/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_short.cuh - entries of CSA's blocks of four rows of 16 bits: four teams a block of threads, an
 * entry a team at a time.
 *
 * A warp feeds: an entry's eight rows are 16 KB, 2 KB a lane, three stages a team (192 KB). A team takes its
 * entry's rows to registers at once and gives the stage back before it merges, so nearly all stages are on
 * their way, whatever the merges take. Biases stand in shared memory (16 KB). A warp executes some 670
 * instructions an entry, 0.6 of the time that its 17 KB take at the copy rate. Limit: bytes moved over the
 * copy rate.
 */
#ifndef QUERN_CUDA_POOL_SM90_FORWARD_SHORT_CUH
#define QUERN_CUDA_POOL_SM90_FORWARD_SHORT_CUH

#include "pool/sm90/pooling.cuh"

enum { SHORT_POOL_STAGES = 3, SHORT_POOL_FEED_REGISTERS = 64, SHORT_POOL_TEAM_REGISTERS = 104 };

/* Above it, a logit and a bias have a finite sum. */
constexpr float LOGIT_LOW = -1e38f;

template <typename T> struct short_pool_room {
    alignas(128) T row[POOL_TEAMS][SHORT_POOL_STAGES][ROWS][2][WIDTH]; /* as short_stage */
    float bias[ROWS][WIDTH];
    row_facts facts[POOL_TEAMS][SHORT_POOL_STAGES];
    team_parts parts;
    ring<SHORT_POOL_STAGES> rows[POOL_TEAMS];
};
static_assert(sizeof(short_pool_room<bf16>) <= POOL_SM90_SHARED, "a block's shared memory");

template <typename T>
__device__ __forceinline__ void short_pool_feed(const pool_kernel &a, short_pool_room<T> &m, int64_t entries)
{
    const int lane = (int)threadIdx.x % 32, team = lane / ROWS, u = lane % ROWS;
    const bool b = u < SHORT_RATIO;
    const int64_t own = (u - SHORT_RATIO) * a.proj_row + (b ? 2 * WIDTH : 0);
    ring_place<SHORT_POOL_STAGES> at;
    for (int64_t e = (int64_t)blockIdx.x * POOL_TEAMS + team; e < entries;
         e += (int64_t)gridDim.x * POOL_TEAMS, at.advance()) {
        const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
        const T *const from = (const T *)a.proj + x.view_b * a.proj_b + x.row * a.proj_row + own;
        const uint32_t bytes = 2 * WIDTH * sizeof(T);
        m.rows[team].wait_free(at);
        if (u == 0) m.facts[team][at.stage] = row_facts_of(a, x);
        if (x.live && (!b || x.before))
            bulk_load(smem_address(&m.row[team][at.stage][u][0][0]), from, bytes,
                      m.rows[team].expect(at, bytes));
        else m.rows[team].give(at);
    }
}

/* Merges rows FIRST ... of an entry. low: has_low_bias(). */
template <typename T, int FIRST>
__device__ __forceinline__ void merge_series(pool_sums &sums, const pool_rows<T, ROWS> &rows,
                                             const float (&bias)[ROWS][WIDTH], int channel, bool low)
{
    pool_rows<T, SHORT_RATIO> own;
    pool_biases<float, SHORT_RATIO> own_bias;
    uint32_t least = rows.logit[FIRST].w[0];
#pragma unroll
    for (int u = 0; u < SHORT_RATIO; u++) {
        own.value[u] = rows.value[FIRST + u];
        own.logit[u] = rows.logit[FIRST + u];
        own_bias.row[u] = read_channels(&bias[FIRST + u][channel]);
        least = least2<T>(least2<T>(least, own.logit[u].w[0]), own.logit[u].w[1]);
    }
    const float2 pair = unpack2<T>(least);
    merge_taken(sums, own, own_bias, !low && fminf(pair.x, pair.y) > LOGIT_LOW);
}

/* Whether one of a thread's biases is so low that a sum with a logit above LOGIT_LOW may be -inf. */
__device__ __forceinline__ bool has_low_bias(const float (&bias)[ROWS][WIDTH], int channel)
{
    bool low = false;
    for (int u = 0; u < ROWS; u++) {
        const float4 x = *(const float4 *)&bias[u][channel];
        low = low || !(fminf(fminf(x.x, x.y), fminf(x.z, x.w)) > LOGIT_LOW);
    }
    return low;
}

template <typename T>
__device__ __forceinline__ void short_pool_team(const pool_kernel &a, short_pool_room<T> &m, int64_t entries)
{
    const group g = team_group(m.parts);
    const int channel = g.lane * GROUP_CHANNELS;
    const bool low = has_low_bias(m.bias, channel);
    const bool rotated = channel + GROUP_CHANNELS > WIDTH - a.entry.rotated;
    const channels norm = norm_weights(a.entry, g);
    ring<SHORT_POOL_STAGES> &stages = m.rows[g.index];
    ring_place<SHORT_POOL_STAGES> at;
    for (int64_t e = (int64_t)blockIdx.x * POOL_TEAMS + g.index; e < entries;
         e += (int64_t)gridDim.x * POOL_TEAMS, at.advance()) {
        stages.wait_full(at);
        const row_facts x = m.facts[g.index][at.stage];
        const T(&from)[ROWS][2][WIDTH] = m.row[g.index][at.stage];
        entry_factors angles = {};
        pool_rows<T, ROWS> rows;
        if (rotated && x.live) angles = pair_angles(a.entry, x.angle, channel);
#pragma unroll
        for (int u = 0; u < ROWS; u++) {
            rows.value[u] = read_channels(&from[u][0][channel]);
            rows.logit[u] = read_channels(&from[u][1][channel]);
        }
        stages.give_back(at);
        pool_sums sums;
        clear_sums(sums);
        if (x.live && x.before) merge_series<T, 0>(sums, rows, m.bias, channel, low);
        if (x.live) merge_series<T, SHORT_RATIO>(sums, rows, m.bias, channel, low);
        row_emit(a, g, x, norm, angles, rotated, sums);
    }
}

template <typename T, typename B>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    pool_short_forward(const __grid_constant__ pool_kernel a, int64_t entries)
{
    extern __shared__ __align__(128) char room[];
    short_pool_room<T> &m = *(short_pool_room<T> *)room;
    const int team = (int)threadIdx.x / POOL_TEAM;
    if (threadIdx.x == 0) {
        for (int i = 0; i < POOL_TEAMS; i++) m.rows[i].init(ROWS, POOL_TEAM);
        mbar_init_done();
    }
    for (int i = (int)threadIdx.x; i < ROWS * WIDTH; i += POOL_THREADS) {
        const int u = i / WIDTH, row = u % SHORT_RATIO;
        const B *const from = (const B *)(u < SHORT_RATIO ? a.bias_b : a.bias_a);
        m.bias[u][i % WIDTH] =
            to_float(from[row * (u < SHORT_RATIO ? a.bias_b_row : a.bias_a_row) + i % WIDTH]);
    }
    __syncthreads();
    if (team == POOL_TEAMS) {
        registers_down<SHORT_POOL_FEED_REGISTERS>();
        if (threadIdx.x / 32 == POOL_WARPS) short_pool_feed<T>(a, m, entries);
    } else {
        registers_up<SHORT_POOL_TEAM_REGISTERS>();
        short_pool_team<T>(a, m, entries);
    }
}

template <typename T, typename B>
static quern_status pool_sm90_forward_short(const pool_kernel &a, int64_t entries, int multiprocessors,
                                            cudaStream_t stream)
{
    const int64_t blocks = (entries + POOL_TEAMS - 1) / POOL_TEAMS;
    const unsigned grid = (unsigned)(blocks < multiprocessors ? blocks : multiprocessors);
    return launch_cluster(stream, pool_short_forward<T, B>, dim3(grid), POOL_THREADS,
                          sizeof(short_pool_room<T>), "pool of short blocks", 1, false, a, entries);
}

#endif
