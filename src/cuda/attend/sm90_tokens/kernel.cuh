/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention's forward on Hopper where lists of blocks belong to few rows (a token of 4 to
 * 32 heads, mostly): neighbouring tokens share what they have in common.
 *
 * One token's blocks are read for 16 rows alone: at 64k tokens of 64/4 heads 137 GB, 15 ms at the rate at
 * which shared memory can be filled from L2. So a persistent block takes the tokens of 128 rows and walks the
 * union of their lists, in the order of the keys: of smooth data's 8 tokens it has 17 to 22 blocks of 64
 * keys, of noise's 90 instead of 128. A piece is multiplied in one of two ways, as its union says
 * (share_little):
 *
 * - Together: each of two computing warpgroups has 64 of the rows. It skips blocks that none of them chose;
 *   in the others it multiplies all rows and hides those that did not choose the block: a warpgroup's product
 *   of 64 rows costs what one of 16 would. S = Q K^T of a stage is issued behind the last stage's P V.
 * - By warp, where a list has at most 16 rows: each of the eight warps multiplies the blocks that lists of
 *   its own 16 rows chose (mma.m16n8k16). Eight blocks are under way, and few are multiplied for rows that
 *   did not choose them.
 *
 * Warp 0 of the feeding warpgroup merges the lists, a lane for each, and copies K and V by TMA, 64 keys a
 * stage; warps 1 and 2 look for what is not finite in V, as in sm90_forward/kernel.cuh; warp 3 plans the next
 * turn. The computing warps hold Q in registers, so that the next turn's rows can come early.
 *
 * Registers at D = 128: O 64, Q 32, S 32, P 16 of 224; shared memory: Q 32 KB, K and V 160 KB, or 192 where
 * a piece's lists have at most 512 entries. Limit, together: products and exponentials, which take turns.
 * By warp: filling shared memory, and reading 32 KB of it for each token and block (4.6 ms at 64k).
 */
#ifndef QUERN_CUDA_ATTEND_SM90_TOKENS_KERNEL_CUH
#define QUERN_CUDA_ATTEND_SM90_TOKENS_KERNEL_CUH

#include "attend/sm90/products.cuh"
#include "attend/sm90/rows.cuh"
#include "attend/sm90_tokens/feed.cuh"

namespace sm90_tokens
{

using attend_parts::row_state;

/* Hides what the rows do not see, or did not choose, of 64 keys from `key` on. */
__device__ __forceinline__ void hide(float (&s)[KEYS / 8][4], const row_state &r, const bool (&chose)[2],
                                     int key)
{
    const int end[2] = {chose[0] ? r.hi[0] - key : 0, chose[1] ? r.hi[1] - key : 0};
    if (__all_sync(~0u, end[0] >= KEYS && end[1] >= KEYS)) return;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (i * 8 + (int)(threadIdx.x & 3) * 2 + (c & 1) >= end[c >> 1]) s[i][c] = -INFINITY;
}

template <int OT> __device__ __forceinline__ void shrink_rows(float (&o)[OT][4], const float (&shrink)[2])
{
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < OT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) o[i][c] *= shrink[c >> 1];
}

/* Adds what is not finite in V to the rows that see it. */
template <typename T, int OT>
__device__ __forceinline__ void add_nonfinite(float (&o)[OT][4], const attend_kernel &a, const work &w,
                                              const row_state &r, const bool (&chose)[2], int key0)
{
    const T *v = (const T *)a.v.p + (int64_t)w.view * a.v.s[0] + (int64_t)w.k0 * a.v.s[1] + w.kvh * a.v.s[2] +
                 (threadIdx.x & 3) * 2;
#pragma unroll 1
    for (int key = key0; key < key0 + KEYS; key++) {
        const bool s0 = chose[0] && key < r.hi[0], s1 = chose[1] && key < r.hi[1];
        if (!s0 && !s1) continue;
        add_row_nonfinite(o, a.dim_v, v + key * a.v.s[1], s0, s1);
    }
}

/* A turn of a warpgroup's 64 rows: those blocks that some of its lists chose. */
template <typename T, typename S, int KT, int OT>
__device__ __forceinline__ void walk_union(const attend_kernel &a, const work &w, S &sm, int row0,
                                           const uint32_t (&q)[KT][4], row_state &r, float (&o)[OT][4],
                                           int &step, uint32_t &clean)
{
    constexpr int NT = KEYS / 8, DV = OT * 8;
    const int row = row0 + (threadIdx.x >> 2 & 7);
    const list_shape lists = shape_of(a);
    const uint32_t own[2] = {1u << row / lists.rows, 1u << (row + 8) / lists.rows},
                   of_group = lists_among<64>(lists, row0 & ~63);
    float s[NT][4];
    uint32_t p[NT / 2][4] = {};
    int before = -1; /* the stage whose P V is under way */
    auto free_before = [&]() {
        wg_wait<0>(o);
        hold(p);
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
        wg_commit();
        wg_wait<0>(s);
        free_before();
        before = stage;
        const bool chose[2] = {(now.lists & own[0]) != 0, (now.lists & own[1]) != 0};
        float shrink[2];
        hide(s, r, chose, now.key);
        attend_parts::softmax(s, r, shrink, a.scale_log2);
        attend_parts::pack_rows<T>(s, p);
        shrink_rows(o, shrink);
        sm.searched.wait(searched);
        if (read_nonfinite(sm.note[stage])) add_nonfinite<T, OT>(o, a, w, r, chose, now.key);
        wg_start();
#pragma unroll
        for (int c = 0; c < KEYS; c += 16)
            wg_rs_wide<T, DV, true, true>(o, p[c / 16], wg_tile(v + c * 128, KEYS * 128));
        wg_commit();
    }
    free_before();
}

/* A turn of a warp's 16 rows: those blocks that some of its lists chose. ONE: they are one token's, which
 * spares the search of V. */
template <typename T, bool ONE, typename S, int KT, int OT>
__device__ __forceinline__ void walk_lists(const attend_kernel &a, const work &w, S &sm, int row0,
                                           const uint32_t (&q)[KT][4], row_state &r, float (&o)[OT][4],
                                           int &step, uint32_t &clean)
{
    constexpr int NT = KEYS / 8;
    const int lane = threadIdx.x & 31, row = row0 + (lane >> 2),
              end = ONE ? end_of_token(a, w, row0 / ROWS_OF_WARP) : 0;
    const list_shape lists = shape_of(a);
    const uint32_t own[2] = {1u << row / lists.rows, 1u << (row + 8) / lists.rows},
                   of_warp = ONE ? 1u << row0 / ROWS_OF_WARP : lists_among<ROWS_OF_WARP>(lists, row0);
    for (bool last = false; !last; step++) {
        const auto at = S::place::of(step);
        const int stage = at.stage;
        sm.keys.wait_full(at);
        const stage_keys now = read_note(sm.note[stage]);
        const typename S::place searched = {stage, clean >> stage & 1};
        last = now.last;
        if (!ONE && now.lists != 0) clean ^= 1u << stage;
        if ((now.lists & of_warp) != 0) {
            const int left = ONE ? end - now.key : KEYS;
            const uint32_t v = stage_address(sm.v, stage);
            const bool chose[2] = {ONE || (now.lists & own[0]) != 0, ONE || (now.lists & own[1]) != 0};
            float s[NT][4] = {}, shrink[2];
            product_nt_held<T, KT * 16, NT, KEYS>(s, q, stage_address(sm.k, stage), 0, lane);
            hide(s, r, chose, now.key);
            attend_parts::softmax(s, r, shrink, a.scale_log2);
            shrink_rows(o, shrink);
            if (!ONE) {
                sm.searched.wait(searched);
                if (read_nonfinite(sm.note[stage])) add_nonfinite<T, OT>(o, a, w, r, chose, now.key);
            }
            if (left < KEYS) add_product<T, OT, true>(o, s, v, left);
            else add_product<T, OT, false>(o, s, v, left);
        }
        sm.give_back_stage(stage);
    }
}

/* A computing warpgroup. */
template <typename T, typename S>
__device__ __forceinline__ void compute(const attend_kernel &a, S &sm, int warp)
{
    constexpr int KT = S::DK / 16, OT = S::DV / 8;
    const int lane = threadIdx.x & 31, row0 = warp * ROWS_OF_WARP,
              place[2] = {row0 + (lane >> 2), row0 + (lane >> 2) + 8};
    int step = 0;
    uint32_t clean = 0; /* the parity of each stage's `searched` */
    for (int turn = 0;; turn++) {
        const work &w = sm.wait_plan(turn);
        if (w.queries < 0) return;
        row_state r = attend_parts::begin_rows(a, w, place);
        float o[OT][4] = {};
        uint32_t q[KT][4];
        sm.queries.wait_full(ring_place<1>::of(turn));
#pragma unroll
        for (int c = 0; c < KT; c++) load_a<ROWS>(q[c], smem_address(sm.q), row0, c * 16, lane);
        __syncwarp();
        if (lane == 0) sm.queries.give_back(0);
        if (sm.by_warp[turn & 1] == 0) walk_union<T>(a, w, sm, row0, q, r, o, step, clean);
        else if (one_token(a)) walk_lists<T, true>(a, w, sm, row0, q, r, o, step, clean);
        else walk_lists<T, false>(a, w, sm, row0, q, r, o, step, clean);
        attend_parts::store_rows<T, OT>(o, a, w, r, place);
        sm.give_back_plan(turn);
    }
}

template <typename T, int DK, int DV, bool SHORT_LISTS>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_forward_tokens(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                          const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef shared<DK, DV, false, SHORT_LISTS> S;
    share_out<T, S>(a, plan, m, [&](S &sm, int warp) { compute<T>(a, sm, warp); });
#endif
}

/* Of lists of more than 32 entries. */
template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_forward_tokens_long(const __grid_constant__ attend_kernel a,
                               const __grid_constant__ work_plan plan, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef shared<DK, DV, false, false, true> S;
    share_out<T, S>(a, plan, m, [&](S &sm, int warp) { compute<T>(a, sm, warp); });
#endif
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_device &device,
                        void *workspace, cudaStream_t stream, const int32_t *elsewhere = NULL)
{
    const char *const name = "attend_forward_sm90_tokens";
    if (l.kernel.list_k > 32)
        return launch<shared<DK, DV, false, false, true>>(args, l.kernel, device, workspace, stream,
                                                          attend_forward_tokens_long<T, DK, DV>, name,
                                                          elsewhere);
    if constexpr (DK == 128) {
        typedef shared<DK, DV, false, true> at;
        if (lists_are_short<at>(args, l.kernel))
            return launch<at>(args, l.kernel, device, workspace, stream,
                              attend_forward_tokens<T, DK, DV, true>, name, elsewhere);
    }
    return launch<shared<DK, DV, false, false>>(args, l.kernel, device, workspace, stream,
                                                attend_forward_tokens<T, DK, DV, false>, name, elsewhere);
}

} // namespace sm90_tokens

#endif
