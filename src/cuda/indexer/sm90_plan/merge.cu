/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * merge.cu - the k best of the shares of a query's keys: a block a query, the ranks of all shares in shared
 * memory, in the order of the shares and so of the indices. Of many ranks those that cannot be among the best
 * are dropped first. It may start while the scores run.
 */
#include "indexer/sm90_plan/plan.cuh"

using namespace sm90_indexer;

enum { TEAM = 1024, MANY = 4 * TEAM };

struct merge_shared {
    team_room<TEAM> team;
    uint32_t most[TEAM]; /* of a thread's ranks */
    /* Of all shares; then those that may be among the best, and where they were. */
    alignas(16) uint32_t rank[1];
};

/* Drops ranks below the k-th best of the threads' greatest, which the k-th best of all does not come below;
 * the rest keep their order. Returns how many they are; `from`: their places. */
static __device__ __forceinline__ int drop_low(merge_shared &m, int n, int k, int32_t *from)
{
    const auto sync = []() { __syncthreads(); };
    const int t = threadIdx.x;
    uint32_t most = 0;
    for (int i = t; i < n; i += TEAM) most = max(most, m.rank[i]);
    m.most[t] = most;
    int equal, kept = 0, set = 0;
    const uint32_t least = team_kth(
        m.team, [&](int i) { return m.most[i]; }, TEAM, k, &equal);
    for (int first = 0; first < n; first += TEAM, set ^= 1) {
        const uint32_t rank = first + t < n ? m.rank[first + t] : 0;
        const bool here = rank != 0 && rank >= least;
        const team_place p = team_count(m.team, set, t, false, here, sync);
        if (here) {
            m.rank[kept + p.more] = rank;
            from[kept + p.more] = first + t;
        }
        kept += p.all_more;
    }
    __syncthreads();
    return kept;
}

static __global__ void __launch_bounds__(TEAM, 1)
    indexer_merge(const __grid_constant__ plan p, const __grid_constant__ share_lists lists)
{
    extern __shared__ __align__(16) char memory[];
    const index_kernel &a = p.a;
    merge_shared &m = *(merge_shared *)memory;
    const auto sync = []() { __syncthreads(); };
    const int b = blockIdx.x / a.queries, query = blockIdx.x - b * a.queries, t = threadIdx.x,
              last = min(query / MOST_QUERIES * MOST_QUERIES + MOST_QUERIES, a.queries) - 1,
              shown = index_seen(a, b, last), keys = share_keys(shown, p.cut.shares),
              n = shown > 0 ? (shown + keys - 1) / keys * a.k : 0, seen = index_seen(a, b, query);
    const int64_t from = list_at(p, b, query, 0);
    wait_for_before();
    for (int i = t; i < n; i += TEAM) m.rank[i] = lists.rank[from + i];
    __syncthreads();
    int32_t *const place = (int32_t *)(m.rank + p.cut.shares * a.k);
    const bool fewer = n > MANY && a.k < TEAM && seen > a.k;
    const int left = fewer ? drop_low(m, n, a.k, place) : n;
    int kept = 0, met = 0, set = 0, equal = 0;
    const uint32_t least = seen > a.k && left > a.k
                               ? team_kth(
                                     m.team, [&](int i) { return m.rank[i]; }, left, a.k, &equal)
                               : 0;
    int32_t *const idx = a.idx + b * a.idx_row[0] + query * a.idx_row[1];
    for (int first = 0; first < left; first += TEAM, set ^= 1) {
        const uint32_t rank = first + t < left ? m.rank[first + t] : 0;
        const bool same = rank != 0 && rank == least, more = rank > least;
        const team_place p = team_count(m.team, set, t, same, more, sync);
        if (more || (same && met + p.same < equal))
            idx[kept + p.more + min(met + p.same, equal)] =
                lists.index[from + (fewer ? place[first + t] : first + t)];
        kept += p.all_more;
        met += p.all_same;
    }
    const int count = min(seen, a.k);
    for (int i = count + t; i < a.k; i += TEAM) idx[i] = -1;
    if (t == 0) a.count[b * a.count_row[0] + query * a.count_row[1]] = count;
    float *const scores = a.scores + b * a.scores_row[0] + query * a.scores_row[1];
    for (int64_t i = seen + t; a.scores != NULL && i < a.scores_n; i += TEAM) scores[i] = -INFINITY;
}

quern_status sm90_indexer::merge_shares(const stage_exec *exec, const plan &p, const share_lists &lists)
{
    const size_t ranks = (size_t)p.cut.shares * p.a.k;
    return launch_behind((cudaStream_t)exec->stream, indexer_merge,
                         dim3((unsigned)(p.a.batch * p.a.queries)), TEAM,
                         sizeof(merge_shared) + 2 * ranks * sizeof(uint32_t), "indexer, merging", p, lists);
}
