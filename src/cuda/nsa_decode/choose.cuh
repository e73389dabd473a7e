/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* choose.cuh - a list of blocks by the scores of a query's entries: the same sums, in the same order, as the
 * select stage's. All threads of a block call. */
#ifndef QUERN_CUDA_NSA_DECODE_CHOOSE_CUH
#define QUERN_CUDA_NSA_DECODE_CHOOSE_CUH

#include "common/chunk.cuh"
#include "common/kth.cuh"
#include "nsa_decode/params.cuh"

namespace nsa_decode
{

using namespace decode_walk;

/* A query and a key/value head. */
struct nsa_query {
    int64_t t, position; /* position -1: its sequence's numbers cannot be followed, it sees nothing */
    int b, kv, seen;     /* seen: entries */
};

/* The blocks that a list chooses from, [0, candidates), those that are forced, [0, f0) and [g0, candidates),
 * and how many others there is room for. */
struct contest {
    int candidates, f0, g0, size;
    __device__ __forceinline__ bool forced(int block) const { return block < f0 || block >= g0; }
};
__device__ __forceinline__ contest contest_of(const nsa_kernel &a, const nsa_query &q)
{
    contest c;
    c.candidates = q.position < 0 ? 0 : (int)quotient((uint32_t)q.position, a.by_block) + 1;
    c.f0 = a.forced_first < c.candidates ? a.forced_first : c.candidates;
    c.g0 = c.candidates;
    if (a.forced_local > 0) {
        const int first = c.candidates - a.forced_local;
        c.g0 = first < c.f0 ? c.f0 : first;
    }
    const int left = a.k - c.f0 - (c.candidates - c.g0);
    c.size = left > 0 ? left : 0;
    return c;
}

/* What choosing takes of a block's shared memory. */
struct choose_room {
    team_room<THREADS> team;
    float mean[256];
    alignas(16) uint32_t ranks[RANKS_MOST]; /* where there are no more candidates */
    int32_t list[CHOSEN_MOST];
};

/* The same where keys stand during a walk: what entries count, if there are no more than ENTRIES. */
template <int ENTRIES> struct choose_space {
    kth_room<THREADS> kth;
    alignas(16) float entries[ENTRIES];
};

/* What each entry counts: the probabilities of rows [row0, row0 + rows), added. Rows of scores have whole
 * fours. */
__device__ __forceinline__ void add_probabilities(const nsa_kernel &a, const nsa_query &q,
                                                  const float *scratch, int row0, int rows, float *entries)
{
    const float *const lse2 = scratch + a.at.lse, *const scores = scratch + a.at.scores;
    for (int e = threadIdx.x * 4; e < q.seen; e += THREADS * 4) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int r = row0; r < row0 + rows; r++) {
            const float4 x = *(const float4 *)(scores + r * a.at.width + e);
            const float lse = lse2[r];
            sum.x += exp2_fast(fmaf(x.x, a.scale2, -lse));
            sum.y += exp2_fast(fmaf(x.y, a.scale2, -lse));
            sum.z += exp2_fast(fmaf(x.z, a.scale2, -lse));
            sum.w += exp2_fast(fmaf(x.w, a.scale2, -lse));
        }
        *(float4 *)(entries + e) = sum;
    }
    __syncthreads();
}

/* The same by the scaled product with the rows' mean: eight lanes an entry. `mean`: shared memory. */
template <typename T>
__device__ __forceinline__ void add_means(const nsa_kernel &a, const nsa_query &q, int head0, int rows,
                                          float *mean, float *entries)
{
    enum { LANES = 8 };
    const plane_view &plane = a.plane[CMP];
    const T *const from = (const T *)a.q.p + q.t * a.q.s[1] + head0 * a.q.s[2];
    for (int c = threadIdx.x; c < plane.dim; c += THREADS) {
        float sum = 0.0f;
        for (int r = 0; r < rows; r++) sum += to_float<T>(from[r * a.q.s[2] + c]);
        mean[c] = sum / (float)rows;
    }
    __syncthreads();
    const bool wide = plane_aligned(plane, 16);
    const int lane = threadIdx.x % LANES;
    for (int e0 = 0; e0 < q.seen; e0 += THREADS / LANES) {
        const int e = e0 + threadIdx.x / LANES;
        const plane_row row = e < q.seen ? plane_row_at(plane, q.b, q.kv, e, a.status) : plane_row{NULL, 0};
        float dot = 0.0f;
        for (int c = lane * CHUNK; c < plane.dim && row.key != NULL; c += LANES * CHUNK) {
            const chunk x = load_chunk<T>((const T *)row.key + c, wide);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) dot = fmaf(mean[c + i], x.x[i], dot);
        }
#pragma unroll
        for (int by = 1; by < LANES; by *= 2) dot += __shfl_xor_sync(~0u, dot, by);
        if (lane == 0 && e < q.seen) entries[e] = dot * a.scale;
    }
    __syncthreads();
}

/* A block's score: each entry as often as it overlaps. A candidate without entries that count comes last by
 * the mean, and scores 0 by probabilities. */
__device__ __forceinline__ float block_score(const nsa_kernel &a, const nsa_query &q, const float *entries,
                                             int block)
{
    const int span = a.l_over_d - 1 + a.s_over_d, most = a.l_over_d < a.s_over_d ? a.l_over_d : a.s_over_d,
              first = (block + 1) * a.s_over_d - span;
    if (span == 1) return block < q.seen ? entries[block] : a.mean_logit ? -INFINITY : 0.0f;
    float score = 0.0f;
    for (int i = 0; i < span; i++) { /* the first is the earliest that overlaps */
        const int up = i + 1 < span - i ? i + 1 : span - i, e = first + i;
        if (e >= 0 && e < q.seen) score += (float)(up < most ? up : most) * entries[e];
    }
    return score;
}

/* Chooses by what the entries count; returns how many. */
__device__ __forceinline__ int choose_blocks(const nsa_kernel &a, const nsa_query &q, float *scratch,
                                             const float *entries, choose_room &m, kth_room<THREADS> &room)
{
    const contest c = contest_of(a, q);
    uint32_t *const ranks = c.candidates <= RANKS_MOST ? m.ranks : (uint32_t *)scratch + a.at.ranks;
    const auto sync = []() { __syncthreads(); };
    int equal = 0, count = 0, sames = 0;
    uint32_t kth = ~0u;
    const int whole = (c.candidates + 3) / 4 * 4;
    for (int j = threadIdx.x; j < whole; j += THREADS)
        ranks[j] = j >= c.candidates || c.forced(j) ? 0 : rank_of(block_score(a, q, entries, j));
    __syncthreads();
    if (c.g0 - c.f0 <= c.size) kth = 0; /* all others are chosen */
    else if (c.size > 0 && ranks == m.ranks) {
        kth = kth_best<true>(room, (uint32_t)c.size, [&](const auto &use) {
#pragma unroll 1
            for (int i = threadIdx.x; i < c.candidates; i += THREADS) use(m.ranks[i]);
        });
        equal = c.size - warp_least(m.ranks, whole, kth + 1);
    } else if (c.size > 0)
        kth = team_kth(
            m.team, [&](int i) { return ranks[i]; }, c.candidates, c.size, &equal);
    for (int first = 0, set = 0; first < c.candidates; first += THREADS, set ^= 1) {
        const int j = first + (int)threadIdx.x;
        const uint32_t rank = j < c.candidates ? ranks[j] : 0;
        const bool forced = j < c.candidates && c.forced(j), more = forced || rank > kth,
                   same = rank > 0 && rank == kth;
        const team_place p = team_count(m.team, set, threadIdx.x, same, more, sync);
        const int left = equal - sames;
        if (more || (same && p.same < left)) m.list[count + p.more + (p.same < left ? p.same : left)] = j;
        count += p.all_more + (p.all_same < left ? p.all_same : left);
        sames += p.all_same < left ? p.all_same : left;
    }
    __syncthreads();
    return count;
}

__device__ __forceinline__ void write_list(const nsa_kernel &a, const nsa_query &q, int head,
                                           const int32_t *list, int count)
{
    int32_t *const to = a.lists + head * a.list_s[1] + q.t * a.list_s[2];
    for (int i = threadIdx.x; i < a.k; i += THREADS) to[i] = i < count ? list[i] : -1;
    if (threadIdx.x == 0 && a.counts != NULL) a.counts[head * a.count_s[1] + q.t * a.count_s[2]] = count;
}

/* A list that is given; returns its length. Entries past the query have no keys. */
__device__ __forceinline__ int read_list(const nsa_kernel &a, const nsa_query &q, int head, int32_t *list)
{
    const int32_t *const from = a.lists + head * a.list_s[1] + q.t * a.list_s[2];
    int count = 0;
    __syncthreads(); /* the last one has been walked */
    for (int first = 0; first < a.k; first += THREADS) {
        const int i = first + (int)threadIdx.x;
        const int32_t block = i < a.k ? from[i] : -1;
        if (i < a.k) list[i] = block;
        count += __syncthreads_count(block >= 0);
    }
    return count;
}

} // namespace nsa_decode

#endif
