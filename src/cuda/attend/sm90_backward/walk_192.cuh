/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk_192.cuh - the warpgroups with keys of kernel.cuh at head dims 192/128, which make dQ, too: dK and dV
 * take 160 registers a thread of each, which leaves none for a warpgroup for dQ.
 *
 * A step: dP, then dV, and dS of dP beside it; the next step's S, then dK, and the exponentials of S beside
 * it; dQ of both warpgroups' dS. Of dQ's 192 columns a warpgroup makes 64 and then 32: a tile of K has panels
 * of 64, which no product crosses from its middle.
 *
 * Registers: dK 96, dV 64, S or dP 32, P or dS 16, or 64 or 32 columns of dQ 32 or 16, of 240.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_WALK_192_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_WALK_192_CUH

#include "attend/sm90_backward/softmax.cuh"
#include "attend/sm90_backward/step.cuh"

namespace sm90_backward
{

template <typename T, typename AT>
__device__ __forceinline__ void compute_192(const attend_kernel &a, const sm90_backward_plan &plan,
                                            key_block &b, char *smem, uint32_t base, int group)
{
    constexpr int DK = AT::DIM_K, DV = AT::DIM_V, NT = ROWS / 8;
    computing<T, AT> w(a, plan, b, smem, base, group);
    const int place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    const uint32_t ak = base + AT::K + group * 64 * 128, av = base + AT::V + group * 64 * 128;
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
    uint32_t p[NT / 2][4];
    const key_rows rows = find_key_rows(a, sequence_of(b), key_of(b, place));
    auto rows_of = [&](int step) { return base + AT::Q + step % AT::STAGES * AT::Q_BYTES; };
    if (w.steps > 0) {
        float s[NT][4];
        AT::own_full::wait(base, {});
        w.nonfinite = search_keys<T, DK>(smem + AT::K, &b.nonfinite);
        AT::full::wait(base, {});
        rows_by_keys<T, ROWS, KEYS, DK>(s, ak, rows_of(0));
        AT::stats_full::wait(base, {});
        wg_wait<0>(s);
        probabilities_in_place(s, w.statistics_of(0), a);
        round_step<T>(s, p, w.statistics_of(0), rows);
    }
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const auto here = AT::place::of(t), next = AT::place::of(t + 1);
        const uint32_t g = base + AT::DO + here.stage * AT::DO_BYTES;
        const statistics *st = w.statistics_of(t);
        const bool more = t + 1 < w.steps;
        const int part = st->part;
        float s[NT][4];
        rows_by_keys<T, ROWS, KEYS, DV>(s, av, g);
        if (part & 2) {
            wg_wait<0>(s);
            w.clean(t, rows, dk, dv);
        }
        wg_start();
        keys_by_rows<T, ROWS, DV>(dv, p, g);
        const bool room = w.may_put_ds(t), loaded = !more || AT::full::test(base, next);
        wg_wait<1>(s);
        score_gradients_in_place<T>(p, s, st);
        wg_wait<0>(dv);
        round_step<T>(s, p, st, rows);
        if (!room) w.wait_to_put_ds(t);
        w.put_ds(p, t);
        async_fence();
        named_arrive(DS_FULL + (group ^ 1), 256);
        /* Behind the last step S^T is of what the stage held before, and so is P^T: nobody reads them. */
        if (!loaded) AT::full::wait(base, next);
        const bool fetched = !more || AT::stats_full::test(base, next);
        rows_by_keys<T, ROWS, KEYS, DK>(s, ak, rows_of(t + 1));
        wg_start();
        keys_by_rows<T, ROWS, DK>(dk, p, rows_of(t));
        if (!fetched) AT::stats_full::wait(base, next);
        st = w.statistics_of(t + 1);
        wg_wait<1>(s);
        probabilities_in_place(s, st, a);
        wg_wait<0>(dk);
        AT::free::arrive(base, here); /* each lane's, for what it read */
        round_step<T>(s, p, st, rows);
        named_sync(DS_FULL + group, 256);
        const bool unclean = w.nonfinite && part != 0, dq_room = w.may_put_dq(t);
        {
            const dq_columns<T, AT, 64> wide(w, group * 64);
            float dq[8][4];
            wide.make(dq, t, unclean, []() {});
            if (!dq_room) w.wait_to_put_dq(t);
            wide.put(dq, t);
        }
        {
            const dq_columns<T, AT, 32> narrow(w, 128 + group * 32);
            float dq[4][4];
            narrow.make(dq, t, unclean, [&]() { AT::ds_free::arrive(base, AT::ds_free::place::of(t)); });
            narrow.put(dq, t);
        }
        w.show_dq(t);
    }
    store_keys<T, KEYS>(dk, a, b, place, d_k_of(a));
    store_keys<T, KEYS>(dv, a, b, place, d_v_of(a));
}

} // namespace sm90_backward

#endif
