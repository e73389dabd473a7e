/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that score and choose, and the kernel. */
#ifndef QUERN_CUDA_INDEXER_SM90_KERNEL_CUH
#define QUERN_CUDA_INDEXER_SM90_KERNEL_CUH

#include "indexer/sm90/feed.cuh"

namespace sm90_indexer
{

/* Begins the products of this warpgroup's 64 keys of a stage with the heads of two queries. */
template <typename T, int STAGES>
__device__ __forceinline__ void multiply(float (&c)[16][4], shared<T, STAGES> &m, int stage, int pair,
                                         int half)
{
    const uint64_t keys = wg_fresh(wg_tile(smem_address(m.k[stage]) + half * 64 * 128, 0)),
                   heads = wg_fresh(wg_tile(smem_address(m.q[pair]), 0));
    wg_start();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
        const uint32_t further = i / 4 * PANEL_BYTES + i % 4 * 32;
        if (i == 0) wgmma_ss<T, 128, false, false>(c, keys, heads);
        else wgmma_ss<T, 128, true, false>(c, wg_further(keys, further), wg_further(heads, further));
    }
    wg_commit();
}

/* Sums of two queries over their heads, times the keys' scales, go to the slot's scores. */
template <typename T, int STAGES>
__device__ __forceinline__ void weigh(const float (&c)[16][4], shared<T, STAGES> &m, int slot, int pair,
                                      int key0, const float (&scale)[2])
{
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int q = 0; q < 2; q++) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 w = *(const float2 *)&m.w[pair * 2 + q][i * 8 + column];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[h] = fmaf(w.x, relu(c[q * 8 + i][h * 2]), sum[h]);
                sum[h] = fmaf(w.y, relu(c[q * 8 + i][h * 2 + 1]), sum[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if (column == 0) m.score[slot][pair * 2 + q][key0 + h * 8] = sum[h] * scale[h];
        }
    }
}

template <typename T, int STAGES>
__device__ __forceinline__ void score(const index_kernel &a, shared<T, STAGES> &m, int items, int half)
{
    const int lane = threadIdx.x % 32, key0 = half * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    ring_place<STAGES> at;
    ring_place<SLOTS> out;
    ring_place<1> q;
    for (int item = blockIdx.x; item < items; item += gridDim.x, q.advance()) {
        const int stages = item_at(a, item).stages;
        m.queries.wait_full(q);
        for (int s = 0; s < stages; s++) {
            float first[16][4], second[16][4];
            m.keys.wait_full(at);
            wg_show();
            multiply(first, m, at.stage, 0, half);
            multiply(second, m, at.stage, 1, half);
            const float scale[2] = {m.scale[at.stage][key0], m.scale[at.stage][key0 + 8]};
            m.scores.wait_free(out);
            wg_wait<1>(first);
            weigh(first, m, out.stage, 0, key0, scale);
            wg_wait<0>(second);
            m.keys.give_back(at);
            at.advance();
            weigh(second, m, out.stage, 1, key0, scale);
            m.scores.give(out);
            out.advance();
        }
        m.queries.give_back(q);
    }
}

/* A warp a query. */
template <typename T, int STAGES>
__device__ __forceinline__ void choose(const index_kernel &a, shared<T, STAGES> &m, int items)
{
    const int own = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ring_place<SLOTS> in;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const item_of x = item_at(a, item);
        const int query = x.query + own, seen = index_seen(a, x.b, query);
        best_list best = {m.rank[own], m.index[own], m.bins[own], 0, 0};
        float *const scores = a.scores + x.b * a.scores_row[0] + query * a.scores_row[1];
        for (int s = 0; s < x.stages; s++) {
            m.scores.wait_full(in);
            float score[4];
#pragma unroll
            for (int i = 0; i < 4; i++) score[i] = m.score[in.stage][own][i * 32 + lane];
            m.scores.give_back(in);
            in.advance();
            if (best.n + KEYS > room_of(STAGES)) best_cut(best, a.k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = s * KEYS + i * 32 + lane;
                if (a.scores != NULL && key < seen) scores[key] = score[i] + 0.0f;
                best_add(best, key < seen, rank_of(score[i]), key);
            }
        }
        if (query < a.queries) index_store(a, x.b, query, best);
        __syncwarp();
    }
}

template <typename T, int STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    indexer_sm90(const __grid_constant__ index_kernel a, const int items)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<T, STAGES> &m = *(shared<T, STAGES> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(FILLERS, SCORERS);
        m.scores.init(SCORERS, CHOOSERS);
        m.queries.init(FILLERS, SCORERS);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group < 2) {
        registers_down<FEW_REGISTERS>();
        if (group == 0) feed(a, m, items);
        else choose(a, m, items);
    } else {
        registers_up<MANY_REGISTERS>();
        score(a, m, items, group - 2);
    }
#endif
}

template <typename T, int STAGES> static quern_status launch(const stage_exec *exec, const index_kernel &a)
{
    const int items = (a.queries + QUERIES - 1) / QUERIES * a.batch;
    const unsigned grid = (unsigned)(items < exec->multiprocessors ? items : exec->multiprocessors);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, indexer_sm90<T, STAGES>, dim3(grid), THREADS,
                         sizeof(shared<T, STAGES>), "indexer", a, items);
}

template <typename T> static quern_status run(const stage_exec *exec, const index_kernel &a)
{
    return a.k <= most_of(3) ? launch<T, 3>(exec, a) : launch<T, 2>(exec, a);
}

} // namespace sm90_indexer

#endif
