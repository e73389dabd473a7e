/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk_128.cuh - the warpgroups with keys of kernel.cuh at head dim 128; dQ is another's (dq_warpgroup.cuh).
 *
 * A warpgroup starts dP and dV of a step, makes dS of dP, and starts dK and the next step's S, of which it
 * makes P. S and dP are never there at once, and P in 16 bits becomes dS in its own registers.
 *
 * Registers: dK 64, dV 64, S or dP 32, P 16 of 208.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_WALK_128_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_WALK_128_CUH

#include "attend/sm90_backward/dq_warpgroup.cuh"

namespace sm90_backward
{

template <typename T, typename AT> struct walk_128 : with_dq_warpgroup<T, AT> {
    typedef with_dq_warpgroup<T, AT> shared;
    using shared::base, shared::nonfinite, shared::NT, shared::clean, shared::leave_ds;
    using shared::shared;

    /* Where something in K is not finite, dQ's warpgroup changes it for a while. */
    __device__ __forceinline__ void wait_for_keys(int t) const
    {
        if (nonfinite) AT::keys_back::wait(base, AT::keys_back::place::of(t));
    }

    /* Step t where no row sees this warpgroup's keys. */
    template <int OK, int OV>
    __device__ __forceinline__ void other_step(int t, int part, const key_rows &rows, float (&dk)[OK][4],
                                               float (&dv)[OV][4]) const
    {
        const uint32_t none[NT / 2][4] = {};
        AT::full::wait(base, AT::place::of(t));
        if (part & 2) clean(t, rows, dk, dv);
        leave_ds(none, t, part, false);
        AT::free::arrive(base, AT::place::of(t)); /* each lane's, for what it read */
        wait_for_keys(t);
    }
};

template <typename T, typename AT>
__device__ __forceinline__ void compute_128(const attend_kernel &a, const sm90_backward_plan &plan,
                                            key_block &b, char *smem, uint32_t base, int group)
{
    constexpr int DK = AT::DIM_K, DV = AT::DIM_V;
    constexpr int NT = ROWS / 8;
    walk_128<T, AT> w(a, plan, b, smem, base, group);
    const int place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    const uint32_t ak = base + AT::K + group * 64 * 128, av = base + AT::V + group * 64 * 128;
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
    if (w.steps > 0) {
        AT::own_full::wait(base, {});
        w.nonfinite = search_keys<T, DK>(smem + AT::K, &b.nonfinite);
    }
    const key_rows rows = find_key_rows(a, sequence_of(b), key_of(b, place));
    int t = 0;
    auto wait_for_statistics = [&](int step) { AT::stats_full::wait(base, AT::place::of(step)); };
    auto wait_for_rows = [&](int step) { AT::full::wait(base, AT::place::of(step)); };
    auto rows_of = [&](int step) { return base + AT::Q + step % AT::STAGES * AT::Q_BYTES; };
    /* Whether some rows of step t may see its keys. */
    bool mine = (halves_seen(a, plan, b, 0) >> group & 1) != 0;
#pragma unroll 1
    while (t < w.steps) {
        if (!mine) {
            wait_for_statistics(t);
            mine = (w.statistics_of(t)->next_halves >> group & 1) != 0;
            w.other_step(t, w.statistics_of(t)->part, rows, dk, dv);
            t++;
            continue;
        }
        uint32_t p[NT / 2][4];
        {
            float s[NT][4];
            wait_for_rows(t);
            rows_by_keys<T, ROWS, KEYS, DK>(s, ak, rows_of(t));
            wait_for_statistics(t);
            wg_wait<0>(s);
            probabilities_of<T>(s, p, w.statistics_of(t), a, rows);
        }
#pragma unroll 1
        for (; mine; t++) {
            const auto here = AT::place::of(t);
            const uint32_t q = rows_of(t), g = base + AT::DO + here.stage * AT::DO_BYTES;
            const statistics *st = w.statistics_of(t);
            float s[NT][4], dp[NT][4];
            rows_by_keys<T, ROWS, KEYS, DV>(dp, av, g);
            const int part = st->part;
            mine = (st->next_halves >> group & 1) != 0;
            if (part & 2) {
                wg_wait<0>(dp);
                w.clean(t, rows, dk, dv);
            }
            wg_start();
            keys_by_rows<T, ROWS, DV>(dv, p, g);
            const bool room = w.may_put_ds(t), more = t + 1 < w.steps;
            const auto next = AT::place::of(t + 1);
            const bool loaded = !more || AT::full::test(base, next);
            wg_wait<0>(dp);
            wg_wait<0>(dv);
            score_gradients_of<T>(p, dp, st, rows);
            w.leave_ds(p, t, part, room);
            w.wait_for_keys(t);
            /* Behind the last step S^T is of what the stage held before, and so is P^T: nobody reads them. */
            if (!loaded) wait_for_rows(t + 1);
            const bool fetched = !more || AT::stats_full::test(base, next);
            wg_start();
            rows_by_keys<T, ROWS, KEYS, DK>(s, ak, rows_of(t + 1));
            keys_by_rows<T, ROWS, DK>(dk, p, q);
            if (!fetched) wait_for_statistics(t + 1);
            wg_wait<0>(s);
            wg_wait<0>(dk);
            AT::free::arrive(base, here); /* each lane's, for what it read */
            probabilities_of<T>(s, p, w.statistics_of(t + 1), a, rows);
        }
    }
    store_keys<T, KEYS>(dk, a, b, place, d_k_of(a));
    store_keys<T, KEYS>(dv, a, b, place, d_v_of(a));
}

} // namespace sm90_backward

#endif
