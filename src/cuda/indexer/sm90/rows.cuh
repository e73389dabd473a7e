/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.cuh - keys that are rows of 16 bits: panels of 64 channels, copied by TMA and read by ldmatrix. */
#ifndef QUERN_CUDA_INDEXER_SM90_ROWS_CUH
#define QUERN_CUDA_INDEXER_SM90_ROWS_CUH

#include "indexer/sm90/feed.cuh"

namespace sm90_indexer
{

template <typename T> struct rows : plain_queries<T, rows<T>> {
    typedef T query;
    enum { PANEL_BYTES = KEYS * 128, STAGE_BYTES = PANELS * PANEL_BYTES };
    enum { STEPS = sm90_indexer::STEPS, Q_PANELS = PANELS };
    /* Stages, slots of scores, a list's room; long lists have more of that and fewer stages. */
    enum { STAGES = 3, SLOTS = 7, ROOM = 1600, LONG_STAGES = 2, LONG_ROOM = 2624, ONE_STAGES = 4 };

    /* Keys that stand in a row, from `key` on; by one thread. */
    template <int Q, int N>
    static __device__ __forceinline__ void copy_run(const plan &p, fed<rows, Q, N> &m,
                                                    const ring_place<N> &at, int b, int key, const char *)
    {
        const uint32_t to = stage_address(m.k, at.stage);
        m.here[at.stage] = 1;
        const uint32_t bar = m.keys.expect(at, STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < PANELS; i++) tma_load(to + i * PANEL_BYTES, p.map, bar, 0, key, i, b);
    }

    /* This lane's run in a page. */
    template <int Q, int N>
    static __device__ __forceinline__ void copy_page(const plan &p, fed<rows, Q, N> &m,
                                                     const ring_place<N> &at, int key, int page)
    {
        const int lane = threadIdx.x % 32, run = 1 << p.cut.run_shift,
                  row = (int)(key - quotient(key, p.a.keys.slots) * p.a.keys.slots.d);
        const uint32_t to = stage_address(m.k, at.stage), bar = m.keys.barrier(at);
#pragma unroll
        for (int i = 0; i < PANELS; i++)
            tma_load(to + lane * run * 128 + i * PANEL_BYTES, p.map, bar, 0, row, i, page);
    }

    template <int TILE>
    static __device__ __forceinline__ void store_channels(char *tile, int row, int c, uint4 x)
    {
        *(uint4 *)(tile + tile_at<TILE>(row, c / 8)) = x;
    }

    /* 16 rows from row0 on of a stage, and what multiplies the scores of a thread's two. */
    static __device__ __forceinline__ void read(uint32_t (&to)[STEPS][4], float (&scale)[2],
                                                const key_cut &, uint32_t tile, int row0)
    {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            ldmatrix4(to[i], tile + tile_at<KEYS>(row0 + lane % 16, i * 2 + lane / 16));
        scale[0] = scale[1] = 1.0f;
    }

    template <int TILE>
    static __device__ __forceinline__ void multiply(float (&c)[TILE / 8][4], const uint32_t (&keys)[STEPS][4],
                                                    uint32_t tile)
    {
        wg_rs_tile<T, TILE>(c, keys, tile);
    }
};

} // namespace sm90_indexer

#endif
