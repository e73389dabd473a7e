/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * alternating.cuh - the computing warpgroups of kernel.cuh at head dim 64.
 *
 * A step's products are short there, and a warp that starts them waits until most are done. So the two
 * warpgroups alternate, half a step from each other: while one starts its products, the other has its
 * softmax. Together it starts dV and dK of a step, S and dP of the next, and dQ of the one before, whose dS
 * is long there. K is an operand in registers: with both operands of S in shared memory, the products would
 * take all of its bandwidth, and the other warpgroup's loads and stores would wait.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_ALTERNATING_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_ALTERNATING_CUH

#include "attend/sm90_backward/step.cuh"

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

/* P^T and dS^T of a stage, from S^T and dP^T. SCALED: there is a row_scale. PART: some of these pairs do not
 * see each other. */
template <typename T, bool SCALED, bool PART, int NT>
__device__ __forceinline__ void softmax(const float (&s)[NT][4], const float (&dp)[NT][4],
                                        uint32_t (&fp)[NT / 2][4], uint32_t (&fs)[NT / 2][4],
                                        const statistics *st, float scale_log2, int key)
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int r = i * 8 + (threadIdx.x & 3) * 2;
        const float2 lse2 = *(const float2 *)&st->lse2[r], delta = *(const float2 *)&st->delta[r];
        const float2 rs = SCALED ? *(const float2 *)&st->row_scale[r] : make_float2(1.0f, 1.0f);
        int2 lo = make_int2(0, 0), hi = make_int2(0, 0);
        if (PART) {
            lo = *(const int2 *)&st->lo[r];
            hi = *(const int2 *)&st->hi[r];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float p[2] = {exp2_fast(fmaf(s[i][h * 2], scale_log2, -lse2.x)),
                          exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -lse2.y))};
            float d[2] = {p[0] * fmaf(dp[i][h * 2], rs.x, -delta.x),
                          p[1] * fmaf(dp[i][h * 2 + 1], rs.y, -delta.y)};
            p[0] *= rs.x;
            p[1] *= rs.y;
            if (PART) {
                const int k = key + h * 8;
                if (k < lo.x || k >= hi.x) p[0] = d[0] = 0.0f;
                if (k < lo.y || k >= hi.y) p[1] = d[1] = 0.0f;
            }
            fp[i >> 1][(i & 1) * 2 + h] = pack2<T>(p[0], p[1]);
            fs[i >> 1][(i & 1) * 2 + h] = pack2<T>(d[0], d[1]);
        }
    }
}

/* Each computing warpgroup makes half of dQ's columns, of both's dS^T. */
template <typename T, typename AT> struct alternating : computing<T, AT> {
    typedef computing<T, AT> shared;
    using shared::base, shared::group, shared::NT, shared::NQ;
    using shared::computing;
    using shared::put_ds, shared::multiply_ds, shared::poison, shared::wait_to_put_dq, shared::put_dq;

    __device__ __forceinline__ void show_ds(int t) const
    {
        named_arrive(DS_FULL + 2 * (t % AT::DS_BUFFERS) + (group ^ 1), 256);
    }

    __device__ __forceinline__ void write_ds(const uint32_t (&f)[NT / 2][4], int t) const
    {
        put_ds(f, t);
        async_fence();
        show_ds(t);
    }

    __device__ __forceinline__ void wait_for_ds(int t) const
    {
        named_sync(DS_FULL + 2 * (t % AT::DS_BUFFERS) + group, 256);
    }

    __device__ __forceinline__ void start_dq(float (&dq)[NQ / 8][4], int t) const
    {
        wait_for_ds(t);
        multiply_ds(dq, t);
    }

    __device__ __forceinline__ void show_dq(int t) const
    {
        named_arrive(DQ_FULL + t % BUFFERS, AT::DQ_THREADS + 32);
    }

    __device__ __forceinline__ void hand_over(float (&dq)[NQ / 8][4], int t, bool unclean) const
    {
        if (unclean) poison(dq, t);
        wait_to_put_dq(t);
        put_dq(dq, t);
        async_fence();
        show_dq(t);
    }
};

/* The steps of a block that has some. */
template <typename T, typename AT, int OK, int OV>
__device__ __forceinline__ void walk_alternating(alternating<T, AT> &w, int key, float (&dk)[OK][4],
                                                 float (&dv)[OV][4])
{
    constexpr int DK = AT::DIM_K, DV = AT::DIM_V, NT = ROWS / 8;
    const uint32_t base = w.base;
    const int group = w.group, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const bool scaled = w.a.row_scale.p != NULL;
    const float scale_log2 = w.a.scale_log2;
    char *const smem = w.smem;
    float s[NT][4], dp[NT][4], dq[w.NQ / 8][4];
    uint32_t fp[NT / 2][4], fs[NT / 2][4], own_k[DK / 16][4];
    auto start_scores = [&](int t) {
        const int stage = t % AT::STAGES;
        rows_by_held<T, ROWS, DK>(s, own_k, base + AT::Q + stage * AT::Q_BYTES);
        rows_by_keys<T, ROWS, KEYS, DV>(dp, base + AT::V + group * 64 * 128,
                                        base + AT::DO + stage * AT::DO_BYTES);
    };
    auto rows_of_keys = [&]() { return find_key_rows(w.a, sequence_of(w.b), key); };
    /* A step's dQ by itself. */
    auto whole_dq = [&](int t, bool unclean) {
        if (unclean) clean_keys<T, DK, 256>(smem + AT::K);
        w.start_dq(dq, t);
        wg_wait<0>(dq);
        if (unclean) restore_keys<T, DK, 256>(w.a, w.b, smem + AT::K);
        w.hand_over(dq, t, unclean);
    };
    AT::own_full::wait(base, {});
    w.nonfinite = search_keys<T, DK>(smem + AT::K, &w.b.nonfinite);
    if (group == 1) named_arrive(TURN, 256);
#pragma unroll
    for (int c = 0; c < DK; c += 16)
        load_a<KEYS>(own_k[c / 16], base + AT::K, group * 64 + warp * 16, c, lane);
    AT::full::wait(base, {});
    start_scores(0);
    AT::stats_full::wait(base, {});
    wg_wait<0>(s);
    wg_wait<0>(dp);
    int part = w.statistics_of(0)->part;
    softmax<T, true, true>(s, dp, fp, fs, w.statistics_of(0), scale_log2, key);
    if (part & 2) w.clean(0, rows_of_keys(), dk, dv);
    w.write_ds(fs, 0);
    bool unclean = false;
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const auto here = AT::place::of(t), next = AT::place::of(t + 1);
        const bool more = t + 1 < w.steps, gives = t > 0 && !unclean; /* with it, the dQ before */
        const bool loaded = !more || AT::full::test(base, next),
                   fetched = !more || AT::stats_full::test(base, next);
        if (gives) w.wait_for_ds(t - 1);
        else if (t > 0) whole_dq(t - 1, true);
        unclean = w.nonfinite && part != 0;
        if (!loaded) AT::full::wait(base, next);
        named_sync(TURN + group, 256);
        wg_start();
        keys_by_rows<T, ROWS, DV>(dv, fp, base + AT::DO + here.stage * AT::DO_BYTES);
        keys_by_rows<T, ROWS, DK>(dk, fs, base + AT::Q + here.stage * AT::Q_BYTES);
        start_scores(t + 1); /* behind the last step of what the stage holds, and nobody reads them */
        if (more || group == 0) named_arrive(TURN + (group ^ 1), 256);
        w.multiply_ds(dq, t - 1 + AT::DS_BUFFERS); /* nobody reads what it does not give */
        if (!fetched) AT::stats_full::wait(base, next);
        const bool room = !gives || w.may_put_dq(t - 1);
        const statistics *st = w.statistics_of(t + 1);
        wg_wait<1>(dv);
        wg_wait<1>(dk);
        wg_wait<1>(s);
        wg_wait<1>(dp);
        AT::free::arrive(base, here); /* each lane's, for what it read */
        part = st->part;
        if (part != 0) softmax<T, true, true>(s, dp, fp, fs, st, scale_log2, key);
        else if (scaled) softmax<T, true, false>(s, dp, fp, fs, st, scale_log2, key);
        else softmax<T, false, false>(s, dp, fp, fs, st, scale_log2, key);
        wg_wait<0>(dq);
        if (more && (part & 2)) w.clean(t + 1, rows_of_keys(), dk, dv);
        if (more) w.put_ds(fs, t + 1);
        if (!room) w.wait_to_put_dq(t - 1);
        if (gives) w.put_dq(dq, t - 1);
        async_fence();
        if (more) w.show_ds(t + 1);
        if (gives) w.show_dq(t - 1);
    }
    whole_dq(w.steps - 1, unclean);
}

template <typename T, typename AT>
__device__ __forceinline__ void compute_alternating(const attend_kernel &a, const sm90_backward_plan &plan,
                                                    key_block &b, char *smem, uint32_t base, int group)
{
    alternating<T, AT> w(a, plan, b, smem, base, group);
    const int place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    float dk[AT::DIM_K / 8][4] = {}, dv[AT::DIM_V / 8][4] = {};
    if (w.steps > 0) walk_alternating(w, key_of(b, place), dk, dv);
    store_keys<T, KEYS>(dk, a, b, place, d_k_of(a));
    store_keys<T, KEYS>(dv, a, b, place, d_v_of(a));
}

} // namespace sm90_backward

#endif
