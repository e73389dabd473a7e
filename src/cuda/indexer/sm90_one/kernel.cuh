/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - scores of single queries on Hopper: a warp copies 128 keys a stage, three load the next item's
 * query. Two warpgroups score a stage and two the next, 64 keys each, and write the scores to memory.
 * Limit: reading the keys.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_ONE_KERNEL_CUH
#define QUERN_CUDA_INDEXER_SM90_ONE_KERNEL_CUH

#include "indexer/sm90/rows.cuh"
#include "indexer/sm90/score.cuh"
#include "indexer/sm90_one/params.cuh"

namespace sm90_indexer
{

enum { ONE_THREADS = 640, ONE_SCORERS = 4, ONE_FEW_REGISTERS = 64, ONE_SCORE_REGISTERS = 104 };

/* This warpgroup has half of the keys of every second stage. Beside the scores it writes the rank of the best
 * of each RANKED keys, a warp's. */
template <typename K>
__device__ __forceinline__ void score_one(const plan &p, const raw_scores &out, fed<K, 1, K::ONE_STAGES> &m,
                                          int own)
{
    const int row0 = own % 2 * 64 + threadIdx.x / 32 % 4 * 16, key = row0 + threadIdx.x % 32 / 4;
    int met = 0; /* stages so far */
    ring_place<2> q;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const item_of x = item_at<1>(p, item);
        if (x.stages == 0) continue;
        m.queries.wait_full(q);
        const uint32_t heads = smem_address(m.q[q.stage]);
        const int seen = index_seen(p.a, x.b, 0);
        float *const to = out.raw + x.b * out.row + x.key + key;
        uint32_t *const ranks = out.best + x.b * best_row(out) + (x.key + row0) / RANKED;
        for (int s = (own / 2) ^ (met & 1); s < x.stages; s += 2) {
            const auto at = ring_place<K::ONE_STAGES>::of(met + s);
            float sums[8][4], scale[2];
            uint32_t keys[K::STEPS][4];
            m.keys.wait_full(at);
            read_keys(keys, scale, p, m, at.stage, row0);
            give_back_by_warp(m.keys, at);
            K::template multiply<HEADS>(sums, keys, heads);
            wg_wait<0>(sums);
            float best = NAN;
            weigh<HEADS>(sums, m.w[q.stage], scale, [&](int, int h, float score) {
                const int at = x.key + s * KEYS + key + h * 8;
                if (at < out.row) to[s * KEYS + h * 8] = score;
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

template <typename K>
__global__ void __launch_bounds__(ONE_THREADS, 1)
    indexer_sm90_one(const __grid_constant__ plan p, const __grid_constant__ raw_scores to)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    auto &m = *(fed<K, 1, K::ONE_STAGES> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(1, KEY_USERS * READER_ARRIVALS);
        m.queries.init(Q_FILLERS, ONE_SCORERS * 128);
        mbar_init_done();
    }
    __syncthreads();
    let_next_start();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_down<ONE_FEW_REGISTERS>();
        if (threadIdx.x < 32) feed_keys(p, m);
        else feed_queries(p, m, threadIdx.x - 32);
    } else {
        registers_up<ONE_SCORE_REGISTERS>();
        score_one<K>(p, to, m, group - 1);
    }
#endif
}

template <typename K> static quern_status run_one(const stage_exec *exec, plan &p, const raw_scores &to)
{
    typedef fed<K, 1, K::ONE_STAGES> shared;
    static_assert(sizeof(shared) <= 227 * 1024, "a block has room");
    static_assert(K::ONE_STAGES % 2 == 0, "the same warpgroups use a stage in every round");
    static_assert((ONE_FEW_REGISTERS + ONE_SCORERS * ONE_SCORE_REGISTERS) * 128 <=
                      65536 / ONE_THREADS / 8 * 8 * ONE_THREADS,
                  "each warpgroup gets the registers that it asks for, of those that a block begins with");
    const unsigned blocks = set_items<1>(exec, &p);
    const quern_status status =
        launch_shared({(cudaStream_t)exec->stream, NULL}, indexer_sm90_one<K>, dim3(blocks), ONE_THREADS,
                      sizeof(shared), "indexer", p, to);
    return status == QUERN_OK ? pick_best(exec, p.a, to) : status;
}

} // namespace sm90_indexer

#endif
