/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dq_warpgroup.cuh - up to head dim 128 a third warpgroup makes dQ of the dS that two warpgroups with 64 keys
 * each leave: so these never wait for each other, nor for dQ's way out.
 *
 * Registers: 64 columns of dQ 32 of 64.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_DQ_WARPGROUP_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_DQ_WARPGROUP_CUH

#include "attend/sm90_backward/step.cuh"

namespace sm90_backward
{

/* A warpgroup with keys. */
template <typename T, typename AT> struct with_dq_warpgroup : computing<T, AT> {
    typedef computing<T, AT> shared;
    using shared::base, shared::smem, shared::NT, shared::put_ds, shared::wait_to_put_ds;
    using shared::computing;

    /* Leaves step t's dS^T; `part`: the step's, of its statistics; `room`: may_put_ds() said so. */
    __device__ __forceinline__ void leave_ds(const uint32_t (&f)[NT / 2][4], int t, int part, bool room) const
    {
        const int buffer = t % AT::DS_BUFFERS;
        if (!room) wait_to_put_ds(t);
        if (threadIdx.x == 128) *(int32_t *)(smem + AT::DS_PART + 4 * buffer) = part;
        put_ds(f, t);
        async_fence();
        named_arrive(DS_FULL + buffer, 128 * (GROUPS + 1));
    }
};

/* NQ columns of dQ of a tile to which no other block of keys comes, from `first` on. */
template <typename T, int NQ>
__device__ __forceinline__ void store_dq(const float (&dq)[NQ / 8][4], const attend_kernel &a,
                                         const sm90_backward_plan &plan, const key_block &b, int tile,
                                         int head, int first)
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
        first / 8, row, b.nq - query, a, plan.wide);
}

/* The warpgroup that makes dQ, 64 columns after another. */
template <typename T, typename AT>
__device__ __forceinline__ void make_dq(const attend_kernel &a, const sm90_backward_plan &plan, key_block &b,
                                        char *smem, uint32_t base)
{
    constexpr int N = 64;
    const computing<T, AT> w(a, plan, b, smem, base, 0);
    static_assert(AT::DIM_K <= 2 * N, "more parts of dQ's columns than two");
    const dq_columns<T, AT, N> parts[2] = {{w, 0}, {w, AT::DIM_K - N}}; /* at D = 64 one and the same */
    const int alone_end = b.alone_end;
#pragma unroll 1
    for (int t = 0; t < w.steps; t++) {
        const int buffer = t % AT::DS_BUFFERS;
        named_sync(DS_FULL + buffer, 128 * (GROUPS + 1));
        const bool nonfinite = b.nonfinite != 0,
                   unclean = nonfinite && ((const int32_t *)(smem + AT::DS_PART))[buffer] != 0;
        int head = 0;
        const int tile = alone_end > 0 ? tile_at_step(a, plan, b, t, &head) : 0;
        w.wait_to_put_dq(t);
#pragma unroll
        for (int first = 0; first < AT::DIM_K; first += N) {
            const dq_columns<T, AT, N> &columns = parts[first / N];
            const bool last = first + N == AT::DIM_K;
            float dq[N / 8][4];
            columns.make(dq, t, unclean, [&]() {
                if (last) AT::ds_free::arrive(base, AT::ds_free::place::of(t));
            });
            if (last && nonfinite) AT::keys_back::arrive(base, {});
            if (tile < alone_end) store_dq<T, N>(dq, a, plan, b, tile, head, first);
            else columns.put(dq, t);
        }
        w.show_dq(t);
    }
}

} // namespace sm90_backward

#endif
