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
 * that follow one another.
 *
 * Short rows stay in registers, a thread's keys one after the other: the k-th best is found two bits at a
 * time, by counting, until just k ranks are as good. This needs next to no shared memory, so that such
 * blocks find room beside a product's.
 */
#include "common/scan.cuh"
#include "indexer/sm90_one/params.cuh"

using namespace sm90_indexer;

enum {
    TEAM = 1024,
    WARPS = TEAM / 32,
    PASSED = 8 << 10,
    ROW = 32,
    AT_ONCE = 8,
    FOURS = 4,
    BOUND_BITS = 16,
    KEY_BITS = 1 << 18,
    SHORT_TEAM = 512,
    SHORT_WARPS = SHORT_TEAM / 32,
    SHORT_LEAST = 16, /* keys of a thread */
    SHORT_MOST = 32,
    SHORT_EARLY = 8 /* queries */
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
    const uint32_t sum = sum_to_lane(x);
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

/* What needs no choice: the count, the list's end, the scores as they are asked for, and a list of all that a
 * query sees. True: that is the list. */
template <int THREADS>
static __device__ __forceinline__ bool pick_ends(const index_kernel &a, int b, const float *raw, int seen)
{
    const int t = threadIdx.x, count = min(seen, a.k);
    int32_t *const idx = a.idx + b * a.idx_row[0];
    float *const scores = a.scores + b * a.scores_row[0];
    for (int i = count + t; i < a.k; i += THREADS) idx[i] = -1;
    if (t == 0) a.count[b * a.count_row[0]] = count;
    const int64_t scored = index_scores(a, b);
    for (int64_t i = t; a.scores != NULL && i < scored; i += THREADS)
        scores[i] = i < seen ? __ldcg(raw + i) + 0.0f : -INFINITY;
    for (int i = t; seen <= a.k && i < seen; i += THREADS) idx[i] = i;
    return seen <= a.k;
}

/* The scores of a row can be read four at a time. */
static __device__ __forceinline__ bool is_wide(const raw_scores &to)
{
    return to.row % 4 == 0 && (uintptr_t)to.raw % 16 == 0;
}

static __global__ void __launch_bounds__(TEAM, 1)
    indexer_pick(const __grid_constant__ index_kernel a, const __grid_constant__ raw_scores to)
{
    extern __shared__ __align__(16) char memory[];
    pick_shared &m = *(pick_shared *)memory;
    const int b = blockIdx.x, seen = index_seen(a, b, 0);
    const float *const raw = to.raw + b * to.row;
    int32_t *const idx = a.idx + b * a.idx_row[0];
    wait_for_before();
    if (pick_ends<TEAM>(a, b, raw, seen)) return;
    const bool by_groups = seen >= 2 * RANKED * a.k; /* of fewer, many groups would pass */
    if (seen > KEY_BITS) choose_among_all(m, raw, seen, a.k, idx);
    else if (by_groups ? pass_groups(m, raw, to.best + b * best_row(to), seen, a.k)
                       : pass_bound(m, raw, seen, is_wide(to), a.k))
        choose_passed(m, seen, a.k, idx);
    else choose_among_all(m, raw, seen, a.k, idx);
}

/* ---- short rows ---- */

/* The block's sums of two counts, each below 2^15, and of a third one, by turns in two places. */
struct short_shared {
    uint32_t two[2][SHORT_WARPS], three[2][SHORT_WARPS];
};

static __device__ __forceinline__ best_counts short_counts(short_shared &m, int turn, uint32_t one,
                                                           uint32_t two, uint32_t three)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const uint32_t pair = __reduce_add_sync(~0u, one | two << 16), last = __reduce_add_sync(~0u, three);
    if (lane == 0) {
        m.two[turn][warp] = pair;
        m.three[turn][warp] = last;
    }
    __syncthreads();
    const uint32_t pairs = __reduce_add_sync(~0u, lane < SHORT_WARPS ? m.two[turn][lane] : 0),
                   all = __reduce_add_sync(~0u, lane < SHORT_WARPS ? m.three[turn][lane] : 0);
    return {pairs & 0xffff, pairs >> 16, all};
}

/* The sums of two counts over the threads before this one, in 16 bits each. */
static __device__ __forceinline__ uint32_t short_before(short_shared &m, uint32_t counts)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const uint32_t sum = sum_to_lane(counts);
    __syncthreads();
    if (lane == 31) m.two[0][warp] = sum;
    __syncthreads();
    return __reduce_add_sync(~0u, lane < warp ? m.two[0][lane] : 0) + sum - counts;
}

/* EACH: keys of a thread. */
template <int EACH>
static __global__ void __launch_bounds__(SHORT_TEAM)
    indexer_pick_short(const __grid_constant__ index_kernel a, const __grid_constant__ raw_scores to)
{
    static_assert(SHORT_TEAM * EACH < 1 << 15, "counts fit");
    __shared__ short_shared m;
    const int b = blockIdx.x, seen = index_seen(a, b, 0), first = (int)threadIdx.x * EACH;
    const float *const raw = to.raw + b * to.row;
    int32_t *const idx = a.idx + b * a.idx_row[0];
    wait_for_before();
    if (pick_ends<SHORT_TEAM>(a, b, raw, seen)) return;
    const bool wide = is_wide(to);
    uint32_t rank[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (wide && first + i + 4 <= seen) {
            x = __ldcg((const float4 *)(raw + first + i));
        } else
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (first + i + e < seen) (&x.x)[e] = __ldcg(raw + first + i + e);
#pragma unroll
        for (int e = 0; e < 4; e++) rank[i + e] = first + i + e < seen ? rank_of((&x.x)[e]) : 0;
    }
    uint32_t found = 0;
    int those = seen, turn = 0; /* ranks from `found` on */
    for (int shift = 30; shift >= 0 && those > a.k; shift -= 2, turn ^= 1) {
        uint32_t one = 0, two = 0, three = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            one += rank[i] >= found + (1u << shift);
            two += rank[i] >= found + (2u << shift);
            three += rank[i] >= found + (3u << shift);
        }
        const best_counts c = short_counts(m, turn, one, two, three);
        const uint32_t digit = best_digit(c, a.k);
        found |= digit << shift;
        those = digit == 3 ? (int)c.three : digit == 2 ? (int)c.two : digit == 1 ? (int)c.one : those;
    }
    /* Of more than k the last ones of the least rank are left out. */
    uint32_t more = 0, same = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        more += rank[i] > found;
        same += rank[i] == found;
    }
    const uint32_t before = short_before(m, more | same << 16),
                   beat = short_counts(m, 1, more, 0, 0).one;
    const int equal = a.k - (int)beat; /* that are chosen */
    int beats = (int)(before & 0xffff), equals = (int)(before >> 16);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (rank[i] > found || (rank[i] == found && equals < equal))
            idx[beats + min(equals, equal)] = first + i;
        beats += rank[i] > found;
        equals += rank[i] == found;
    }
}

quern_status sm90_indexer::pick_best(const stage_exec *exec, const index_kernel &a, const raw_scores &to)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const dim3 grid((unsigned)a.batch);
    /* Blocks of many queries that start early crowd on the multiprocessors that the scores leave first. */
    const bool early = a.batch <= SHORT_EARLY;
    if (to.row <= SHORT_TEAM * SHORT_LEAST)
        return launch_cluster(stream, indexer_pick_short<SHORT_LEAST>, grid, SHORT_TEAM, 0,
                              "indexer, picking among few", 1, early, a, to);
    if (to.row <= SHORT_TEAM * SHORT_MOST)
        return launch_cluster(stream, indexer_pick_short<SHORT_MOST>, grid, SHORT_TEAM, 0,
                              "indexer, picking among few", 1, early, a, to);
    return launch_behind(stream, indexer_pick, grid, TEAM, sizeof(pick_shared), "indexer, picking", a, to);
}
