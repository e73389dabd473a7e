/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pick.cu - the k best of all scores of a query that stands alone; a block a query.
 *
 * Short rows stay in registers. Of long rows the k-th best of the ranks that the scorers left, one of each
 * RANKED keys, is a bound that the k-th best of all does not come below, and few scores pass it: only the
 * keys whose rank passes are read, and those that pass are kept in their order, among which the k-th best is
 * found. Where groups are too few for that, or those that pass have no room, the k-th best is found among
 * all, which reads the scores five times. It may start while the scores run. Limit: the steps that follow one
 * another, and their code: a block runs it once, and an instruction that comes from L2 takes some ten clocks.
 * So the loops of long rows stay loops, and what is done twice is a function.
 */
#include "common/kth.cuh"
#include "indexer/sm90_one/params.cuh"

using namespace sm90_indexer;

enum {
    TEAM = 1024,
    WARPS = TEAM / 32,
    PASSED = 4 << 10,    /* keys, or groups of them */
    GROUPS = 16 << 10,   /* whose ranks have room */
    FOURS = 4,           /* scores that a thread reads at once, in fours */
    AT_ONCE = 2,         /* the same, of groups that have passed */
    ROUND = 8 * AT_ONCE, /* groups of a warp's turn */
    SHORT_EACH = 16,     /* keys of a thread */
    SHORT_EARLY = 8      /* queries */
};

struct pick_shared {
    kth_room<TEAM> kth;
    block_sums<TEAM> sums;
    alignas(16) uint32_t rank[GROUPS + PASSED]; /* of groups, and of keys that have passed */
    uint32_t key[PASSED];
    uint16_t group[PASSED];
};
static_assert(TEAM * SHORT_EACH == SHORT_ROW, "rows without ranks are short");
static_assert(GROUPS <= 1 << 16 && RANKED == 16, "groups have 16 bits, and four lanes one of them");

/* Four scores from `key` on; a row ends at a multiple of four. */
static __device__ __forceinline__ float4 four_scores(const float *raw, int key)
{
    return __ldcg((const float4 *)(raw + key));
}

/* ---- long rows ---- */

/* Calls use(rank) for all scores, this thread's, in any order. */
template <typename Use>
static __device__ __forceinline__ void sweep(const float *raw, int seen, const Use &use)
{
    for (int first = (int)threadIdx.x * 4; first < seen; first += FOURS * 4 * TEAM) {
        float4 x[FOURS];
#pragma unroll
        for (int i = 0; i < FOURS; i++)
            if (first + i * 4 * TEAM < seen) x[i] = four_scores(raw, first + i * 4 * TEAM);
#pragma unroll
        for (int i = 0; i < FOURS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (first + i * 4 * TEAM + e < seen) use(rank_of((&x[i].x)[e]));
    }
}

/* What of a list has been written. */
struct written {
    uint32_t more, same; /* that beat the k-th best, and its equals, those left out included */
};

/* Writes this thread's key, where its rank is good enough, behind those that are written; `equal`: how many
 * of the k-th best's equals are chosen. */
static __device__ __forceinline__ void write_key(int32_t *idx, written &w, uint32_t rank, uint32_t kth,
                                                 uint32_t equal, int key)
{
    if (rank > kth || (rank == kth && w.same < equal)) idx[w.more + min(w.same, equal)] = key;
    w.more += rank > kth;
    w.same += rank == kth;
}

/* The k best among all scores: a warp takes a range of keys, 128 at a time. */
static __device__ __noinline__ void choose_among_all(pick_shared &m, const float *raw, int seen, int k,
                                                     int32_t *idx)
{
    const int lane = (int)threadIdx.x % 32, rows = (seen + 127) / 128, each = (rows + WARPS - 1) / WARPS,
              first = (int)threadIdx.x / 32 * each * 128, end = min(first + each * 128, seen);
    const uint32_t kth =
        kth_best<true>(m.kth, (uint32_t)k, [&](const auto &use) { sweep(raw, seen, use); });
    const auto rank_at = [&](const float4 &x, int key, int e) {
        return key + e < end ? rank_of((&x.x)[e]) : 0;
    };
    uint32_t own[2] = {0, 0}, all[2];
#pragma unroll 4
    for (int key = first + lane * 4; key < end; key += 128) {
        const float4 x = four_scores(raw, key);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            own[0] += rank_at(x, key, e) > kth;
            own[1] += rank_at(x, key, e) == kth;
        }
    }
    written w;
    w.more = __shfl_sync(~0u, block_before(m.sums, 0, own[0], all[0]), 0);
    w.same = __shfl_sync(~0u, block_before(m.sums, 1, own[1], all[1]), 0);
    for (int from = first; from < end; from += 128) {
        const int key = from + lane * 4;
        const float4 x = key < end ? four_scores(raw, key) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        uint32_t counts = 0; /* of both, in 16 bits each */
#pragma unroll
        for (int e = 0; e < 4; e++)
            counts += (uint32_t)(rank_at(x, key, e) > kth) | (uint32_t)(rank_at(x, key, e) == kth) << 16;
        const uint32_t upto = sum_to_lane(counts), sums = __shfl_sync(~0u, upto, 31);
        written at = {w.more + ((upto - counts) & 0xffff), w.same + ((upto - counts) >> 16)};
#pragma unroll
        for (int e = 0; e < 4; e++) write_key(idx, at, rank_at(x, key, e), kth, k - all[0], key + e);
        w.more += sums & 0xffff;
        w.same += sums >> 16;
    }
}

/* The k-th best of n ranks from number `first` on. */
static __device__ __noinline__ uint32_t kth_in(int first, int n, int k)
{
    extern __shared__ __align__(16) char memory[];
    pick_shared &m = *(pick_shared *)memory;
    return kth_best<true>(m.kth, (uint32_t)k, [&](const auto &use) {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < n; i += TEAM) use(m.rank[first + i]);
    });
}

/* Notes the groups whose rank is as good as the k-th best of these, in their order; sets what that is.
 * Returns how many they are. */
static __device__ __forceinline__ uint32_t pass_groups(pick_shared &m, const uint32_t *best, int groups,
                                                       int k, uint32_t &bound)
{
    const int own = ((groups + TEAM - 1) / TEAM + 3) / 4 * 4, first = (int)threadIdx.x * own,
              end = min(first + own, groups);
    uint32_t count = 0, all;
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < groups; i += TEAM * 4)
        *(uint4 *)&m.rank[i] = __ldcg((const uint4 *)(best + i));
    __syncthreads();
    bound = kth_in(0, groups, k);
#pragma unroll 1
    for (int i = first; i < end; i++) count += m.rank[i] >= bound;
    uint32_t at = block_before(m.sums, 0, count, all);
#pragma unroll 1
    for (int i = first; i < end; i++)
        if (m.rank[i] >= bound && at < PASSED) m.group[at++] = (uint16_t)i;
    __syncthreads();
    return all;
}

/* Keeps the keys of groups that have passed whose score passes, in their order; returns how many they are. A
 * warp takes eight groups at a time, four of a group's keys a lane, and counts those that pass in bytes of a
 * word, a byte for each time. */
static __device__ __forceinline__ uint32_t pass_keys(pick_shared &m, const float *raw, int seen, int groups,
                                                     uint32_t bound)
{
    const int lane = (int)threadIdx.x % 32;
    uint32_t kept = 0;
    for (int from = 0, turn = 1; from < groups; from += ROUND * WARPS, turn ^= 1) {
        const int first = from + (int)threadIdx.x / 32 * ROUND + lane / 4;
        int key[AT_ONCE];
        float4 x[AT_ONCE];
        uint32_t passed = 0, counts = 0, all;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool here = first + i * 8 < groups;
            key[i] = here ? m.group[first + i * 8] * RANKED + lane % 4 * 4 : seen;
            if (key[i] < seen) x[i] = four_scores(raw, key[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool passes = key[i] + e < seen && rank_of((&x[i].x)[e]) >= bound;
                passed |= (uint32_t)passes << (i * 4 + e);
                counts += (uint32_t)passes << i * 8;
            }
        const uint32_t upto = sum_to_lane(counts), sums = __shfl_sync(~0u, upto, 31),
                       warp = block_before(m.sums, turn, lane == 0 ? __dp4a(sums, 0x01010101u, 0u) : 0u, all);
        uint32_t place = kept + __shfl_sync(~0u, warp, 0);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t at = place + ((upto - counts) >> i * 8 & 255);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if ((passed >> (i * 4 + e) & 1) != 0 && at < PASSED) {
                    m.rank[GROUPS + at] = rank_of((&x[i].x)[e]);
                    m.key[at++] = (uint32_t)(key[i] + e);
                }
            place += sums >> i * 8 & 255;
        }
        kept += all;
    }
    __syncthreads();
    return kept;
}

/* The k best of n keys that have passed. */
static __device__ __forceinline__ void choose_passed(pick_shared &m, int n, int k, int32_t *idx)
{
    const int own = (n + TEAM - 1) / TEAM, first = (int)threadIdx.x * own, end = min(first + own, n);
    const uint32_t *const rank = m.rank + GROUPS;
    uint32_t counts = 0, all;
    const uint32_t kth = kth_in(GROUPS, n, k);
#pragma unroll 1
    for (int i = first; i < end; i++)
        counts += (uint32_t)(rank[i] > kth) | (uint32_t)(rank[i] == kth) << 16;
    const uint32_t before = block_before(m.sums, 0, counts, all);
    written w = {before & 0xffff, before >> 16};
#pragma unroll 1
    for (int i = first; i < end; i++) write_key(idx, w, rank[i], kth, k - (all & 0xffff), (int)m.key[i]);
}

/* What needs no choice: the count, the list's end, the scores as they are asked for, and a list of all that a
 * query sees. True: that is the list. */
template <int THREADS>
static __device__ __forceinline__ bool pick_ends(const index_kernel &a, int b, const float *raw,
                                                 const index_place &place)
{
    const int t = threadIdx.x, seen = place.seen, count = min(seen, a.k);
    int32_t *const idx = a.idx + b * a.idx_row[0];
    float *const scores = a.scores + b * a.scores_row[0];
    for (int i = count + t; i < a.k; i += THREADS) idx[i] = -1;
    if (t == 0) a.count[b * a.count_row[0]] = count;
    const int64_t scored = place.limit < a.scores_n ? place.limit : a.scores_n;
    for (int64_t i = t; a.scores != NULL && i < scored; i += THREADS)
        scores[i] = i < seen ? __ldcg(raw + i) + 0.0f : -INFINITY;
    for (int i = t; seen <= a.k && i < seen; i += THREADS) idx[i] = i;
    return seen <= a.k;
}

static __global__ void __launch_bounds__(TEAM, 1)
    indexer_pick(const __grid_constant__ index_kernel a, const __grid_constant__ raw_scores to)
{
    extern __shared__ __align__(16) char memory[];
    pick_shared &m = *(pick_shared *)memory;
    const int b = blockIdx.x;
    const index_place place = index_place_of(a, b);
    const int seen = place.seen, groups = (seen + RANKED - 1) / RANKED;
    const float *const raw = to.raw + b * to.row;
    int32_t *const idx = a.idx + b * a.idx_row[0];
    wait_for_before();
    if (pick_ends<TEAM>(a, b, raw, place)) return;
    if (groups >= 2 * a.k && groups <= GROUPS) { /* of fewer, many would pass */
        uint32_t bound;
        const uint32_t passed = pass_groups(m, to.best + b * best_row(to.row), groups, a.k, bound);
        const uint32_t keys = passed <= PASSED ? pass_keys(m, raw, seen, (int)passed, bound) : ~0u;
        if (keys <= PASSED) {
            choose_passed(m, (int)keys, a.k, idx);
            return;
        }
    }
    choose_among_all(m, raw, seen, a.k, idx);
}

/* ---- short rows ---- */

template <int THREADS> struct short_shared {
    kth_room<THREADS> kth;
    block_sums<THREADS> sums;
};

/* Of a warp's keys a thread has four in each 128. Those of each 128 that are chosen are counted in a byte. */
template <int THREADS>
static __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    indexer_pick_short(const __grid_constant__ index_kernel a, const __grid_constant__ raw_scores to)
{
    static_assert(THREADS * SHORT_EACH < 1 << 16 && SHORT_EACH == 16, "counts fit, and bytes of a word do");
    __shared__ short_shared<THREADS> m;
    const int b = blockIdx.x;
    const index_place place = index_place_of(a, b);
    const int seen = place.seen, lane = (int)threadIdx.x % 32,
              first = (int)threadIdx.x / 32 * 32 * SHORT_EACH + lane * 4;
    const float *const raw = to.raw + b * to.row;
    int32_t *const idx = a.idx + b * a.idx_row[0];
    wait_for_before();
    if (pick_ends<THREADS>(a, b, raw, place)) return;
    uint32_t rank[SHORT_EACH], more = 0, same = 0, all;
#pragma unroll
    for (int i = 0; i < SHORT_EACH; i += 4) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i * 32 < seen) x = four_scores(raw, first + i * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) rank[i + e] = first + i * 32 + e < seen ? rank_of((&x.x)[e]) : 0;
    }
    const uint32_t kth = kth_best<false>(m.kth, (uint32_t)a.k, [&](const auto &use) {
#pragma unroll
        for (int i = 0; i < SHORT_EACH; i++) use(rank[i]);
    });
#pragma unroll
    for (int i = 0; i < SHORT_EACH; i++) {
        more += (uint32_t)(rank[i] > kth) << i / 4 * 8;
        same += (uint32_t)(rank[i] == kth) << i / 4 * 8;
    }
    const uint32_t mores = sum_to_lane(more), sames = sum_to_lane(same),
                   all_more = __shfl_sync(~0u, mores, 31), all_same = __shfl_sync(~0u, sames, 31),
                   counts = __dp4a(all_more, 0x01010101u, 0u) | __dp4a(all_same, 0x01010101u, 0u) << 16,
                   before = __shfl_sync(~0u, block_before(m.sums, 0, lane == 0 ? counts : 0, all), 0);
    written warp = {before & 0xffff, before >> 16};
#pragma unroll
    for (int i = 0; i < SHORT_EACH; i += 4) {
        written at = {warp.more + ((mores - more) >> i * 2 & 255),
                      warp.same + ((sames - same) >> i * 2 & 255)};
#pragma unroll
        for (int e = 0; e < 4; e++)
            write_key(idx, at, rank[i + e], kth, a.k - (all & 0xffff), first + i * 32 + e);
        warp.more += all_more >> i * 2 & 255;
        warp.same += all_same >> i * 2 & 255;
    }
}

template <int THREADS>
static quern_status pick_short(cudaStream_t stream, const index_kernel &a, const raw_scores &to)
{
    /* Blocks of many queries that start early crowd on the multiprocessors that the scores leave first. */
    const bool early = a.batch <= SHORT_EARLY;
    return launch_cluster(stream, indexer_pick_short<THREADS>, dim3((unsigned)a.batch), THREADS, 0,
                          "indexer, picking among few", 1, early, a, to);
}

quern_status sm90_indexer::pick_best(const stage_exec *exec, const index_kernel &a, const raw_scores &to)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    if (to.row <= TEAM / 2 * SHORT_EACH) return pick_short<TEAM / 2>(stream, a, to);
    if (to.row <= TEAM * SHORT_EACH) return pick_short<TEAM>(stream, a, to);
    return launch_behind(stream, indexer_pick, dim3((unsigned)a.batch), TEAM, sizeof(pick_shared),
                         "indexer, picking", a, to);
}
