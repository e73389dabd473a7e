/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pick.cu - the k best of all scores of a query that stands alone; a block a query, a warp a range of keys.
 *
 * Each thread's scores are two sets, and the greatest of each go to shared memory: the k-th best of those, of
 * which the first bits do, is a bound that the k-th best of all does not come below, and few scores pass it.
 * Of long rows the sets are made of the ranks that the scorers left, one of each RANKED keys, and only the
 * keys whose rank passes are read. Those that pass are kept with their keys, and the k-th best is found among
 * them by one warp: a barrier of the block costs more than what a bit of the search does. A bit for each key
 * that is chosen puts these in order. Where those that pass have no room, or keys no bit, the k-th best is
 * found among all, and the scores are read twice more. It may start while the scores run. Limit: the steps
 * that follow one another; of short rows, reading the scores twice, from L2.
 */
#include "indexer/sm90/shared.cuh"

using namespace sm90_indexer;

enum {
    TEAM = 1024,
    WARPS = TEAM / 32,
    PASSED = 8 << 10,
    ROW = 32,
    AT_ONCE = 8,
    FOURS = 4,
    BOUND_BITS = 16,
    KEY_BITS = 1 << 18
};

struct pick_shared {
    team_room<TEAM> team;
    alignas(16) uint32_t most[2 * TEAM], rank[PASSED];
    uint32_t key[PASSED];
    uint32_t chosen[KEY_BITS / 32], same[KEY_BITS / 32]; /* keys that beat the k-th best, and its equals */
    uint32_t sums[WARPS];
    uint32_t found;
    int32_t passed, equal, groups;
};
static_assert(KEY_BITS / RANKED <= KEY_BITS / 32 * 2, "bits of the chosen have room for groups in 16 bits");

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

/* The same in any order, four keys of a thread side by side where rows of scores allow it (`wide`). */
template <typename Use>
static __device__ __forceinline__ void sweep(const float *raw, int seen, bool wide, const Use &use)
{
    for (int row0 = 0; row0 < seen; row0 += FOURS * 4 * TEAM) {
        float x[FOURS][4];
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            const int key = row0 + (i * TEAM + (int)threadIdx.x) * 4;
            if (wide && key + 4 <= seen) {
                *(float4 *)x[i] = __ldcg((const float4 *)(raw + key));
            } else
#pragma unroll
                for (int e = 0; e < 4; e++) x[i][e] = key + e < seen ? __ldcg(raw + key + e) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < FOURS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = row0 + (i * TEAM + (int)threadIdx.x) * 4 + e;
                use(key < seen ? rank_of(x[i][e]) : 0, key, key < seen, e % 2);
            }
    }
}

/* Of a warp's lanes those that pass, as numbers from *count on, which grows; -1: the others. */
static __device__ __forceinline__ int place_of(bool passes, int32_t *count)
{
    const int lane = (int)threadIdx.x % 32;
    const unsigned lanes = __ballot_sync(~0u, passes);
    int at = 0;
    if (lanes == 0) return -1;
    if (lane == 0) at = atomicAdd(count, __popc(lanes));
    at = __shfl_sync(~0u, at, 0) + __popc(lanes & ((1u << lane) - 1));
    return passes ? at : -1;
}
static __device__ __forceinline__ void pass(pick_shared &m, bool passes, uint32_t rank, int key)
{
    const int at = place_of(passes, &m.passed);
    if (at < 0 || at >= PASSED) return;
    m.rank[at] = rank;
    m.key[at] = (uint32_t)key;
}

/* The bound of the sets whose greatest are this thread's two. */
static __device__ __forceinline__ uint32_t bound_of(pick_shared &m, const uint32_t (&set)[2], int k)
{
    const int t = threadIdx.x;
    m.most[t] = set[0];
    m.most[TEAM + t] = set[1];
    if (t == 0) m.passed = m.groups = 0;
    __syncthreads();
    if (t < 32) {
        const uint32_t bound = warp_kth(m.most, 2 * TEAM, k, 0, BOUND_BITS);
        if (t == 0) m.found = bound;
    }
    __syncthreads();
    return m.found;
}

/* Keeps the scores that no bound excludes; false where they are too many. */
static __device__ __forceinline__ bool pass_bound(pick_shared &m, const float *raw, int seen, bool wide,
                                                  int k)
{
    uint32_t set[2] = {0, 0};
    sweep(raw, seen, wide, [&](uint32_t rank, int, bool, int which) { set[which] = max(set[which], rank); });
    const uint32_t bound = bound_of(m, set, k);
    sweep(raw, seen, wide,
          [&](uint32_t rank, int key, bool here, int) { pass(m, here && rank >= bound, rank, key); });
    __syncthreads();
    return m.passed <= PASSED;
}

/* The same by the ranks of groups of RANKED keys. */
static __device__ __forceinline__ bool pass_groups(pick_shared &m, const float *raw, const uint32_t *best,
                                                   int seen, int k)
{
    const int t = threadIdx.x, groups = (seen + RANKED - 1) / RANKED;
    uint16_t *const passed = (uint16_t *)m.chosen;
    uint32_t set[2] = {0, 0};
#pragma unroll 2
    for (int g0 = 0; g0 < groups; g0 += 2 * TEAM)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int g = g0 + i * TEAM + t;
            if (g < groups) set[i] = max(set[i], __ldcg(best + g));
        }
    const uint32_t bound = bound_of(m, set, k);
#pragma unroll 4
    for (int g0 = 0; g0 < groups; g0 += TEAM) {
        const int g = g0 + t, at = place_of(g < groups && __ldcg(best + g) >= bound, &m.groups);
        if (at >= 0) passed[at] = (uint16_t)g;
    }
    __syncthreads();
    const int keys = m.groups * RANKED;
#pragma unroll 4
    for (int i0 = 0; i0 < keys; i0 += TEAM) {
        const int i = i0 + t, key = i < keys ? passed[i / RANKED] * RANKED + i % RANKED : seen;
        const uint32_t rank = key < seen ? rank_of(__ldcg(raw + key)) : 0;
        pass(m, key < seen && rank >= bound, rank, key);
    }
    __syncthreads();
    return m.passed <= PASSED;
}

/* The sum over the threads before this one. */
static __device__ __forceinline__ uint32_t sum_before(pick_shared &m, uint32_t x)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t sum = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
    }
    if (lane == 31) m.sums[warp] = sum;
    __syncthreads();
    return __reduce_add_sync(~0u, lane < warp ? m.sums[lane] : 0) + sum - x;
}

/* The k best of those that pass the bound, in the order of their keys. */
static __device__ __forceinline__ void choose_passed(pick_shared &m, int seen, int k, int32_t *idx)
{
    const int t = threadIdx.x, words = (seen + 31) / 32, each = (words + TEAM - 1) / TEAM;
    for (int i = t; i < words; i += TEAM) m.chosen[i] = m.same[i] = 0;
    if (m.passed > 2 * TEAM) {
        int equal;
        const uint32_t least = team_kth(
            m.team, [&](int i) { return m.rank[i]; }, m.passed, k, &equal);
        if (t == 0) {
            m.found = least;
            m.equal = equal;
        }
    } else if (t < 32) {
        const uint32_t least = warp_kth(m.rank, m.passed, k, m.found, 32);
        const int equal = k - warp_least(m.rank, (m.passed + 3) / 4 * 4, least + 1);
        if (t == 0) {
            m.found = least;
            m.equal = equal;
        }
    }
    __syncthreads();
    const uint32_t least = m.found;
    for (int i = t; i < m.passed; i += TEAM)
        if (m.rank[i] >= least)
            atomicOr(&(m.rank[i] > least ? m.chosen : m.same)[m.key[i] / 32], 1u << m.key[i] % 32);
    __syncthreads();
    uint32_t counts = 0; /* of both, in 16 bits each: at most PASSED */
    for (int w = t * each; w < (t + 1) * each && w < words; w++)
        counts += (uint32_t)__popc(m.chosen[w]) | (uint32_t)__popc(m.same[w]) << 16;
    const uint32_t before = sum_before(m, counts);
    int more = (int)(before & 0xffff), same = (int)(before >> 16);
    if (counts == 0) return;
    for (int w = t * each; w < (t + 1) * each && w < words; w++)
        for (uint32_t both = m.chosen[w] | m.same[w]; both != 0; both &= both - 1) {
            const int bit = __ffs((int)both) - 1;
            const bool beats = (m.chosen[w] >> bit & 1) != 0;
            if (beats || same < m.equal) idx[more + min(same, m.equal)] = w * 32 + bit;
            more += beats;
            same += !beats;
        }
}

/* The same of all scores. */
static __device__ __noinline__ void choose_among_all(pick_shared &m, const float *raw, int seen, int k,
                                                     int32_t *idx)
{
    const int t = threadIdx.x, rows = (seen + ROW - 1) / ROW, first = (rows + 31) / 32 * (t / 32) * ROW,
              end = min(first + (rows + 31) / 32 * ROW, seen);
    int equal, same = 0, more = 0;
    const uint32_t least = team_kth(
        m.team, [&](int i) { return rank_of(__ldcg(raw + i)); }, seen, k, &equal);
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

static __global__ void __launch_bounds__(TEAM, 1)
    indexer_pick(const __grid_constant__ index_kernel a, const __grid_constant__ key_feed f)
{
    extern __shared__ __align__(16) char memory[];
    pick_shared &m = *(pick_shared *)memory;
    const int b = blockIdx.x, t = threadIdx.x, seen = index_seen(a, b, 0), count = min(seen, a.k);
    const float *const raw = f.raw + b * f.raw_row;
    const bool wide = f.raw_row % 4 == 0 && (uintptr_t)f.raw % 16 == 0;
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
    const bool by_groups = seen >= 2 * RANKED * a.k; /* of fewer, many groups would pass */
    if (seen > KEY_BITS) choose_among_all(m, raw, seen, a.k, idx);
    else if (by_groups ? pass_groups(m, raw, f.best + b * best_row(f), seen, a.k)
                       : pass_bound(m, raw, seen, wide, a.k))
        choose_passed(m, seen, a.k, idx);
    else choose_among_all(m, raw, seen, a.k, idx);
}

quern_status sm90_indexer::pick_best(const stage_exec *exec, const index_kernel &a, const key_feed &f)
{
    return launch_behind((cudaStream_t)exec->stream, indexer_pick, dim3((unsigned)a.batch), TEAM,
                         sizeof(pick_shared), "indexer, picking", a, f);
}
