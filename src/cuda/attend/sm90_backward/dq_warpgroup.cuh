/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dq_warpgroup.cuh - kernel.cuh above head dim 64: two warpgroups with 64 keys each make
 * dK and dV, and a third makes dQ of their dS.
 *
 * A warpgroup with keys never waits for the other one. It starts dP and dV of a step, makes dS of dP, and
 * starts dK and the next step's S, of which it makes P. S and dP are never there at once, and P in 16 bits
 * becomes dS in its own registers.
 *
 * The rows that see a thread's two keys are two intervals of queries, which it finds once. So in a step some
 * of whose pairs do not see each other it needs a few shifts, and a mask for each two pairs.
 *
 * Registers: dK 64, dV 64, S or dP 32, P 16 of 208; half of dQ's columns 32 of 64.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_DQ_WARPGROUP_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_DQ_WARPGROUP_CUH

#include "attend/sm90_backward/step.cuh"

namespace sm90_backward
{

template <typename T, typename AT> struct dq_warpgroup : computing<T, AT> {
    typedef computing<T, AT> shared;
    using shared::base, shared::smem, shared::nonfinite, shared::NT;
    using shared::clean, shared::put_ds;
    using shared::computing;

    /* Whether step t's dS^T may go where dQ's warpgroup takes it from. */
    __device__ __forceinline__ bool may_put_ds(int t) const
    {
        return AT::ds_free::test_before(base, AT::ds_free::place::of(t));
    }

    /* Leaves step t's dS^T; `part`: the step's, of its statistics; `room`: may_put_ds() said so. */
    __device__ __forceinline__ void leave_ds(const uint32_t (&f)[NT / 2][4], int t, int part, bool room) const
    {
        const int buffer = t % AT::DS_BUFFERS;
        if (!room) AT::ds_free::wait_before(base, AT::ds_free::place::of(t));
        if (threadIdx.x == 128) *(int32_t *)(smem + AT::DS_PART + 4 * buffer) = part;
        put_ds(f, t);
        async_fence();
        named_arrive(DS_FULL + buffer, 128 * (GROUPS + 1));
    }

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

/* A warpgroup that makes dK and dV of its 64 keys. */
template <typename T, typename AT>
__device__ __forceinline__ void compute_with_dq_warpgroup(const attend_kernel &a,
                                                          const sm90_backward_plan &plan, key_block &b,
                                                          char *smem, uint32_t base, int group)
{
    constexpr int DK = AT::DIM_K, DV = AT::DIM_V;
    constexpr int NT = ROWS / 8;
    dq_warpgroup<T, AT> w(a, plan, b, smem, base, group);
    const int place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    const uint32_t ak = base + AT::K + group * 64 * 128, av = base + AT::V + group * 64 * 128;
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
    w.nonfinite = false;
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

/* Half of the columns of dQ of a tile to which no other block of keys comes. */
template <typename T, int NQ>
__device__ __forceinline__ void store_dq(const float (&dq)[NQ / 8][4], const attend_kernel &a,
                                         const sm90_backward_plan &plan, const key_block &b, int tile,
                                         int head, int half)
{
    const int query = tile * ROWS, row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
    uint32_t x[2][NQ / 8];
#pragma unroll
    for (int i = 0; i < NQ / 8; i++) {
        /* A zero's sign may come from a row that is not seen. */
        x[0][i] = pack2<T>(dq[i][0] * a.scale + 0.0f, dq[i][1] * a.scale + 0.0f);
        x[1][i] = pack2<T>(dq[i][2] * a.scale + 0.0f, dq[i][3] * a.scale + 0.0f);
    }
    store_eights(
        x, (T *)a.d_q.p + b.view * a.d_q.s[0] + (int64_t)(b.q0 + query) * a.d_q.s[1] + head * a.d_q.s[2],
        half * (NQ / 8), row, b.nq - query, a, plan.wide);
}

/* The warpgroup that makes dQ, one half of its columns after the other. */
template <typename T, typename AT>
__device__ __forceinline__ void make_dq(const attend_kernel &a, const sm90_backward_plan &plan, key_block &b,
                                        char *smem, uint32_t base)
{
    computing<T, AT> halves[2] = {{a, plan, b, smem, base, 0}, {a, plan, b, smem, base, 1}};
    const int alone_end = b.alone_end;
#pragma unroll 1
    for (int t = 0; t < halves[0].steps; t++) {
        const int buffer = t % AT::DS_BUFFERS;
        named_sync(DS_FULL + buffer, 128 * (GROUPS + 1));
        const bool nonfinite = b.nonfinite != 0,
                   unclean = nonfinite && ((const int32_t *)(smem + AT::DS_PART))[buffer] != 0;
        int head = 0;
        const int tile = alone_end > 0 ? tile_at_step(a, plan, b, t, &head) : 0;
        halves[0].wait_to_put_dq(t);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float dq[halves[0].NQ / 8][4];
            if (unclean) clean_keys<T, AT::DIM_K, 128>(smem + AT::K);
            halves[half].multiply_ds(dq, t);
            wg_wait<0>(dq);
            if (half == 1) AT::ds_free::arrive(base, AT::ds_free::place::of(t));
            if (unclean) {
                restore_keys<T, AT::DIM_K, 128>(a, b, smem + AT::K);
                halves[half].poison(dq, t);
            }
            if (half == 1 && nonfinite) AT::keys_back::arrive(base, {});
            if (tile < alone_end) store_dq<T, AT::DIM_K / 2>(dq, a, plan, b, tile, head, half);
            else halves[half].put_dq(dq, t);
        }
        async_fence();
        named_arrive(DQ_FULL + t % BUFFERS, AT::DQ_THREADS + 32);
    }
}

} // namespace sm90_backward

#endif
