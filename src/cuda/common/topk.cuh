/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * topk.cuh - the k best of scores that a warp reads in the order of their indices. What beats the k-th best
 * so far is appended; once the room is full, the k best stay (`best_cut`): the k-th best rank is found two
 * bits at a time, by counting. The list stays in the order of indices, so equal ranks keep the lowest,
 * and the end is ascending without a sort. A team is several warps that keep one list.
 */
#ifndef QUERN_CUDA_TOPK_CUH
#define QUERN_CUDA_TOPK_CUH

#include <stdint.h>

struct best_list {
    uint32_t *rank; /* shared memory, `room` each */
    int32_t *index;
    int n;
    uint32_t least; /* what a rank must exceed */
};

/* Numbers in the order of scores; -0 equals 0, NaN comes last. All exceed 0. */
__device__ __forceinline__ uint32_t rank_of(float score)
{
    const uint32_t bits = __float_as_uint(score + 0.0f);
    if (score != score) return 1;
    return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

/* A score a lane, of indices that rise with the lanes and from call to call. There is room. */
__device__ __forceinline__ void best_add(best_list &b, bool here, uint32_t rank, int32_t index)
{
    const bool better = here && rank > b.least;
    const unsigned bits = __ballot_sync(~0u, better);
    const int at = b.n + __popc(bits & ((1u << threadIdx.x % 32) - 1));
    if (better) {
        b.rank[at] = rank;
        b.index[at] = index;
    }
    b.n += __popc(bits);
}

/* How many of n ranks, at(0) ... at(n - 1), are at least found + 1, 2 and 3 times 2^shift, of those that this
 * one of `step` lanes or threads sees: a warp's sums. */
struct best_counts {
    uint32_t one, two, three;
};
template <typename At>
__device__ __forceinline__ best_counts best_count(const At &at, int n, uint32_t found, int shift, int first,
                                                  int step)
{
    uint32_t one = 0, two = 0, three = 0;
#pragma unroll 4
    for (int i = first; i < n; i += step) {
        const uint32_t x = at(i);
        one += x >= found + (1u << shift);
        two += x >= found + (2u << shift);
        three += x >= found + (3u << shift);
    }
    return {__reduce_add_sync(~0u, one), __reduce_add_sync(~0u, two), __reduce_add_sync(~0u, three)};
}
__device__ __forceinline__ uint32_t best_digit(const best_counts &c, int k)
{
    return (int)c.three >= k ? 3 : (int)c.two >= k ? 2 : (int)c.one >= k;
}

/* Keeps the k best, or up to `more` others beside them, where that is found out sooner. */
__device__ inline void best_cut(best_list &b, int k, int more)
{
    const int lane = threadIdx.x % 32;
    const auto at = [&](int i) { return b.rank[i]; };
    int kept = 0, those = b.n; /* as good as `found` or better */
    uint32_t found = 0;
    __syncwarp();
    if (b.n <= k + more) return;
    for (int shift = 30; shift >= 0 && those > k + more; shift -= 2) {
        const best_counts c = best_count(at, b.n, found, shift, lane, 32);
        const uint32_t digit = best_digit(c, k);
        found |= digit << shift;
        those = digit == 3 ? (int)c.three : digit == 2 ? (int)c.two : digit == 1 ? (int)c.one : those;
    }
    int equal = b.n; /* of the ranks that are `found`, how many stay */
    if (those > k + more) {
        uint32_t better = 0;
        for (int i = lane; i < b.n; i += 32) better += b.rank[i] > found;
        equal = k - (int)__reduce_add_sync(~0u, better);
        b.least = found;
    } else {
        b.least = found - 1;
    }
    for (int first = 0; first < b.n; first += 32) {
        const bool here = first + lane < b.n;
        const uint32_t rank = here ? b.rank[first + lane] : 0;
        const int32_t index = here ? b.index[first + lane] : 0;
        const unsigned below = (1u << lane) - 1, same = __ballot_sync(~0u, here && rank == found);
        const bool keep = here && (rank > found || (rank == found && __popc(same & below) < equal));
        const unsigned bits = __ballot_sync(~0u, keep);
        __syncwarp();
        if (keep) {
            b.rank[kept + __popc(bits & below)] = rank;
            b.index[kept + __popc(bits & below)] = index;
        }
        kept += __popc(bits);
        equal -= __popc(same) < equal ? __popc(same) : equal;
        __syncwarp();
    }
    b.n = kept;
}

/* How many of n ranks, a multiple of 4, are at least v; by one warp. */
__device__ __forceinline__ int warp_least(const uint32_t *rank, int n, uint32_t v)
{
    int count = 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32 * 4; i < n; i += 128) {
        const uint4 x = *(const uint4 *)(rank + i);
        count += (x.x >= v) + (x.y >= v) + (x.z >= v) + (x.w >= v);
    }
    return __reduce_add_sync(~0u, count);
}

/*
 * By a team of THREADS threads, whose barrier is `sync()` and in which this one is number `t`. The team's
 * memory: counts of its warps in two sets, used in turn.
 */
template <int THREADS> struct team_room {
    uint32_t same[2][THREADS / 32], more[2][THREADS / 32];
};

/* How many before a thread or warp, and of all, are of the k-th best's rank, and how many beat it. */
struct team_place {
    int same, more, all_same, all_more;
};
template <int THREADS, typename Sync>
__device__ __forceinline__ team_place team_place_of(team_room<THREADS> &m, int set, int t, int same, int more,
                                                    Sync sync)
{
    if (t % 32 == 0) {
        m.same[set][t / 32] = (uint32_t)same;
        m.more[set][t / 32] = (uint32_t)more;
    }
    sync();
    const bool here = t % 32 < THREADS / 32, before = t % 32 < t / 32;
    const uint32_t sames = here ? m.same[set][t % 32] : 0, mores = here ? m.more[set][t % 32] : 0;
    const auto sum = [](uint32_t x) { return (int)__reduce_add_sync(~0u, x); };
    return {sum(before ? sames : 0), sum(before ? mores : 0), sum(sames), sum(mores)};
}

template <int THREADS, typename Sync>
__device__ __forceinline__ team_place team_count(team_room<THREADS> &m, int set, int t, bool same, bool more,
                                                 Sync sync)
{
    const unsigned sames = __ballot_sync(~0u, same), mores = __ballot_sync(~0u, more),
                   below = (1u << t % 32) - 1;
    team_place p = team_place_of(m, set, t, __popc(sames), __popc(mores), sync);
    p.same += __popc(sames & below);
    p.more += __popc(mores & below);
    return p;
}

/* How many of n ranks are at least v. */
template <int THREADS, typename At, typename Sync>
__device__ __forceinline__ int team_least(team_room<THREADS> &m, int set, const At &at, int n, uint32_t v,
                                          int t, Sync sync)
{
    int own = 0;
#pragma unroll 8
    for (int i = t; i < n; i += THREADS) own += at(i) >= v;
    own = __reduce_add_sync(~0u, own);
    return team_place_of(m, set, t, 0, own, sync).all_more;
}

/* The rank of the k-th best of n >= k, by all THREADS of a block; *equal: how many of its equals are among
 * the k. A thread's few ranks are counted by the barrier itself. */
template <int THREADS, typename At>
__device__ inline uint32_t team_kth(team_room<THREADS> &m, const At &at, int n, int k, int *equal)
{
    const auto sync = []() { __syncthreads(); };
    const int t = threadIdx.x;
    const bool few = n <= 2 * THREADS;
    const uint32_t own[2] = {few && t < n ? at(t) : 0, few && t + THREADS < n ? at(t + THREADS) : 0};
    const auto least = [&](uint32_t v, int set) {
        if (!few) return team_least(m, set, at, n, v, t, sync);
        const int first = __syncthreads_count(t < n && own[0] >= v);
        return n <= THREADS ? first : first + __syncthreads_count(t + THREADS < n && own[1] >= v);
    };
    uint32_t found = 0;
    __syncthreads();
    for (int bit = 31; bit >= 0; bit--)
        if (least(found | 1u << bit, bit & 1) >= k) found |= 1u << bit;
    *equal = k - least(found + 1, 0);
    __syncthreads();
    return found;
}

#endif
