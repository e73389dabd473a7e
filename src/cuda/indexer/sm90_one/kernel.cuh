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

enum { ONE_THREADS = 640, ONE_SCORERS = 4 };

/* This warpgroup has half of the keys of every second stage. Beside the scores it writes the rank of the best
 * of each RANKED keys, a warp's. Whether a stage is full is tested a stage before. */
template <typename K>
__device__ __forceinline__ void score_one(const plan &p, const raw_scores &out, fed<K, 1, K::ONE_STAGES> &m,
                                          int own)
{
    const int row0 = own % 2 * 64 + threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32;
    int met = 0; /* stages so far */
    bool full = false;
    ring_place<2> q;
    for (;; q.advance()) {
        m.queries.wait_full(q);
        const item_of x = m.item[q.stage];
        if (x.stages == 0) break;
        const uint32_t heads = smem_address(m.q[q.stage]);
        const int key = x.key + row0 + lane / 4 + lane % 2 * 8;
        float *const to = out.raw + x.b * out.row + key;
        uint32_t *const ranks = out.best + x.b * best_row(out.row) + (x.key + row0) / RANKED;
        for (int s = (own / 2) ^ (met & 1); s < x.stages; s += 2) {
            const auto at = ring_place<K::ONE_STAGES>::of(met + s);
            float sums[8][4], scale[2];
            uint32_t keys[K::STEPS][4];
            if (!full) m.keys.wait_full(at);
            read_keys(keys, scale, p, m, at.stage, row0);
            give_back_by_warp(m.keys, at);
            K::template multiply<HEADS>(sums, keys, heads);
            full = __all_sync(~0u, m.keys.test_full(ring_place<K::ONE_STAGES>::of(met + s + 2)));
            wg_wait<0>(sums);
            float best = NAN;
            weigh<HEADS>(sums, m.w[q.stage], scale, [&](int, int, float score) {
                if (key + s * KEYS >= x.seen) return;
                to[s * KEYS] = score;
                best = score;
            });
            if (out.best == NULL) continue;
            const uint32_t rank = __reduce_max_sync(~0u, rank_of(best));
            if (lane == 0 && x.key + s * KEYS + row0 < x.seen) ranks[s * (KEYS / RANKED)] = rank;
        }
        met += x.stages;
        m.queries.give_back(q);
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
    wait_for_before();
    let_next_start(); /* what spread the batch has ended: the choice reads it before it waits */
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        if (threadIdx.x < 32) feed_keys(p, m);
        else feed_queries(p, m, threadIdx.x - 32);
    } else {
        score_one<K>(p, to, m, group - 1);
    }
#endif
}

template <typename K> static quern_status run_one(const stage_exec *exec, plan &p, const raw_scores &to)
{
    typedef fed<K, 1, K::ONE_STAGES> shared;
    static_assert(sizeof(shared) <= 227 * 1024, "a block has room");
    static_assert(K::ONE_STAGES % 2 == 0, "the same warpgroups use a stage in every round");
    const int64_t stages = p.a.batch * ((p.a.entries + KEYS - 1) / KEYS);
    const unsigned blocks = (unsigned)(stages < exec->multiprocessors ? stages : exec->multiprocessors);
    /* Behind the launch that has spread a varlen batch. */
    const quern_status status =
        blocks == 0 ? QUERN_OK
                    : launch_cluster((cudaStream_t)exec->stream, indexer_sm90_one<K>, dim3(blocks),
                                     ONE_THREADS, sizeof(shared), "indexer", 1, p.a.sequence != NULL, p, to);
    return status == QUERN_OK ? pick_best(exec, p.a, to) : status;
}

} // namespace sm90_indexer

#endif
