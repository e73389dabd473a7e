/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pick.cu - the k best of all scores of a query that stands alone; a block a query, a warp a range of keys.
 *
 * Of each thread's scores the greatest of every second go to shared memory: the k-th best of those is a bound
 * that the k-th best of all does not come below, and few scores pass it. Among these the k-th best is found;
 * where they have no room, among all. It may start while the scores run. Limit: reading the scores four
 * times, from L2.
 */
#include "indexer/sm90/shared.cuh"

using namespace sm90_indexer;

enum { TEAM = 1024, PASSED = 24 << 10, ROW = 32, AT_ONCE = 8 };

struct pick_shared {
    team_room<TEAM> team;
    uint32_t most[2 * TEAM], rank[PASSED];
    int32_t passed;
};

/* Calls `use(rank, key, here)` for a warp's keys, in their order, by whole warps. */
template <typename Use>
static __device__ __forceinline__ void walk(const float *raw, int first, int end, const Use &use)
{
    for (int row0 = first + (int)threadIdx.x % ROW; row0 - (int)threadIdx.x % ROW < end;
         row0 += AT_ONCE * ROW) {
        float x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) x[i] = row0 + i * ROW < end ? __ldcg(raw + row0 + i * ROW) : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool here = row0 + i * ROW < end;
            use(here ? rank_of(x[i]) : 0, row0 + i * ROW, here);
        }
    }
}

/* The k-th best, and how many of its equals are among the k. */
static __device__ __forceinline__ uint32_t kth(pick_shared &m, const float *raw, int seen, int first, int end,
                                               int k, int *equal)
{
    const int t = threadIdx.x;
    uint32_t even = 0, odd = 0;
    walk(raw, first, end, [&](uint32_t rank, int key, bool) {
        even = max(even, key / ROW % 2 == 0 ? rank : 0);
        odd = max(odd, key / ROW % 2 == 0 ? 0 : rank);
    });
    m.most[t] = even;
    m.most[TEAM + t] = odd;
    if (t == 0) m.passed = 0;
    const uint32_t bound = team_kth(
        m.team, [&](int i) { return m.most[i]; }, 2 * TEAM, k, equal);
    walk(raw, first, end, [&](uint32_t rank, int, bool here) {
        const bool passes = here && rank >= bound;
        const unsigned lanes = __ballot_sync(~0u, passes);
        int at = 0;
        if (lanes != 0 && t % 32 == 0) at = atomicAdd(&m.passed, __popc(lanes));
        at = __shfl_sync(~0u, at, 0) + __popc(lanes & ((1u << t % 32) - 1));
        if (passes && at < PASSED) m.rank[at] = rank;
    });
    __syncthreads();
    const int passed = m.passed;
    if (passed <= PASSED)
        return team_kth(
            m.team, [&](int i) { return m.rank[i]; }, passed, k, equal);
    return team_kth(
        m.team, [&](int i) { return rank_of(__ldcg(raw + i)); }, seen, k, equal);
}

static __global__ void __launch_bounds__(TEAM, 1)
    indexer_pick(const __grid_constant__ index_kernel a, const __grid_constant__ key_feed f)
{
    extern __shared__ __align__(16) char memory[];
    pick_shared &m = *(pick_shared *)memory;
    const int b = blockIdx.x, t = threadIdx.x, seen = index_seen(a, b, 0), count = min(seen, a.k),
              rows = (seen + ROW - 1) / ROW, first = (rows + 31) / 32 * (t / 32) * ROW,
              end = min(first + (rows + 31) / 32 * ROW, seen);
    const float *const raw = f.raw + b * f.raw_row;
    int32_t *const idx = a.idx + b * a.idx_row[0];
    float *const scores = a.scores + b * a.scores_row[0];
    wait_for_before();
    for (int i = count + t; i < a.k; i += TEAM) idx[i] = -1;
    if (t == 0) a.count[b * a.count_row[0]] = count;
    const int64_t scored = index_scores(a, b);
    for (int64_t i = t; a.scores != NULL && i < scored; i += TEAM)
        scores[i] = i < seen ? __ldcg(raw + i) + 0.0f : -INFINITY;
    if (seen <= a.k) {
        for (int i = t; i < seen; i += TEAM) idx[i] = i;
        return;
    }
    int equal, same = 0, more = 0;
    const uint32_t least = kth(m, raw, seen, first, end, a.k, &equal);
    walk(raw, first, end, [&](uint32_t rank, int, bool) {
        same += rank == least;
        more += rank > least;
    });
    same = __reduce_add_sync(~0u, same);
    more = __reduce_add_sync(~0u, more);
    if (t % 32 == 0) { /* how many before this warp: in 32 bits each */
        m.most[t / 32] = (uint32_t)same;
        m.most[32 + t / 32] = (uint32_t)more;
    }
    __syncthreads();
    same = (int)__reduce_add_sync(~0u, t % 32 < t / 32 ? m.most[t % 32] : 0);
    more = (int)__reduce_add_sync(~0u, t % 32 < t / 32 ? m.most[32 + t % 32] : 0);
    walk(raw, first, end, [&](uint32_t rank, int key, bool) {
        const unsigned sames = __ballot_sync(~0u, rank == least), mores = __ballot_sync(~0u, rank > least),
                       below = (1u << t % 32) - 1;
        const int before = same + __popc(sames & below);
        if (rank > least || (rank == least && before < equal))
            idx[more + __popc(mores & below) + min(before, equal)] = key;
        same += __popc(sames);
        more += __popc(mores);
    });
}

quern_status sm90_indexer::pick_best(const stage_exec *exec, const index_kernel &a, const key_feed &f)
{
    return launch_behind((cudaStream_t)exec->stream, indexer_pick, dim3((unsigned)a.batch), TEAM,
                         sizeof(pick_shared), "indexer, picking", a, f);
}
