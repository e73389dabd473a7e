/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk_64.cuh - the warpgroups with keys of kernel.cuh at head dim 64; dQ is another's (dq_warpgroup.cuh).
 *
 * A step's products are short there, and a warp that starts them waits until most are done. So a warpgroup
 * starts four of them at once: S and dP of a step, then dV and dK of the step before, beside which it makes P
 * and dS, in f32 and in the places of S and dP: the registers of P and dS in 16 bits are read until dV and dK
 * are done. K is an operand in registers: with both operands of S in shared memory, the products would take
 * all of its bandwidth, and loads and stores would wait.
 *
 * Registers: dK 32, dV 32, S 32, dP 32, P and dS in 16 bits 32, K 16 of 208.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_WALK_64_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_WALK_64_CUH

#include "attend/sm90_backward/dq_warpgroup.cuh"
#include "attend/sm90_backward/softmax.cuh"

namespace sm90_backward
{

/* acc = 64 keys, in registers, times the ROWS rows of a stage. */
template <typename T, int ROWS, int DIM>
__device__ __forceinline__ void rows_by_held(float (&acc)[ROWS / 8][4], const uint32_t (&keys)[DIM / 16][4],
                                             uint32_t rows)
{
    const uint64_t y0 = wg_fresh(wg_tile(rows, 0));
    wg_start();
#pragma unroll
    for (int c = 0; c < DIM; c += 16) {
        const uint64_t y = wg_further(y0, (c >> 6) * (ROWS * 128) + (c & 63) * 2);
        if (c == 0) wg_rs_wide<T, ROWS, false, false>(acc, keys[c / 16], y);
        else wg_rs_wide<T, ROWS, true, false>(acc, keys[c / 16], y);
    }
    wg_commit();
}

/* The steps of a block that has some. */
template <typename T, typename AT, int OK, int OV>
__device__ __forceinline__ void walk_64(with_dq_warpgroup<T, AT> &w, int key, float (&dk)[OK][4],
                                        float (&dv)[OV][4])
{
    constexpr int DK = AT::DIM_K, DV = AT::DIM_V, NT = ROWS / 8;
    const uint32_t base = w.base;
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const key_rows rows = find_key_rows(w.a, sequence_of(w.b), key);
    float s[NT][4], dp[NT][4];
    uint32_t p[NT / 2][4], ds[NT / 2][4], own_k[DK / 16][4];
    auto start_scores = [&](int t) {
        const int stage = t % AT::STAGES;
        rows_by_held<T, ROWS, DK>(s, own_k, base + AT::Q + stage * AT::Q_BYTES);
        rows_by_keys<T, ROWS, KEYS, DV>(dp, base + AT::V + w.group * 64 * 128,
                                        base + AT::DO + stage * AT::DO_BYTES);
    };
    auto round = [&](const statistics *st) {
        if (st->part != 0) {
            const uint32_t seen = find_seen(st, rows);
            round_seen<T, true>(s, p, seen);
            round_seen<T, true>(dp, ds, seen);
        } else {
            round_seen<T, false>(s, p, 0);
            round_seen<T, false>(dp, ds, 0);
        }
    };
    AT::own_full::wait(base, {});
    w.nonfinite = search_keys<T, DK>(w.smem + AT::K, &w.b.nonfinite);
#pragma unroll
    for (int c = 0; c < DK; c += 16)
        load_a<KEYS>(own_k[c / 16], base + AT::K, w.group * 64 + warp * 16, c, lane);
    AT::full::wait(base, {});
    start_scores(0);
    AT::stats_full::wait(base, {});
    wg_wait<0>(s);
    wg_wait<0>(dp);
    const statistics *st = w.statistics_of(0);
    probabilities_in_place(s, st, w.a);
    score_gradients_in_place(s, dp, st);
    round(st);
    if (st->part & 2) w.clean(0, rows, dk, dv);
    w.leave_ds(ds, 0, st->part, true);
    bool loaded = false, fetched = false; /* of the next step, tested a step ahead */
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const auto here = AT::place::of(t), next = AT::place::of(t + 1), later = AT::place::of(t + 2);
        const bool more = t + 1 < w.steps;
        if (more && !loaded) AT::full::wait(base, next);
        start_scores(t + 1); /* behind the last step of what the stage holds, and nobody reads them */
        wg_start();
        keys_by_rows<T, ROWS, DV>(dv, p, base + AT::DO + here.stage * AT::DO_BYTES);
        keys_by_rows<T, ROWS, DK>(dk, ds, base + AT::Q + here.stage * AT::Q_BYTES);
        if (more && !fetched) AT::stats_full::wait(base, next);
        const bool room = w.may_put_ds(t + 1);
        loaded = AT::full::test(base, later);
        fetched = AT::stats_full::test(base, later);
        st = w.statistics_of(t + 1);
        wg_wait<3>(s);
        probabilities_in_place(s, st, w.a);
        wg_wait<2>(dp);
        score_gradients_in_place(s, dp, st);
        wg_wait<0>(dv);
        wg_wait<0>(dk);
        AT::free::arrive(base, here); /* each lane's, for what it read */
        round(st);
        if (!more) break;
        if (st->part & 2) w.clean(t + 1, rows, dk, dv);
        w.leave_ds(ds, t + 1, st->part, room);
    }
}

template <typename T, typename AT>
__device__ __forceinline__ void compute_64(const attend_kernel &a, const sm90_backward_plan &plan,
                                           key_block &b, char *smem, uint32_t base, int group)
{
    with_dq_warpgroup<T, AT> w(a, plan, b, smem, base, group);
    const int place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    float dk[AT::DIM_K / 8][4] = {}, dv[AT::DIM_V / 8][4] = {};
    if (w.steps > 0) walk_64(w, key_of(b, place), dk, dv);
    store_keys<T, KEYS>(dk, a, b, place, d_k_of(a));
    store_keys<T, KEYS>(dv, a, b, place, d_v_of(a));
}

} // namespace sm90_backward

#endif
