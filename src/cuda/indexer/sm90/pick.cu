/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pick.cu - the k best of all scores of a query that stands alone; a block a query, a warp a range of keys.
 *
 * Each thread's scores are two sets, and the greatest of each go to shared memory: the k-th best of those, of
 * which the first bits do, is a bound that the k-th best of all does not come below, and few scores pass it.
 * They are kept with their keys, and the k-th best is found among them by one warp: a barrier of the block
 * costs more than what a bit of the search does. A bit for each key that is chosen puts these in order. Where
 * those that pass have no room, or keys no bit, the k-th best is found among all, and the scores are read
 * twice more. It may start while the scores run. Limit: reading the scores twice, from L2.
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
    int32_t passed, equal;
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

/* How many of n ranks, a multiple of 4, are at least v; by one warp. */
static __device__ __forceinline__ int warp_least(const uint32_t *rank, int n, uint32_t v)
{
    int count = 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32 * 4; i < n; i += 128) {
        const uint4 x = *(const uint4 *)(rank + i);
        count += (x.x >= v) + (x.y >= v) + (x.z >= v) + (x.w >= v);
    }
    return __reduce_add_sync(~0u, count);
}

/* By one warp: the k-th best of n ranks from `low` on, or `bits` of it below those that all have in common,
 * the rest 0. There is room behind them up to a multiple of 4. */
static __device__ __forceinline__ uint32_t warp_kth(uint32_t *rank, int n, int k, uint32_t low, int bits)
{
    const int lane = (int)threadIdx.x % 32, whole = (n + 3) / 4 * 4;
    uint32_t high = 0;
    if (n + lane < whole) rank[n + lane] = 0;
    __syncwarp();
    for (int i = lane; i < n; i += 32) high = max(high, rank[i]);
    high = __reduce_max_sync(~0u, high);
    const int same = low == high ? 32 : __clz((int)(low ^ high));
    uint32_t found = same == 0 ? 0 : same == 32 ? high : high & ~(~0u >> same);
    for (int bit = 31 - same, left = bits; bit >= 0 && left > 0; bit--, left--)
        if (warp_least(rank, whole, found | 1u << bit) >= k) found |= 1u << bit;
    return found;
}

/* Keeps the scores that no bound excludes; false where they are too many. */
static __device__ __forceinline__ bool pass_bound(pick_shared &m, const float *raw, int seen, bool wide,
                                                  int k)
{
    const int t = threadIdx.x;
    uint32_t set[2] = {0, 0};
    sweep(raw, seen, wide, [&](uint32_t rank, int, bool, int which) { set[which] = max(set[which], rank); });
    m.most[t] = set[0];
    m.most[TEAM + t] = set[1];
    if (t == 0) m.passed = 0;
    __syncthreads();
    if (t < 32) {
        const uint32_t bound = warp_kth(m.most, 2 * TEAM, k, 0, BOUND_BITS);
        if (t == 0) m.found = bound;
    }
    __syncthreads();
    const uint32_t bound = m.found;
    sweep(raw, seen, wide, [&](uint32_t rank, int key, bool here, int) {
        const bool passes = here && rank >= bound;
        const unsigned lanes = __ballot_sync(~0u, passes);
        int at = 0;
        if (lanes == 0) return;
        if (t % 32 == 0) at = atomicAdd(&m.passed, __popc(lanes));
        at = __shfl_sync(~0u, at, 0) + __popc(lanes & ((1u << t % 32) - 1));
        if (passes && at < PASSED) {
            m.rank[at] = rank;
            m.key[at] = (uint32_t)key;
        }
    });
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
    if (seen <= KEY_BITS && pass_bound(m, raw, seen, wide, a.k)) choose_passed(m, seen, a.k, idx);
    else choose_among_all(m, raw, seen, a.k, idx);
}

quern_status sm90_indexer::pick_best(const stage_exec *exec, const index_kernel &a, const key_feed &f)
{
    return launch_behind((cudaStream_t)exec->stream, indexer_pick, dim3((unsigned)a.batch), TEAM,
                         sizeof(pick_shared), "indexer, picking", a, f);
}
