/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that score and choose, and the kernel. */
#ifndef QUERN_CUDA_INDEXER_SM90_KERNEL_CUH
#define QUERN_CUDA_INDEXER_SM90_KERNEL_CUH

#include "indexer/sm90/feed.cuh"
#include "indexer/sm90/operand.cuh"

namespace sm90_indexer
{

/* Registers of a thread's keys, as many as the products have steps. */
template <key_kind KIND> constexpr int steps_of()
{
    return KIND == CODES ? STEPS / 2 : STEPS;
}

/* Begins the products of 64 keys with the heads of a tile; P: the type of the factors. */
template <typename P, int TILE>
__device__ __forceinline__ void multiply(float (&c)[TILE / 8][4], const uint32_t (&keys)[STEPS / 2][4],
                                         uint32_t tile)
{
    const uint64_t heads = wg_fresh(wg_tile(tile, 0));
    wg_start();
    wgmma_rs_e4m3<TILE, false>(c, keys[0], heads);
#pragma unroll
    for (int i = 1; i < STEPS / 2; i++) wgmma_rs_e4m3<TILE, true>(c, keys[i], wg_further(heads, i * 32));
    wg_commit();
}
template <typename P, int TILE>
__device__ __forceinline__ void multiply(float (&c)[TILE / 8][4], const uint32_t (&keys)[STEPS][4],
                                         uint32_t tile)
{
    const uint64_t heads = wg_fresh(wg_tile(tile, 0));
    wg_start();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint64_t step = wg_further(heads, i / 4 * (TILE * 128) + i % 4 * 32);
        if (i == 0) wg_rs_wide<P, TILE, false, false>(c, keys[i], step);
        else wg_rs_wide<P, TILE, true, false>(c, keys[i], step);
    }
    wg_commit();
}

/* Sums over the heads of a tile's queries, times the keys' scales; `put(query, half, score)` takes those of a
 * thread's two rows, in one lane of four. */
template <int TILE, typename Put>
__device__ __forceinline__ void weigh(const float (&c)[TILE / 8][4], const float (*w)[HEADS],
                                      const float (&scale)[2], const Put &put)
{
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int q = 0; q < TILE / HEADS; q++) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 two = *(const float2 *)&w[q][i * 8 + column];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[h] = fmaf(two.x, relu(c[q * 8 + i][h * 2]), sum[h]);
                sum[h] = fmaf(two.y, relu(c[q * 8 + i][h * 2 + 1]), sum[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if (column == 0) put(q, h, sum[h] * scale[h]);
        }
    }
}

/* A warp has read its rows of a stage: one arrival, as 32 at one address come one after the other. */
template <typename T, key_kind KIND, int Q, int STAGES>
__device__ __forceinline__ void give_back_keys(fed<T, KIND, Q, STAGES> &m, const ring_place<STAGES> &at)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) m.keys.give_back(at);
}

/* Four queries: this warpgroup has half of each stage's keys. */
template <typename T, key_kind KIND, int STAGES>
__device__ __forceinline__ void score(const index_kernel &a, const key_feed &f,
                                      shared<T, KIND, MOST_QUERIES, STAGES> &m, int items, int half)
{
    const int row0 = half * 64 + threadIdx.x / 32 % 4 * 16, key = row0 + threadIdx.x % 32 / 4;
    ring_place<STAGES> at;
    ring_place<m.SLOTS> out;
    ring_place<1> q;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int stages = item_at<MOST_QUERIES>(a, f, item).stages;
        if (stages == 0) continue;
        m.queries.wait_full(q);
        for (int s = 0; s < stages; s++) {
            float first[16][4], second[16][4], scale[2];
            uint32_t keys[steps_of<KIND>()][4];
            m.keys.wait_full(at);
            read_keys(keys, scale, a, f, m, at.stage, row0);
            give_back_keys(m, at);
            at.advance();
            multiply<factor<T, KIND>, 2 * HEADS>(first, keys, smem_address(m.q[0][0]));
            multiply<factor<T, KIND>, 2 * HEADS>(second, keys, smem_address(m.q[0][1]));
            m.scores.wait_free(out);
            wg_wait<1>(first);
            weigh<2 * HEADS>(first, &m.w[0][0], scale,
                             [&](int query, int h, float x) { m.score[out.stage][query][key + h * 8] = x; });
            wg_wait<0>(second);
            weigh<2 * HEADS>(second, &m.w[0][2], scale, [&](int query, int h, float x) {
                m.score[out.stage][2 + query][key + h * 8] = x;
            });
            if (threadIdx.x % 4 == 0) m.scores.give(out);
            out.advance();
        }
        m.queries.give_back(q);
        q.advance();
    }
}

/* One query: this warpgroup has half of the keys of every second stage. Beside the scores it writes the rank
 * of the best of each RANKED keys, a warp's. */
template <typename T, key_kind KIND, int STAGES>
__device__ __forceinline__ void score(const index_kernel &a, const key_feed &f, shared<T, KIND, 1, STAGES> &m,
                                      int items, int own)
{
    const int row0 = own % 2 * 64 + threadIdx.x / 32 % 4 * 16, key = row0 + threadIdx.x % 32 / 4;
    int met = 0; /* stages so far */
    ring_place<2> q;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const item_of x = item_at<1>(a, f, item);
        if (x.stages == 0) continue;
        m.queries.wait_full(q);
        const uint32_t heads = smem_address(m.q[q.stage]);
        const int seen = index_seen(a, x.b, 0);
        float *const to = f.raw + x.b * f.raw_row + x.key + key;
        uint32_t *const ranks = f.best + x.b * best_row(f) + (x.key + row0) / RANKED;
        for (int s = (own / 2) ^ (met & 1); s < x.stages; s += 2) {
            const ring_place<STAGES> at = ring_place<STAGES>::of(met + s);
            float sums[8][4], scale[2];
            uint32_t keys[steps_of<KIND>()][4];
            m.keys.wait_full(at);
            read_keys(keys, scale, a, f, m, at.stage, row0);
            give_back_keys(m, at);
            multiply<factor<T, KIND>, HEADS>(sums, keys, heads);
            wg_wait<0>(sums);
            float best = NAN;
            weigh<HEADS>(sums, m.w[q.stage], scale, [&](int, int h, float score) {
                const int at = x.key + s * KEYS + key + h * 8;
                if (at < f.raw_row) to[s * KEYS + h * 8] = score;
                if (at < seen) best = fmaxf(best, score);
            });
            const uint32_t rank = __reduce_max_sync(~0u, rank_of(best));
            if (threadIdx.x % 32 == 0 && x.key + s * KEYS + row0 < seen) ranks[s * (KEYS / RANKED)] = rank;
        }
        met += x.stages;
        m.queries.give_back(q);
        q.advance();
    }
}

/* Stores a share's list; by one warp. */
__device__ __forceinline__ void store_part(const index_kernel &a, const key_feed &f, const item_of &x,
                                           int query, const best_list &best)
{
    const int64_t at = part_at(a, f, x.b, query, x.share);
    for (int i = threadIdx.x % 32; i < a.k; i += 32) {
        f.rank[at + i] = i < best.n ? best.rank[i] : 0;
        f.index[at + i] = i < best.n ? best.index[i] : -1;
    }
}

/* A warp a query. */
template <typename T, key_kind KIND, int STAGES>
__device__ __forceinline__ void choose(const index_kernel &a, const key_feed &f,
                                       shared<T, KIND, MOST_QUERIES, STAGES> &m, int items)
{
    const int own = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ring_place<m.SLOTS> in;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const item_of x = item_at<MOST_QUERIES>(a, f, item);
        if (x.stages == 0 && f.shares > 1) continue;
        const int query = x.query + own, seen = index_seen(a, x.b, query);
        best_list best = {m.rank[own], m.index[own], 0, 0};
        float *const scores = a.scores + x.b * a.scores_row[0] + query * a.scores_row[1];
        for (int s = 0; s < x.stages; s++) {
            m.scores.wait_full(in);
            float score[4];
#pragma unroll
            for (int i = 0; i < 4; i++) score[i] = m.score[in.stage][own][i * 32 + lane];
            m.scores.give_back(in);
            in.advance();
            if (best.n + KEYS > m.ROOM) best_cut(best, a.k, SPARE);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = x.key + s * KEYS + i * 32 + lane;
                if (a.scores != NULL && key < seen) scores[key] = score[i] + 0.0f;
                best_add(best, key < seen, rank_of(score[i]), key);
            }
        }
        if (query < a.queries && f.shares == 1) index_store(a, x.b, query, best);
        else if (query < a.queries) {
            best_cut(best, a.k, 0);
            store_part(a, f, x, query, best);
        }
        __syncwarp();
    }
}

template <typename T, key_kind KIND, int Q, int STAGES>
__global__ void __launch_bounds__(crew<Q>::THREADS, 1)
    indexer_sm90(const __grid_constant__ index_kernel a, const __grid_constant__ key_feed f,
                 const __grid_constant__ CUtensorMap map, const int items)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<T, KIND, Q, STAGES> &m = *(shared<T, KIND, Q, STAGES> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(1, KEY_USERS);
        m.queries.init(Q_FILLERS, crew<Q>::SCORERS * 128);
        if constexpr (Q > 1) m.scores.init(SCORE_GIVERS, CHOOSERS);
        mbar_init_done();
    }
    __syncthreads();
    let_next_start();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group < crew<Q>::OTHERS) {
        registers_down<crew<Q>::FEW>();
        if (threadIdx.x < 32) feed_keys(a, f, map, m, items);
        else if (threadIdx.x < 128) feed_queries(a, f, m, items, threadIdx.x - 32);
        else if constexpr (Q > 1) choose(a, f, m, items);
    } else {
        registers_up<crew<Q>::SCORE>();
        score(a, f, m, items, group - crew<Q>::OTHERS);
    }
#endif
}

template <typename T, key_kind KIND, int Q, int STAGES>
static quern_status launch(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                           const CUtensorMap &map)
{
    const int64_t items = (int64_t)tiles_of<Q>(a) * a.batch * f.shares;
    const unsigned grid = (unsigned)(items < exec->multiprocessors ? items : exec->multiprocessors);
    static_assert(sizeof(shared<T, KIND, Q, STAGES>) <= 227 * 1024, "a block has room");
    static_assert(Q > 1 || STAGES % 2 == 0, "the same warpgroups use a stage in every turn");
    typedef crew<Q> by; /* a block begins with as many registers a thread as all can have, by eights */
    static_assert((by::OTHERS * by::FEW + by::SCORERS * by::SCORE) * 128 <=
                      65536 / by::THREADS / 8 * 8 * by::THREADS,
                  "each warpgroup gets the registers that it asks for");
    const quern_status status = launch_shared({(cudaStream_t)exec->stream, NULL},
                                              indexer_sm90<T, KIND, Q, STAGES>, dim3(grid),
                                              by::THREADS, sizeof(shared<T, KIND, Q, STAGES>),
                                              "indexer", a, f, map, (int)items);
    if (status != QUERN_OK) return status;
    return Q == 1 ? pick_best(exec, a, f) : f.shares > 1 ? merge_shares(exec, a, f) : status;
}

/* `one`: a query a tile. */
template <typename T, key_kind KIND>
static quern_status run(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                        const CUtensorMap &map, bool one)
{
    if (one) return launch<T, KIND, 1, stages_of<KIND, 1>(false)>(exec, a, f, map);
    constexpr int FEW = stages_of<KIND, MOST_QUERIES>(true), MANY = stages_of<KIND, MOST_QUERIES>(false);
    if constexpr (FEW != MANY)
        if (a.k > most_of(room_of(MANY, KIND))) return launch<T, KIND, MOST_QUERIES, FEW>(exec, a, f, map);
    return launch<T, KIND, MOST_QUERIES, MANY>(exec, a, f, map);
}

} // namespace sm90_indexer

#endif
