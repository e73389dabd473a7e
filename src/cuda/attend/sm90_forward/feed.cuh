/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the feeding warpgroup of the forward: warp 3 plans pieces, warp 0 copies, warps 1 and 2
 * search. */
#ifndef QUERN_CUDA_ATTEND_SM90_FORWARD_FEED_CUH
#define QUERN_CUDA_ATTEND_SM90_FORWARD_FEED_CUH

#include "attend/sm90_forward/shared.cuh"
#include "hopper/nonfinite.cuh"

namespace sm90_forward
{

/* How many of a clean list's blocks end before key `end`: its first ones. One warp calls. */
__device__ __forceinline__ int blocks_before(const int32_t *list, int kept, int block, int end)
{
    int count = 0;
    for (int e = threadIdx.x & 31; e < kept; e += 32) count += (int64_t)(list[e] + 1) * block <= end;
    return (int)__reduce_add_sync(~0u, (uint32_t)count);
}

/* Plans pieces, two ahead at most, and sorts their lists. The last plan has -1 queries. */
template <int DK, int DV, bool LISTED>
__device__ __forceinline__ void plan_pieces(const attend_kernel &a, const work_plan &plan,
                                            shared<DK, DV, LISTED> &s)
{
    const bool lead = (threadIdx.x & 31) == 0;
    work w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int n = 0; w.queries >= 0; n++) {
        const auto at = ring_place<PLANS>::of(n);
        if (index < plan.total) find_work<LISTED>(a, plan, index, &w);
        else w.queries = -1;
        s.plans.wait_free(at);
        work &left = s.plan[at.stage];
        __syncwarp();
        if (lead) left = w;
        __syncwarp();
        if (LISTED && left.queries > 0) {
            const int32_t *list = a.list + left.view * a.list_stride[0] + left.unit * a.list_stride[1] +
                                  left.list_row * a.list_stride[2];
            const int kept =
                clean_by_warp(list, a.list_k, a.list_block, left.end, s.list[at.stage], s.scratch);
            const int whole = blocks_before(s.list[at.stage], kept, a.list_block, w.hi);
            if (lead) {
                left.slots = kept * a.list_block;
                left.hi = whole * a.list_block;
            }
        }
        s.plans.give(at); /* each lane's, for what it wrote */
        index = next_piece(plan);
    }
}

/* Copies Q, and K and V from the last tile to the first; one thread does. */
template <int DK, int DV, bool LISTED>
__device__ __forceinline__ void copy_tiles(const attend_kernel &a, const work_plan &plan, const maps &m,
                                           shared<DK, DV, LISTED> &s)
{
    typedef shape<DK, DV, LISTED> sh;
    constexpr int KEYS = sh::KEYS;
    const bool lead = (threadIdx.x & 31) == 0;
    int step = 0, used = 0; /* tiles and pieces so far */
    for (int n = 0;; n++) {
        const work &w = s.wait_plan(n);
        if (w.queries < 0) return;
        const int32_t *list = s.list_of(n);
        const int tiles = (w.slots + KEYS - 1) / KEYS, box = plan.box;
        if (w.slots > 0 && lead) {
            const auto at = ring_place<sh::Q_STAGES>::of(used);
            s.queries.wait_free(at);
            const uint32_t full = s.queries.expect(at, DK / 64 * plan.queries * a.hs * 128);
#pragma unroll
            for (int p = 0; p < DK / 64; p++)
                tma_load(smem_address(s.q[at.stage][p]), m.q, full, p * 64, w.head0, w.q0 + w.query, w.view);
            used++;
        }
        auto copy = [&](const CUtensorMap &map, uint32_t to, uint32_t bar, int panels, int t) {
            for (int r = 0; r < KEYS; r += box) {
                const int slot = t * KEYS + r;
                int key = w.k0 + w.base + slot;
                if (LISTED) {
                    const int e = (int)quotient((uint32_t)slot, a.by_block);
                    key = slot < w.slots ? w.k0 + list[e] * a.list_block + (slot - e * a.list_block)
                                         : (int)a.sq.n_kv;
                }
                for (int p = 0; p < panels; p++)
                    tma_load(to + p * KEYS * 128 + r * 128, map, bar, p * 64, w.kvh, key, w.view);
            }
        };
        if (lead)
            for (int t = tiles - 1; t >= 0; t--, step++) {
                const auto at = ring_place<STAGES>::of(step);
                s.keys.wait_free(at);
                const uint32_t keys_full = s.keys.expect(at, sizeof s.k[0]);
                copy(m.k, smem_address(s.k[at.stage]), keys_full, DK / 64, t);
                s.values.wait_free(at);
                const uint32_t values_full = s.values.expect(at, sizeof s.v[0]);
                copy(m.v, smem_address(s.v[at.stage]), values_full, DV / 64, t);
            }
        s.give_back_plan(n);
    }
}

/* Tiles of V that are not seen whole become finite. The searchers free every tile, so that the others neither
 * overtake them nor are overtaken. */
template <typename T, int DK, int DV, bool LISTED>
__device__ __forceinline__ void search_values(const attend_kernel &a, int searcher, shared<DK, DV, LISTED> &s)
{
    constexpr int KEYS = shape<DK, DV, LISTED>::KEYS;
    const int lane = threadIdx.x & 31;
    int step = 0;
    for (int n = 0;; n++) {
        const work &w = s.wait_plan(n);
        if (w.queries < 0) return;
        const seen_tiles seen = find_seen<KEYS, LISTED>(w);
        for (int t = (w.slots + KEYS - 1) / KEYS - 1; t >= 0; t--, step++) {
            const auto at = ring_place<STAGES>::of(step);
            s.values.wait_full(at);
            if (!tile_seen(seen, t)) {
                const bool found =
                    find_nonfinite<T, sizeof s.v[0], SEARCHERS, true>((char *)s.v[at.stage], searcher);
                if (lane == 0) s.nonfinite[at.stage][searcher] = found;
                s.searched.arrive(at); /* each lane's, for what it wrote */
            }
            if (lane == 0) s.values.give_back(at);
        }
        s.give_back_plan(n);
    }
}

} // namespace sm90_forward

#endif
