/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * short.cuh - gradients of CSA's blocks of four rows of 512 channels: four teams of 128 threads a block of
 * threads, an entry a team at a time.
 *
 * An entry's eight rows and its gradient are 17 KB, which lanes of a team's first warp copy to shared memory,
 * 2 KB a lane, two entries ahead of the one that is computed; its rows' gradients take their place, and the
 * lane that brought a row stores it. So what is on its way does not depend on registers, which hold weights
 * and sums of biases' gradients (32 each of 128). Shared memory: 12 stages (204 KB), biases (16 KB). A warp
 * executes some 700 instructions an entry, 0.4 of the time that the entry's 33 KB take at the copy rate.
 * Limit: bytes moved over the copy rate.
 */
#ifndef QUERN_CUDA_POOL_SM90_SHORT_CUH
#define QUERN_CUDA_POOL_SM90_SHORT_CUH

#include "pool/sm90/rows.cuh"

enum {
    TEAM = WIDTH / GROUP_CHANNELS,
    TEAMS = 4,
    SHORT_STAGES = 3,
    COPIERS = ROWS + 1,
    FIRST_TEAM_BARRIER = 1
};

/* What is asked for: where the entry's gradients go, its position, which rows there are. */
struct short_facts {
    int64_t first, position; /* elements of d_proj before the block's first row */
    int32_t live, ghost, before, last;
};

template <typename T> struct short_stage {
    T row[ROWS][2][WIDTH]; /* series b of the block before, then series a: values and logits */
    T d_out[WIDTH];
};

template <typename T> struct short_room {
    alignas(128) short_stage<T> stage[TEAMS][SHORT_STAGES];
    float4 bias[ROWS][TEAM];
    short_facts facts[TEAMS][SHORT_STAGES];
    float2 sums[TEAMS][TEAM / 32];
    stage_barriers<SHORT_STAGES> full[TEAMS];
};
static_assert(sizeof(short_room<bf16>) <= POOL_SM90_SHARED, "a block's shared memory");

/* Lane `lane` of the first COPIERS brings its part of entry e. */
template <typename T>
__device__ __forceinline__ void short_ask(const pool_gradients_kernel &k, short_room<T> &m, int team,
                                          int lane, const ring_place<SHORT_STAGES> &at, int64_t e)
{
    const pool_kernel &a = k.pool;
    const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
    const bool some = x.live || x.ghost;
    const int64_t own = x.view_b * a.proj_b + x.row * a.proj_row;
    short_stage<T> &stage = m.stage[team][at.stage];
    if (lane == 0) {
        short_facts &f = m.facts[team][at.stage];
        f.first = x.view_b * a.d_proj_b + x.row * a.d_proj_row;
        f.position = x.position;
        f.live = x.live;
        f.ghost = x.ghost;
        f.before = some && x.before;
        f.last = x.live && x.last;
    }
    const T *from = (const T *)a.proj + own + lane * a.proj_row;
    if (lane < SHORT_RATIO) from = (const T *)a.proj + own + (lane - SHORT_RATIO) * a.proj_row + 2 * WIDTH;
    else if (lane < ROWS) from -= SHORT_RATIO * a.proj_row;
    else from = (const T *)a.d_out + x.view_b * a.d_out_b + x.n * a.d_out_row;
    if (!some || (lane < SHORT_RATIO && !x.before)) {
        m.full[team].arrive(at);
        return;
    }
    const uint32_t bytes = (lane < ROWS ? 2 : 1) * WIDTH * (uint32_t)sizeof(T);
    bulk_load(smem_address(lane < ROWS ? &stage.row[lane][0][0] : &stage.d_out[0]), from, bytes,
              m.full[team].expect(at, bytes));
}

/* The same lane stores its row's gradients. */
template <typename T>
__device__ __forceinline__ void short_store(const pool_gradients_kernel &k, short_room<T> &m, int team,
                                            int lane, const ring_place<SHORT_STAGES> &at,
                                            const short_facts &x)
{
    const bool b = lane < SHORT_RATIO;
    if (lane < ROWS && k.stores && (b ? x.before : x.live) != 0) {
        const int row = lane - SHORT_RATIO; /* of the block; series b is the block's before */
        T *const to = (T *)k.pool.d_proj + x.first + row * k.pool.d_proj_row + (b ? 2 * WIDTH : 0);
        bulk_store((float *)to, smem_address(&m.stage[team][at.stage].row[lane][0][0]),
                   2 * WIDTH * (uint32_t)sizeof(T));
    }
    tma_commit();
}

/* From d, the gradient of an entry, that of the pooled row; the team comes together. */
__device__ __forceinline__ void short_norm(const entry_kernel &e, float2 (&sums)[TEAM / 32], int team,
                                           const channels &norm, const channels &pooled, channels &d,
                                           channels &d_norm)
{
    channels x = pooled;
    float squares = 0.0f, dot = 0.0f;
    entry_round(e, x);
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        squares = fmaf(x.x[i], x.x[i], squares);
        dot = fmaf(d.x[i] * x.x[i], norm.x[i], dot);
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        squares += __shfl_xor_sync(~0u, squares, by);
        dot += __shfl_xor_sync(~0u, dot, by);
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x % TEAM / 32] = make_float2(squares, dot);
    named_sync(FIRST_TEAM_BARRIER + team, TEAM);
    squares = dot = 0.0f;
#pragma unroll
    for (int w = 0; w < TEAM / 32; w++) {
        squares += sums[w].x;
        dot += sums[w].y;
    }
    const float scale = rsqrtf(squares / WIDTH + e.eps), mean = dot / WIDTH * scale * scale;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        d_norm.x[i] = fmaf(d.x[i] * x.x[i], scale, d_norm.x[i]);
        d.x[i] = (d.x[i] * norm.x[i] - x.x[i] * mean) * scale;
    }
}

/* An entry: from its rows to their gradients. */
template <typename T>
__device__ __forceinline__ void short_entry(const pool_kernel &a, short_room<T> &m, int team, int stage,
                                            const short_facts &x, const entry_factors &angles,
                                            const channels &norm, bool no_bias, channels (&bias)[ROWS],
                                            channels &d_norm)
{
    const group g(NULL, TEAM);
    const int channel = g.lane * GROUP_CHANNELS;
    short_stage<T> &own = m.stage[team][stage];
    const thread_rows<T, sizeof(own.row[0]), TEAM> rows = {(char *)&own.row[0][0][channel],
                                                           (char *)&own.row[0][1][channel],
                                                           &m.bias[0][g.lane], no_bias};
    weighted_rows w;
    begin_rows(w);
    if (x.before) take_logits<T, 0, SHORT_RATIO>(w, rows);
    take_logits<T, SHORT_RATIO, ROWS>(w, rows);
    if (x.before) take_sums<T, 0, SHORT_RATIO>(w, rows);
    take_sums<T, SHORT_RATIO, ROWS>(w, rows);
    channels d = unpack4<T>(*(const uint2 *)&own.d_out[channel]), pooled, share = {};
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        pooled.x[i] = w.sum.x[i] != 0.0f ? __fdividef(w.weighted.x[i], w.sum.x[i]) : 0.0f;
    if (entry_has_angles(a.entry, x.position)) {
        entry_rotate(a.entry, g, x.position, true, angles, d, NULL);
        if (a.entry.norm.p != NULL) short_norm(a.entry, m.sums[team], team, norm, pooled, d, share);
    } else d = {}; /* its row is 0 */
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        d_norm.x[i] += x.ghost ? 0.0f : share.x[i];
        d.x[i] = w.sum.x[i] != 0.0f ? __fdividef(d.x[i], w.sum.x[i]) : 0.0f;
    }
    if (x.before) spread_rows<T, 0, SHORT_RATIO>(w, rows, pooled, d, bias);
    if (x.ghost) return;
    spread_rows<T, SHORT_RATIO, ROWS>(w, rows, pooled, d, bias);
}

/* Biases in f32; whether this thread's have one of -inf. */
template <typename T>
__device__ __forceinline__ bool short_biases(const pool_gradients_kernel &k, short_room<T> &m)
{
    const int channel = (int)threadIdx.x % TEAM * GROUP_CHANNELS;
    bool none = false;
    for (int u = (int)threadIdx.x / TEAM; u < ROWS; u += TEAMS) {
        const any_floats &from = u < SHORT_RATIO ? k.bias_b : k.bias_a;
        const int64_t row = u < SHORT_RATIO ? k.pool.bias_b_row : k.pool.bias_a_row,
                      at = u % SHORT_RATIO * row + channel;
        m.bias[u][threadIdx.x % TEAM] = make_float4(from.at(at), from.at(at + 1), from.at(at + 2),
                                                    from.at(at + 3));
    }
    __syncthreads();
    for (int u = 0; u < ROWS; u++) {
        const float4 own = m.bias[u][threadIdx.x % TEAM];
        none = none || fminf(fminf(own.x, own.y), fminf(own.z, own.w)) == -INFINITY;
    }
    return none;
}

/* Series b of a sequence's last block has no gradient, where no block follows. */
template <typename T>
__device__ __forceinline__ void short_clear_last(const pool_kernel &a, int64_t first, int channel)
{
    T *p = (T *)a.d_proj + first + 2 * WIDTH + channel;
    for (int j = 0; j < SHORT_RATIO; j++, p += a.d_proj_row) {
        put_channels<T>(p, {}, GROUP_CHANNELS);
        put_channels<T>(p + WIDTH, {}, GROUP_CHANNELS);
    }
}

/* The teams' sums of a block, in order. */
__device__ __forceinline__ void short_sum_up(const pool_kernel &a, float4 *room, const channels (&bias)[ROWS],
                                             const channels &d_norm)
{
    enum { SUMS = (ROWS + 1) * TEAM };
    __syncthreads();
    float4 *const own = room + threadIdx.x / TEAM * SUMS + threadIdx.x % TEAM;
#pragma unroll
    for (int u = 0; u < ROWS; u++) own[u * TEAM] = float4_of(bias[u]);
    own[ROWS * TEAM] = float4_of(d_norm);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < SUMS; i += TEAMS * TEAM) {
        float4 all = room[i];
        for (int t = 1; t < TEAMS; t++) {
            const float4 x = room[t * SUMS + i];
            all = make_float4(all.x + x.x, all.y + x.y, all.z + x.z, all.w + x.w);
        }
        const int u = i / TEAM;
        float *const to = u < ROWS ? a.parts + ((int64_t)blockIdx.x * ROWS + u) * WIDTH
                                   : a.norm_parts + (int64_t)blockIdx.x * WIDTH;
        *(float4 *)(to + i % TEAM * GROUP_CHANNELS) = all;
    }
}

template <typename T>
__global__ void __launch_bounds__(TEAMS *TEAM, 1)
    pool_short_gradients(const __grid_constant__ pool_gradients_kernel k)
{
    extern __shared__ __align__(128) char room[];
    short_room<T> &m = *(short_room<T> *)room;
    const pool_kernel &a = k.pool;
    const int team = (int)threadIdx.x / TEAM, thread = (int)threadIdx.x % TEAM;
    const group g(NULL, TEAM);
    const int64_t step = (int64_t)gridDim.x * TEAMS, first = (int64_t)blockIdx.x * TEAMS + team;
    const bool copies = thread < COPIERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS; i++) m.full[i].init(COPIERS);
        mbar_init_done();
    }
    const bool no_bias = short_biases(k, m);
    const channels norm = norm_weights(a.entry, g);
    ring_place<SHORT_STAGES> at, asked;
    for (int i = 0; i < SHORT_STAGES - 1; i++) {
        if (copies && first + i * step < k.entries) short_ask(k, m, team, thread, asked, first + i * step);
        asked.advance();
    }
    named_sync(FIRST_TEAM_BARRIER + team, TEAM);
    channels bias[ROWS] = {}, d_norm = {};
    for (int64_t e = first; e < k.entries; e += step) {
        const short_facts x = m.facts[team][at.stage];
        const entry_factors angles = entry_angles(a.entry, g, x.position);
        m.full[team].wait(at);
        if (x.live || x.ghost)
            short_entry(a, m, team, at.stage, x, angles, norm, no_bias, bias, d_norm);
        if (x.last && !a.followed && k.stores) short_clear_last<T>(a, x.first, thread * GROUP_CHANNELS);
        async_fence();
        named_sync(FIRST_TEAM_BARRIER + team, TEAM);
        if (copies) {
            short_store(k, m, team, thread, at, x);
            wait_read_but_last(); /* the entry before: its stage is free */
            const int64_t next = e + (SHORT_STAGES - 1) * step;
            if (next < k.entries) short_ask(k, m, team, thread, asked, next);
        }
        asked.advance();
        at.advance();
    }
    if (copies) tma_wait_written();
    short_sum_up(a, (float4 *)room, bias, d_norm);
}

template <typename T>
static quern_status pool_sm90_short(const pool_gradients_kernel &a, cudaStream_t stream)
{
    return launch_cluster(stream, pool_short_gradients<T>, dim3((unsigned)a.pool.runs), TEAMS * TEAM,
                          sizeof(short_room<T>), "pool's gradients", 1, false, a);
}

#endif
