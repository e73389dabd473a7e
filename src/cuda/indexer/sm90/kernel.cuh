/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that score and choose, and the kernel of four queries a tile. */
#ifndef QUERN_CUDA_INDEXER_SM90_KERNEL_CUH
#define QUERN_CUDA_INDEXER_SM90_KERNEL_CUH

#include "indexer/sm90/rows.cuh"
#include "indexer/sm90/score.cuh"

namespace sm90_indexer
{

enum { THREADS = 512, SCORERS = 2, OTHERS = 2 /* warpgroups */, FEW_REGISTERS = 64, SCORE_REGISTERS = 192 };

/* This warpgroup has half of each stage's keys. */
template <typename K, int STAGES>
__device__ __forceinline__ void score(const plan &p, shared<K, STAGES> &m, int half)
{
    const int row0 = half * 64 + threadIdx.x / 32 % 4 * 16, key = row0 + threadIdx.x % 32 / 4;
    ring_place<STAGES> at;
    ring_place<K::SLOTS> out;
    ring_place<1> q;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int stages = item_at<MOST_QUERIES>(p, item).stages;
        if (stages == 0) continue;
        m.queries.wait_full(q);
        for (int s = 0; s < stages; s++) {
            float first[16][4], second[16][4], scale[2];
            uint32_t keys[K::STEPS][4];
            m.keys.wait_full(at);
            read_keys(keys, scale, p, m, at.stage, row0);
            give_back_by_warp(m.keys, at);
            at.advance();
            K::template multiply<2 * HEADS>(first, keys, smem_address(m.q[0][0]));
            K::template multiply<2 * HEADS>(second, keys, smem_address(m.q[0][1]));
            m.scores.wait_free(out);
            wg_wait<1>(first);
            weigh<2 * HEADS>(first, &m.w[0][0], scale,
                             [&](int i, int h, float x) { m.score[out.stage][i][key + h * 8] = x; });
            wg_wait<0>(second);
            weigh<2 * HEADS>(second, &m.w[0][2], scale,
                             [&](int i, int h, float x) { m.score[out.stage][2 + i][key + h * 8] = x; });
            if (threadIdx.x % 4 < 2) m.scores.give(out);
            out.advance();
        }
        m.queries.give_back(q);
        q.advance();
    }
}

/* A warp a query. */
template <typename K, int STAGES>
__device__ __forceinline__ void choose(const plan &p, const share_lists &lists, shared<K, STAGES> &m)
{
    const index_kernel &a = p.a;
    const int own = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ring_place<K::SLOTS> in;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const item_of x = item_at<MOST_QUERIES>(p, item);
        if (x.stages == 0 && p.cut.shares > 1) continue;
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
        if (query < a.queries && p.cut.shares == 1) index_store(a, x.b, query, best);
        else if (query < a.queries) {
            best_cut(best, a.k, 0);
            store_share(p, lists, x, query, best);
        }
        __syncwarp();
    }
}

template <typename K, int STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    indexer_sm90(const __grid_constant__ plan p, const __grid_constant__ share_lists lists)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<K, STAGES> &m = *(shared<K, STAGES> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(1, KEY_USERS * READER_ARRIVALS);
        m.queries.init(Q_FILLERS, SCORERS * 128);
        m.scores.init(SCORE_GIVERS, CHOOSERS);
        mbar_init_done();
    }
    __syncthreads();
    let_next_start();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group < OTHERS) {
        registers_down<FEW_REGISTERS>();
        if (threadIdx.x < 32) feed_keys(p, m);
        else if (threadIdx.x < 128) feed_queries(p, m, threadIdx.x - 32);
        else choose(p, lists, m);
    } else {
        registers_up<SCORE_REGISTERS>();
        score(p, m, group - OTHERS);
    }
#endif
}

template <typename K, int STAGES>
static quern_status launch(const stage_exec *exec, const plan &p, const share_lists &lists, unsigned blocks)
{
    static_assert(sizeof(shared<K, STAGES>) <= 227 * 1024, "a block has room");
    static_assert((OTHERS * FEW_REGISTERS + SCORERS * SCORE_REGISTERS) * 128 <= 65536, "so have registers");
    static_assert(most_of(K::LONG_ROOM) >= MOST_CHOSEN, "and the longest lists");
    const quern_status status =
        launch_shared({(cudaStream_t)exec->stream, NULL}, indexer_sm90<K, STAGES>, dim3(blocks), THREADS,
                      sizeof(shared<K, STAGES>), "indexer", p, lists);
    return status == QUERN_OK && p.cut.shares > 1 ? merge_shares(exec, p, lists) : status;
}

template <typename K>
static quern_status run(const stage_exec *exec, plan &p, const share_lists &lists)
{
    const unsigned blocks = set_items<MOST_QUERIES>(exec, &p);
    if constexpr (K::LONG_STAGES != K::STAGES)
        if (p.a.k > most_of(K::ROOM)) return launch<K, K::LONG_STAGES>(exec, p, lists, blocks);
    return launch<K, K::STAGES>(exec, p, lists, blocks);
}

} // namespace sm90_indexer

#endif
