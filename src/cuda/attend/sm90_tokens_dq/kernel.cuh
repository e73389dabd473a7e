/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - dQ of lists that belong to few rows, on Hopper: the forward's walks over the union
 * of neighbouring tokens' lists (sm90_tokens/kernel.cuh), with three products a stage:
 *
 *   P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta), dQ = scale dS K.
 *
 * A stage whose K holds something that is not finite is multiplied without tensor cores, key by key, for the
 * rows that see it: a factor of 0 does not undo it. The tensor cores get zeros then.
 *
 * Registers at D = 128: dQ 64, Q 32, S 32, dP 32, dS 16 of 232; shared memory: Q and dO 64 KB, K and V
 * 128 KB, or 160 where a piece's lists have at most 128 entries. Limits: as sm90_tokens/kernel.cuh says.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_TOKENS_DQ_KERNEL_CUH
#define QUERN_CUDA_ATTEND_SM90_TOKENS_DQ_KERNEL_CUH

#include "attend/backward/params.cuh"
#include "attend/sm90_tokens/feed.cuh"

namespace sm90_tokens
{

/* Of a thread's two rows. end: of the keys that they see. */
struct gradient_rows {
    float lse2[2], delta[2], row_scale[2];
    int end[2];
};

__device__ __forceinline__ gradient_rows find_gradient_rows(const attend_kernel &a, const work &w,
                                                            const int (&place)[2])
{
    gradient_rows r = {{INFINITY, INFINITY}, {0.0f, 0.0f}, {1.0f, 1.0f}, {0, 0}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = w.head0 + place[h] - n * a.hs;
        int lo;
        if (n >= w.queries) continue;
        row_statistics(a, sequence_of(w), (int64_t)w.q0 + w.query + n, head, &r.lse2[h], &r.delta[h],
                       &r.row_scale[h]);
        if (r.lse2[h] != INFINITY) row_keys(a, sequence_of(w), w.query + n, &lo, &r.end[h]);
    }
    return r;
}

/* dS in place of S. left: how many of the stage's keys the rows see. */
__device__ __forceinline__ void find_gradients(float (&s)[KEYS / 8][4], const float (&dp)[KEYS / 8][4],
                                               const gradient_rows &r, const int (&left)[2], float scale_log2)
{
    const bool seen = __all_sync(~0u, left[0] >= KEYS && left[1] >= KEYS);
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int h = c >> 1;
            const float p = exp2_fast(fmaf(s[i][c], scale_log2, -r.lse2[h]));
            s[i][c] = p * fmaf(dp[i][c], r.row_scale[h], -r.delta[h]);
            if (!seen && i * 8 + (int)(threadIdx.x & 3) * 2 + (c & 1) >= left[h]) s[i][c] = 0.0f;
        }
}

/* dQ += dS K for the keys that the rows see, one after another. */
template <typename T, int QT>
__device__ __forceinline__ void add_by_key(float (&dq)[QT][4], const float (&ds)[KEYS / 8][4],
                                           const attend_kernel &a, const work &w, const int (&left)[2],
                                           int key0)
{
    const int lane = threadIdx.x & 31;
    const T *k = (const T *)a.k.p + (int64_t)w.view * a.k.s[0] + ((int64_t)w.k0 + key0) * a.k.s[1] +
                 w.kvh * a.k.s[2] + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll 1
            for (int from = 0; from < 4; from++) {
                const int j = i * 8 + from * 2 + c;
                const float d0 = __shfl_sync(~0u, ds[i][c], (lane & ~3) + from),
                            d1 = __shfl_sync(~0u, ds[i][2 + c], (lane & ~3) + from);
                if (j >= left[0] && j >= left[1]) continue;
                const T *row = k + j * a.k.s[1];
#pragma unroll
                for (int n = 0; n < QT; n++)
                    if (n * 8 < a.dim_k)
#pragma unroll
                        for (int x = 0; x < 2; x++) {
                            const float value = to_float<T>(row[n * 8 + x]);
                            if (j < left[0]) dq[n][x] += d0 * value;
                            if (j < left[1]) dq[n][2 + x] += d1 * value;
                        }
            }
}

/* A thread's two rows of dQ in 16 bits, where rows are aligned to 16 bytes: four lanes exchange their columns
 * of four tiles, so that each stores eight that follow one another. All lanes of the warp call. */
template <typename T, int QT>
__device__ __forceinline__ void store_chunks(const float (&dq)[QT][4], const attend_kernel &a, const work &w,
                                             const int (&place)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = w.head0 + place[h] - n * a.hs;
        T *to = (T *)a.d_q.p + (int64_t)w.view * a.d_q.s[0] + ((int64_t)w.q0 + w.query + n) * a.d_q.s[1] +
                head * a.d_q.s[2];
#pragma unroll
        for (int i = 0; i < QT; i += 4) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                x[j] = pack2<T>(dq[i + j][h * 2] * a.scale + 0.0f, dq[i + j][h * 2 + 1] * a.scale + 0.0f);
            transpose_by_four(x);
            const int c = (i + (int)(threadIdx.x & 3)) * 8;
            if (n < w.queries && c < a.dim_k) *(uint4 *)(to + c) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

template <typename T, int QT>
__device__ __forceinline__ void store_gradient(const float (&dq)[QT][4], const attend_kernel &a,
                                               const work &w, const int (&place)[2])
{
    if (!a.f32_dq && ((uintptr_t)a.d_q.p & 15) == 0 && ((a.d_q.s[0] | a.d_q.s[1] | a.d_q.s[2]) & 7) == 0) {
        store_chunks<T, QT>(dq, a, w, place);
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = w.head0 + place[h] - n * a.hs;
        if (n >= w.queries) continue;
        const int64_t at = (int64_t)w.view * a.d_q.s[0] + ((int64_t)w.q0 + w.query + n) * a.d_q.s[1] +
                           head * a.d_q.s[2] + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < QT; i++)
            if (i * 8 < a.dim_k)
                store_pair<T>(a.d_q.p, at + i * 8, dq[i][h * 2] * a.scale, dq[i][h * 2 + 1] * a.scale,
                              a.f32_dq, a.add_q);
    }
}

/* A turn of a warpgroup's 64 rows: those blocks that some of its lists chose. */
template <typename T, typename S, int KT>
__device__ __forceinline__ void walk_union(const attend_kernel &a, const work &w, S &sm, int row0,
                                           const uint32_t (&q)[KT][4], const gradient_rows &r,
                                           float (&dq)[KT * 2][4], int &step, uint32_t &clean)
{
    constexpr int NT = KEYS / 8, DK = KT * 16;
    const int group = row0 / 64, row = row0 + (threadIdx.x >> 2 & 7);
    const list_shape lists = shape_of(a);
    const uint32_t own[2] = {1u << row / lists.rows, 1u << (row + 8) / lists.rows},
                   of_group = lists_among<64>(lists, group * 64), g = smem_address(sm.d_o) + group * 64 * 128;
    const uint64_t zeros = wg_repeated(smem_address(sm.zeros));
    float s[NT][4], dp[NT][4];
    uint32_t ds[NT / 2][4] = {};
    int before = -1; /* the stage whose dS K is under way */
    auto free_before = [&]() {
        wg_wait<0>(dq);
        hold(ds);
        if (before >= 0) sm.give_back_stage(before);
        before = -1;
    };
    for (bool last = false; !last; step++) {
        const auto at = S::place::of(step);
        const int stage = at.stage;
        sm.keys.wait_full(at);
        const stage_keys now = read_note(sm.note[stage]);
        const typename S::place searched = {stage, clean >> stage & 1};
        last = now.last;
        if (now.lists != 0) clean ^= 1u << stage;
        if ((now.lists & of_group) == 0) {
            free_before(); /* the feeder may need that stage before one that this warpgroup wants */
            sm.give_back_stage(stage);
            continue;
        }
        const uint32_t k = stage_address(sm.k, stage), v = stage_address(sm.v, stage);
        wg_start();
#pragma unroll
        for (int c = 0; c < KT; c++) {
            const uint64_t keys = wg_tile(k + (c >> 2) * (KEYS * 128) + (c & 3) * 32, 0);
            if (c == 0) wg_rs_wide<T, KEYS, false, false>(s, q[c], keys);
            else wg_rs_wide<T, KEYS, true, false>(s, q[c], keys);
        }
#pragma unroll
        for (int c = 0; c < S::DV; c += 16) {
            const uint64_t x = wg_tile(g + (c >> 6) * (ROWS * 128) + (c & 63) * 2, 0),
                           y = wg_tile(v + (c >> 6) * (KEYS * 128) + (c & 63) * 2, 0);
            if (c == 0) wg_ss_wide<T, KEYS, false>(dp, x, y);
            else wg_ss_wide<T, KEYS, true>(dp, x, y);
        }
        wg_commit();
        wg_wait<0>(s);
        wg_wait<0>(dp);
        free_before();
        before = stage;
        const int left[2] = {(now.lists & own[0]) != 0 ? r.end[0] - now.key : 0,
                             (now.lists & own[1]) != 0 ? r.end[1] - now.key : 0};
        find_gradients(s, dp, r, left, a.scale_log2);
        sm.searched.wait(searched);
        const bool nonfinite = read_nonfinite(sm.note[stage]);
        if (nonfinite) add_by_key<T, KT * 2>(dq, s, a, w, left, now.key);
#pragma unroll
        for (int i = 0; i < NT / 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                ds[i][j] = nonfinite ? 0
                                     : pack2<T>(s[i * 2 + (j >> 1)][(j & 1) * 2],
                                                s[i * 2 + (j >> 1)][(j & 1) * 2 + 1]);
        wg_start();
#pragma unroll
        for (int c = 0; c < KEYS; c += 16)
            wg_rs_wide<T, DK, true, true>(dq, ds[c / 16],
                                          nonfinite ? zeros : wg_tile(k + c * 128, KEYS * 128));
        wg_commit();
    }
    free_before();
}

/* A turn of a warp's 16 rows, which have one list. */
template <typename T, typename S, int KT>
__device__ __forceinline__ void walk_list(const attend_kernel &a, S &sm, int row0, int end,
                                          const uint32_t (&q)[KT][4], const gradient_rows &r,
                                          float (&dq)[KT * 2][4], int &step)
{
    constexpr int NT = KEYS / 8, DV = S::DV;
    const int lane = threadIdx.x & 31;
    for (bool last = false; !last; step++) {
        const auto at = S::place::of(step);
        const int stage = at.stage;
        sm.keys.wait_full(at);
        const stage_keys now = read_note(sm.note[stage]);
        last = now.last;
        if (now.lists >> row0 / ROWS_OF_WARP & 1) {
            const uint32_t k = stage_address(sm.k, stage);
            const int seen = end - now.key, left[2] = {seen, seen};
            float s[NT][4] = {}, dp[NT][4] = {};
            product_nt_held<T, KT * 16, NT, KEYS>(s, q, k, 0, lane);
            warp_products::nt<T, DV, NT, ROWS, KEYS>(dp, smem_address(sm.d_o), row0,
                                                     stage_address(sm.v, stage), 0, lane);
            find_gradients(s, dp, r, left, a.scale_log2);
            if (seen < KEYS) add_product<T, KT * 2, true>(dq, s, k, seen);
            else add_product<T, KT * 2, false>(dq, s, k, seen);
        }
        sm.give_back_stage(stage);
    }
}

/* A computing warpgroup. */
template <typename T, typename S>
__device__ __forceinline__ void compute_rows(const attend_kernel &a, S &sm, int warp)
{
    constexpr int KT = S::DK / 16;
    const int lane = threadIdx.x & 31, row0 = warp * ROWS_OF_WARP,
              place[2] = {row0 + (lane >> 2), row0 + (lane >> 2) + 8};
    int step = 0;
    uint32_t clean = 0; /* the parity of each stage's `searched` */
    for (int turn = 0;; turn++) {
        const work &w = sm.wait_plan(turn);
        if (w.queries < 0) return;
        const gradient_rows r = find_gradient_rows(a, w, place);
        float dq[KT * 2][4] = {};
        uint32_t q[KT][4];
        sm.queries.wait_full(ring_place<1>::of(turn));
#pragma unroll
        for (int c = 0; c < KT; c++) load_a<ROWS>(q[c], smem_address(sm.q), row0, c * 16, lane);
        __syncwarp();
        if (lane == 0) sm.queries.give_back(0);
        sm.gradients.wait_full(ring_place<1>::of(turn));
        if (sm.by_warp[turn & 1] != 0) walk_list<T>(a, sm, row0, end_of_token(a, w, warp), q, r, dq, step);
        else walk_union<T>(a, w, sm, row0, q, r, dq, step, clean);
        __syncwarp();
        if (lane == 0) sm.gradients.give_back(0);
        store_gradient<T, KT * 2>(dq, a, w, place);
        sm.give_back_plan(turn);
    }
}

template <typename T, int DK, int DV, bool SHORT_LISTS>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_rows_tokens(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                       const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef shared<DK, DV, true, SHORT_LISTS> S;
    share_out<T, S>(a, plan, m, [&](S &sm, int warp) { compute_rows<T>(a, sm, warp); });
#endif
}

/* Of lists of more than 32 entries. */
template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_rows_tokens_long(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                            const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef shared<DK, DV, true, false, true> S;
    share_out<T, S>(a, plan, m, [&](S &sm, int warp) { compute_rows<T>(a, sm, warp); });
#endif
}

template <typename T, int DK, int DV>
static quern_status run_rows(const attend_args *args, const attend_launch &l, const sm90_device &device,
                             void *workspace, cudaStream_t stream)
{
    const char *const name = "attend_backward_sm90_tokens";
    if (l.kernel.list_k > 32)
        return launch<shared<DK, DV, true, false, true>>(args, l.kernel, device, workspace, stream,
                                                         attend_rows_tokens_long<T, DK, DV>, name);
    if constexpr (DK == 128) {
        typedef shared<DK, DV, true, true> at;
        if (lists_are_short<at>(args, l.kernel))
            return launch<at>(args, l.kernel, device, workspace, stream, attend_rows_tokens<T, DK, DV, true>,
                              name);
    }
    return launch<shared<DK, DV, true, false>>(args, l.kernel, device, workspace, stream,
                                               attend_rows_tokens<T, DK, DV, false>, name);
}

} // namespace sm90_tokens

#endif
