/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kth.cuh - the k-th best of the ranks (topk.cuh) that a block's threads hold or read. Ranks are counted in
 * bins: first of equal widths of the score, over which most scores spread well, then of equal numbers of
 * ranks within the bin that has the k-th best. Once few are in such a bin each warp compares these with each
 * other. Two rounds do but where many scores are nearly the same, five always. Limit: latency, of four
 * barriers a round.
 */
#ifndef QUERN_CUDA_KTH_CUH
#define QUERN_CUDA_KTH_CUH

#include "common/scan.cuh"
#include "common/topk.cuh"

/* Sums over a block's threads, by turns in two places. */
template <int THREADS> struct block_sums {
    uint32_t of[2][THREADS / 32];
};

/* The sum over the threads before this one, and of all in `total`; a barrier. `turn`: other than the last. */
template <int THREADS>
__device__ __forceinline__ uint32_t block_before(block_sums<THREADS> &m, int turn, uint32_t x,
                                                 uint32_t &total)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const uint32_t sum = sum_to_lane(x);
    if (lane == 31) m.of[turn][warp] = sum;
    __syncthreads();
    const uint32_t part = lane < THREADS / 32 ? m.of[turn][lane] : 0;
    total = __reduce_add_sync(~0u, part);
    return __reduce_add_sync(~0u, lane < warp ? part : 0) + sum - x;
}

enum { KTH_BINS = 1024, KTH_LEFT = 64, KTH_BITS = 10 };

template <int THREADS> struct kth_room {
    uint32_t count[KTH_BINS], left[KTH_LEFT], lefts;
    uint32_t least[THREADS / 32], most[THREADS / 32], sums[THREADS / 32];
    uint32_t bin, above, inside; /* of the k-th best; ranks above its bin and in it */
};

/* The score of a rank. */
__device__ __forceinline__ float score_of(uint32_t rank)
{
    return __uint_as_float((rank & 0x80000000) != 0 ? rank ^ 0x80000000 : ~rank);
}

/* The bins of ranks `low` to `high`; a better rank is in no lower one. */
struct kth_bins {
    float first, scale;
    uint32_t low, high;
    int shift;
    bool even; /* of equal widths of the score */

    __device__ __forceinline__ kth_bins(uint32_t from, uint32_t to, bool by_score)
    {
        enum : uint32_t { LEAST = 0x00800000, MOST = 0xff7fffff }; /* of finite scores */
        const float last = score_of(to < MOST ? to : MOST);
        low = from;
        high = to;
        first = score_of(from > LEAST ? from : LEAST);
        scale = KTH_BINS / (last - first);
        even = by_score && last > first;
        shift = max(32 - KTH_BITS - __clz((int)(to - from)), 0);
    }
    __device__ __forceinline__ bool have(uint32_t rank) const { return rank - low <= high - low; }
    /* What is no number counts as 0. */
    __device__ __forceinline__ uint32_t of(uint32_t rank) const
    {
        return even ? min(__float2uint_rz((score_of(rank) - first) * scale), KTH_BINS - 1u)
                    : (rank - low) >> shift;
    }
};

/* The least and the best rank of those for which `here(rank)`; a barrier. */
template <int THREADS, typename Each, typename Here>
__device__ __forceinline__ void kth_range(kth_room<THREADS> &m, const Each &each, const Here &here,
                                          uint32_t &low, uint32_t &high)
{
    const int t = (int)threadIdx.x, lane = t % 32;
    uint32_t least = ~0u, most = 0;
    each([&](uint32_t rank) {
        if (!here(rank)) return;
        least = min(least, rank);
        most = max(most, rank);
    });
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    for (int i = t; i < KTH_BINS; i += THREADS) m.count[i] = 0;
    if (t == 0) m.lefts = 0;
    if (lane == 0) {
        m.least[t / 32] = least;
        m.most[t / 32] = most;
    }
    __syncthreads();
    low = __reduce_min_sync(~0u, lane < THREADS / 32 ? m.least[lane] : ~0u);
    high = __reduce_max_sync(~0u, lane < THREADS / 32 ? m.most[lane] : 0);
}

/* Finds the bin of the k-th best; two barriers. */
template <int THREADS> __device__ __forceinline__ void kth_find_bin(kth_room<THREADS> &m, uint32_t k)
{
    enum { EACH = KTH_BINS / THREADS };
    const int t = (int)threadIdx.x, lane = t % 32, top = KTH_BINS - 1 - t * EACH;
    uint32_t own[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += own[i] = m.count[top - i];
    const uint32_t upto = sum_to_lane(sum);
    if (lane == 31) m.sums[t / 32] = upto;
    __syncthreads();
    uint32_t before = __reduce_add_sync(~0u, lane < t / 32 ? m.sums[lane] : 0) + upto - sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (before < k && k <= before + own[i]) {
            m.bin = (uint32_t)(top - i);
            m.above = before;
            m.inside = own[i];
        }
        before += own[i];
    }
    __syncthreads();
}

/* The k-th best of up to KTH_LEFT ranks; each warp finds it. ONCE: a block calls once or twice, so that short
 * code is faster than a loop that is unrolled. */
template <bool ONCE>
__device__ __forceinline__ uint32_t kth_of_few(const uint32_t *rank, int n, uint32_t k)
{
    const int lane = (int)threadIdx.x % 32;
    uint32_t found = 0;
#pragma unroll
    for (int i = lane; i < KTH_LEFT; i += 32) {
        const uint32_t own = i < n ? rank[i] : 0;
        uint32_t better = 0, same = 0;
        if constexpr (ONCE) {
#pragma unroll 1
            for (int other = 0; other < n; other++) {
                better += rank[other] > own;
                same += rank[other] == own;
            }
        } else {
            for (int other = 0; other < n; other++) {
                better += rank[other] > own;
                same += rank[other] == own;
            }
        }
        if (i < n && better < k && k <= better + same) found = own;
    }
    return __reduce_max_sync(~0u, found);
}

/* The k-th best of all ranks but 0, of which there are k at least: each(use) calls use(rank) for this
 * thread's. All threads of the block call, and get it; a barrier comes before m is used again. ONCE: as
 * above. */
template <bool ONCE, int THREADS, typename Each>
__device__ __forceinline__ uint32_t kth_best(kth_room<THREADS> &m, uint32_t k, const Each &each)
{
    uint32_t low, high;
    kth_range(m, each, [](uint32_t rank) { return rank != 0; }, low, high);
    for (bool first = true;; first = false) {
        if (low == high) return low;
        const kth_bins bins(low, high, first);
        each([&](uint32_t rank) {
            if (bins.have(rank)) atomicAdd(&m.count[bins.of(rank)], 1u);
        });
        __syncthreads();
        kth_find_bin(m, k);
        const uint32_t bin = m.bin;
        const auto here = [&](uint32_t rank) { return bins.have(rank) && bins.of(rank) == bin; };
        k -= m.above;
        if (m.inside <= KTH_LEFT) {
            const int n = (int)m.inside;
            each([&](uint32_t rank) {
                if (here(rank)) m.left[atomicAdd(&m.lefts, 1u)] = rank;
            });
            __syncthreads();
            return kth_of_few<ONCE>(m.left, n, k);
        }
        kth_range(m, each, here, low, high);
    }
}

#endif
