/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dkv.cuh - dK and dV of attention on Hopper for bf16 and f16, where keys are a range and a
 * head dim exceeds 128; dQ is dq.cuh's. The products, the owner of every sum and the walk
 * over the rows are sm90_backward/kernel.cuh's, without dQ: four products, no order among blocks.
 *
 *   P = exp(S - lse) row_scale in 16 bits, dS = P (dP - delta / row_scale), dV = P^T dO, dK = scale dS^T Q.
 * dS is made of P in 16 bits, and in its registers: so S and dP are never held together.
 *
 * 192/128: a block owns 128 keys, 64 each of two computing warpgroups, which run free of each other: the
 * one's exponentials overlap the other's products.
 * 256: dK and dV of 64 keys take 256 registers a thread, so a block owns 64 keys and each warpgroup one of
 * them: the first has S, P and dV, the second dP, dS and dK. P goes from the one to the other, thread to
 * thread, through two buffers in shared memory.
 *
 * Registers: 192/128: dK 96, dV 64, S or dP 32, P 16 of 240; 256: dK or dV 128, S or dP 32, P 16 of 232.
 * Shared memory: 192/128: K, V 80 KB, Q and dO 120 KB in three stages; 256: K, V 64 KB, Q and dO 128 KB in
 * two stages, P 16 KB. Limit: the tensor cores, 2560 clocks for 64 rows and 128 keys at 192/128 (shared
 * memory 2240), 2048 for 64 and 64 at 256, where shared memory is the limit with 2176.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_DQ_DKV_DKV_CUH
#define QUERN_CUDA_ATTEND_SM90_DQ_DKV_DKV_CUH

#include "common/launch.cuh"
#include "attend/sm90_backward/parts.cuh"

namespace sm90_backward
{

enum { P_FULL = 2, P_FREE = 4 }; /* named barriers of each buffer of P */

template <int DK, int DV> struct keys_shared {
    enum { SPLIT = DV > 128, KEYS = SPLIT ? 64 : 128, STAGES = SPLIT ? 2 : 3 };
    typedef uint16_t panel_row[64];
    panel_row k[DK / 64][KEYS], v[DV / 64][KEYS], q[STAGES][DK / 64][MOST_ROWS],
        d_o[STAGES][DV / 64][MOST_ROWS];
    uint4 p[SPLIT ? 2 : 0][MOST_ROWS / 16][128]; /* as 128 threads hold it */
    statistics stats[STAGES];
    /* Barriers: K and V are there; rows, and their statistics; both computing warpgroups. */
    uint64_t own_full, full[STAGES], free[STAGES], stats_full[STAGES], clean;
    key_block block;
};

/* Offsets into shared memory, where addresses are computed in 32 bits. */
template <int DK, int DV> struct keys_layout {
    typedef keys_shared<DK, DV> memory;
    static constexpr bool SPLIT = memory::SPLIT; /* dK and dV in different warpgroups */
    static constexpr int DIM_K = DK, DIM_V = DV, KEYS = memory::KEYS, ROWS = MOST_ROWS,
                         STAGES = memory::STAGES;
    static constexpr int FEED = SPLIT ? 40 : 24, COMPUTE = SPLIT ? 232 : 240; /* registers a thread */
    static constexpr int Q_BYTES = sizeof(memory::q[0]), DO_BYTES = sizeof(memory::d_o[0]),
                         P_BYTES = sizeof(memory::p[0]);
    static constexpr int K = offsetof(memory, k), V = offsetof(memory, v), Q = offsetof(memory, q),
                         DO = offsetof(memory, d_o), P = offsetof(memory, p), STAT = offsetof(memory, stats);
    static constexpr int CLEAN = offsetof(memory, clean), BLOCK = offsetof(memory, block);
    typedef ring_place<STAGES> place;
    typedef barriers_at<offsetof(memory, own_full), 1> own_full;
    typedef barriers_at<offsetof(memory, full), STAGES> full;
    typedef barriers_at<offsetof(memory, free), STAGES> free;
    typedef barriers_at<offsetof(memory, stats_full), STAGES> stats_full;
    typedef barriers_at<CLEAN, 1> clean;
    static constexpr bool FOURS = false, HALVES = false;
    static_assert(FEED + GROUPS * COMPUTE <= 504,
                  "setmaxnreg waits for registers that a launch does not have");
    static_assert(sizeof(memory) <= 227 * 1024, "more than a block can have");
};

/* What a computing warpgroup knows of its block. */
struct key_walk {
    char *smem;
    uint32_t base;
    int group, place, key; /* of this thread's first key: in the block, in the sequence */
    int steps;
};

/* A computing warpgroup with dK and dV of its 64 keys. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void compute_keys(const attend_kernel &a, const key_block &b, const key_walk &w)
{
    typedef keys_layout<DK, DV> at;
    const uint32_t ak = w.base + at::K + w.group * 64 * 128, av = w.base + at::V + w.group * 64 * 128;
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
    const key_rows rows = find_key_rows(a, sequence_of(b), w.key);
    uint32_t p[at::ROWS / 16][4];
    typename at::place now;
    auto stats = [&]() { return (const statistics *)(w.smem + at::STAT) + now.stage; };
    if (w.steps > 0) {
        float s[at::ROWS / 8][4];
        at::own_full::wait(w.base, {});
        at::full::wait(w.base, {});
        rows_by_keys<T, at::ROWS, at::KEYS, DK>(s, ak, w.base + at::Q);
        at::stats_full::wait(w.base, {});
        wg_wait<0>(s);
        probabilities_of<T>(s, p, stats(), a, rows);
    }
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const typename at::place done = now;
        const uint32_t q = w.base + at::Q + now.stage * at::Q_BYTES,
                       g = w.base + at::DO + now.stage * at::DO_BYTES;
        float s[at::ROWS / 8][4], dp[at::ROWS / 8][4];
        rows_by_keys<T, at::ROWS, at::KEYS, DV>(dp, av, g);
        const bool unclean = stats()->part & 2;
        if (unclean) {
            wg_wait<0>(dp);
            clean_rows<T, at::ROWS, DK, DV>(w.smem + at::Q + now.stage * at::Q_BYTES,
                                            w.smem + at::DO + now.stage * at::DO_BYTES, w.base + at::CLEAN,
                                            [&](const char *rows_q, const char *rows_do) {
                                                spread_rows<T, at::ROWS>(dk, rows_q, stats(), rows, true);
                                                spread_rows<T, at::ROWS>(dv, rows_do, stats(), rows, false);
                                            });
        }
        wg_start();
        keys_by_rows<T, at::ROWS, DV>(dv, p, g);
        wg_wait<0>(dp);
        wg_wait<0>(dv);
        score_gradients_of<T>(p, dp, stats(), rows);
        now.advance();
        /* After the last step S^T is of what the stage held before, and so is P^T: nobody reads them. */
        if (t + 1 < w.steps) at::full::wait(w.base, now);
        rows_by_keys<T, at::ROWS, at::KEYS, DK>(s, ak, w.base + at::Q + now.stage * at::Q_BYTES);
        keys_by_rows<T, at::ROWS, DK>(dk, p, q);
        if (t + 1 < w.steps) at::stats_full::wait(w.base, now);
        wg_wait<0>(s);
        wg_wait<0>(dk);
        at::free::arrive(w.base, done); /* each lane's, for what it read */
        probabilities_of<T>(s, p, stats(), a, rows);
    }
    store_keys<T, at::KEYS>(dk, a, b, w.place, d_k_of(a));
    store_keys<T, at::KEYS>(dv, a, b, w.place, d_v_of(a));
}

/* The warpgroup with dV, where dK is another's. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void compute_values(const attend_kernel &a, const key_block &b, const key_walk &w)
{
    typedef keys_layout<DK, DV> at;
    float dv[DV / 8][4] = {}, s[at::ROWS / 8][4];
    const key_rows rows = find_key_rows(a, sequence_of(b), w.key);
    uint32_t p[at::ROWS / 16][4];
    if (w.steps > 0) {
        at::own_full::wait(w.base, {});
        at::full::wait(w.base, {});
        rows_by_keys<T, at::ROWS, at::KEYS, DK>(s, w.base + at::K, w.base + at::Q);
    }
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const typename at::place now = at::place::of(t), next = at::place::of(t + 1);
        const int stage = now.stage, buffer = t & 1;
        const statistics *st = (const statistics *)(w.smem + at::STAT) + stage;
        at::stats_full::wait(w.base, now);
        wg_wait<0>(s);
        probabilities_of<T>(s, p, st, a, rows);
        if (t >= 2) named_sync(P_FREE + buffer, 256);
        uint4 *to = (uint4 *)(w.smem + at::P + buffer * at::P_BYTES) + (threadIdx.x & 127);
#pragma unroll
        for (int i = 0; i < at::ROWS / 16; i++) to[i * 128] = make_uint4(p[i][0], p[i][1], p[i][2], p[i][3]);
        named_arrive(P_FULL + buffer, 256);
        if (st->part & 2)
            clean_rows<T, at::ROWS, DK, DV>(
                w.smem + at::Q + stage * at::Q_BYTES, w.smem + at::DO + stage * at::DO_BYTES,
                w.base + at::CLEAN,
                [&](const char *, const char *g) { spread_rows<T, at::ROWS>(dv, g, st, rows, false); });
        wg_start();
        keys_by_rows<T, at::ROWS, DV>(dv, p, w.base + at::DO + stage * at::DO_BYTES);
        /* After the last step, as in compute_keys(). */
        if (t + 1 < w.steps) at::full::wait(w.base, next);
        rows_by_keys<T, at::ROWS, at::KEYS, DK>(s, w.base + at::K, w.base + at::Q + next.stage * at::Q_BYTES);
        wg_wait<1>(dv);
        at::free::arrive(w.base, now); /* each lane's, for what it read */
    }
    wg_wait<0>(s);
    store_keys<T, at::KEYS>(dv, a, b, w.place, d_v_of(a));
}

/* The warpgroup with dK, where dV is another's. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void compute_scores(const attend_kernel &a, const key_block &b, const key_walk &w)
{
    typedef keys_layout<DK, DV> at;
    float dk[DK / 8][4] = {}, dp[at::ROWS / 8][4];
    const key_rows rows = find_key_rows(a, sequence_of(b), w.key);
    uint32_t p[at::ROWS / 16][4];
    if (w.steps > 0) {
        at::own_full::wait(w.base, {});
        at::full::wait(w.base, {});
        rows_by_keys<T, at::ROWS, at::KEYS, DV>(dp, w.base + at::V, w.base + at::DO);
    }
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const typename at::place now = at::place::of(t), next = at::place::of(t + 1);
        const int stage = now.stage, buffer = t & 1;
        const statistics *st = (const statistics *)(w.smem + at::STAT) + stage;
        at::stats_full::wait(w.base, now);
        named_sync(P_FULL + buffer, 256);
        const uint4 *from = (const uint4 *)(w.smem + at::P + buffer * at::P_BYTES) + (threadIdx.x & 127);
#pragma unroll
        for (int i = 0; i < at::ROWS / 16; i++) {
            const uint4 x = from[i * 128];
            p[i][0] = x.x;
            p[i][1] = x.y;
            p[i][2] = x.z;
            p[i][3] = x.w;
        }
        if (t + 2 < w.steps) named_arrive(P_FREE + buffer, 256);
        wg_wait<0>(dp);
        score_gradients_of<T>(p, dp, st, rows);
        if (st->part & 2)
            clean_rows<T, at::ROWS, DK, DV>(
                w.smem + at::Q + stage * at::Q_BYTES, w.smem + at::DO + stage * at::DO_BYTES,
                w.base + at::CLEAN,
                [&](const char *q, const char *) { spread_rows<T, at::ROWS>(dk, q, st, rows, true); });
        wg_start();
        keys_by_rows<T, at::ROWS, DK>(dk, p, w.base + at::Q + stage * at::Q_BYTES);
        /* After the last step, as in compute_keys(). */
        if (t + 1 < w.steps) at::full::wait(w.base, next);
        rows_by_keys<T, at::ROWS, at::KEYS, DV>(dp, w.base + at::V,
                                                w.base + at::DO + next.stage * at::DO_BYTES);
        wg_wait<1>(dk);
        at::free::arrive(w.base, now); /* each lane's, for what it read */
    }
    wg_wait<0>(dp);
    store_keys<T, at::KEYS>(dk, a, b, w.place, d_k_of(a));
}

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_backward_keys_sm90(const __grid_constant__ attend_kernel a,
                              const __grid_constant__ sm90_backward_plan plan, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef keys_layout<DK, DV> at;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    key_block &b = *(key_block *)(smem + at::BLOCK);
    if (threadIdx.x < 32 && !find_keys<at::KEYS, at::ROWS>(a, plan, take_ticket(plan), &b) &&
        threadIdx.x == 0)
        b.tiles = -1;
    if (threadIdx.x == 0) {
        at::own_full::init(base, 0, 1);
        for (int i = 0; i < at::STAGES; i++) {
            at::full::init(base, i, 1);
            at::free::init(base, i, 128 * GROUPS);
            at::stats_full::init(base, i, WARP_ARRIVALS);
        }
        at::clean::init(base, 0, 128 * GROUPS);
        mbar_init_done();
    }
    __syncthreads();
    if (b.tiles < 0) return;
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<at::FEED>();
        if (warp == 0) feed<at>(a, plan, b, m, base);
        else if (warp == 1) fetch_statistics<T, at>(a, plan, b, smem, base);
    } else {
        registers_up<at::COMPUTE>();
        const int place = (at::SPLIT ? 0 : (group - 1) * 64) + (warp & 3) * 16 + ((threadIdx.x & 31) >> 2);
        const key_walk w = {smem, base, group - 1, place, b.key0 + place, b.tiles * a.hs};
        if constexpr (!at::SPLIT) compute_keys<T, DK, DV>(a, b, w);
        else if (group == 1) compute_values<T, DK, DV>(a, b, w);
        else compute_scores<T, DK, DV>(a, b, w);
    }
#endif
}

template <typename T, int DK, int DV>
static quern_status run_keys(const attend_args *args, const attend_launch &l, const sm90_backward_plan &plan,
                             cudaStream_t stream)
{
    typedef keys_layout<DK, DV> at;
    maps m = {};
    quern_status status = tma_describe(&m.q, args->q, 1, at::ROWS);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, 1, at::ROWS);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, at::KEYS);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, at::KEYS);
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)plan.pieces * (unsigned)plan.kv_heads * (unsigned)l.kernel.splits;
    return launch_shared({stream, NULL}, attend_backward_keys_sm90<T, DK, DV>, dim3(blocks),
                         128 * (GROUPS + 1), sizeof(keys_shared<DK, DV>), "attend_backward_keys_sm90",
                         l.kernel, plan, m);
}

} // namespace sm90_backward

#endif
