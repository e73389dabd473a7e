/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warps that copy: keys by bulk copies, a lane a page or part of one; queries by loads. */
#ifndef QUERN_CUDA_INDEXER_SM90_FEED_CUH
#define QUERN_CUDA_INDEXER_SM90_FEED_CUH

#include "indexer/sm90/shared.cuh"

namespace sm90_indexer
{

enum { CHUNKS = WIDTH / 8, ROWS_AT_ONCE = Q_FILLERS / CHUNKS, AT_ONCE = 4 };

template <typename T> __device__ __forceinline__ uint4 load_channels(const T *from, bool here, bool wide)
{
    uint4 x = make_uint4(0, 0, 0, 0);
    if (here && wide) x = __ldg((const uint4 *)from);
    else if (here)
        for (int i = 0; i < 8; i++) ((T *)&x)[i] = from[i];
    return x;
}

/* Eight channels from c on of heads row0, row0 + ROWS_AT_ONCE ... of a tile. */
template <typename T, int Q>
__device__ __forceinline__ void load_heads(uint4 (&held)[AT_ONCE], const index_kernel &a, const item_of &x,
                                           int row0, int c)
{
    const T *const first = (const T *)a.q.p + x.b * a.q.s[0] + x.query * a.q.s[1] + c;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int row = row0 + i * ROWS_AT_ONCE, query = row / HEADS;
        const bool here = row < Q * HEADS && x.query + query < a.queries;
        held[i] = load_channels(first + query * a.q.s[1] + row % HEADS * a.q.s[2], here, a.q_wide);
    }
}

/* Of a type of keys K whose queries of T are stored as they are. */
template <typename T, typename K> struct plain_queries {
    /* A tile's, and their weights; by Q_FILLERS threads, this one number t. */
    template <int Q, int STAGES>
    static __device__ __forceinline__ void fill_queries(const index_kernel &a, fed<K, Q, STAGES> &m,
                                                        int stage, const item_of &x, int t)
    {
        enum { TILE = fed<K, Q, STAGES>::TILE };
        const int c = t % CHUNKS * 8;
        for (int row0 = t / CHUNKS; row0 < Q * HEADS; row0 += AT_ONCE * ROWS_AT_ONCE) {
            uint4 held[AT_ONCE];
            load_heads<T, Q>(held, a, x, row0, c);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = row0 + i * ROWS_AT_ONCE;
                if (row < Q * HEADS)
                    K::template store_channels<TILE>((char *)m.q[stage][row / TILE], row % TILE, c, held[i]);
            }
        }
        for (int i = t; i < Q * HEADS; i += Q_FILLERS) {
            const int query = x.query + i / HEADS, head = i % HEADS;
            m.w[stage][i / HEADS][head] = query < a.queries ? index_weight(a, x.b, query, head) : 0.0f;
        }
    }
};

/* By Q_FILLERS threads, this one number t. */
template <typename K, int Q, int STAGES>
__device__ __forceinline__ void feed_queries(const plan &p, fed<K, Q, STAGES> &m, int t)
{
    ring_place<m.ROUNDS> at;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const item_of x = item_at<Q>(p, item);
        if (x.stages == 0) continue;
        m.queries.wait_free(at);
        K::fill_queries(p.a, m, at.stage, x, t);
        async_fence();
        m.queries.give(at);
        at.advance();
    }
}

/* By one warp. A run that the table does not name (`here`) is not copied; its scores become NaN. */
template <typename K, int Q, int STAGES>
__device__ __forceinline__ void feed_keys(const plan &p, fed<K, Q, STAGES> &m)
{
    const index_kernel &a = p.a;
    const int lane = threadIdx.x % 32;
    ring_place<STAGES> at;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const item_of x = item_at<Q>(p, item);
        const int sequence = index_sequence(a, x.b);
        const char *const first = a.keys.p + x.b * a.keys.page + x.key * a.keys.row;
        for (int s = 0; s < x.stages; s++) {
            if (a.keys.table == NULL) {
                if (lane > 0) break;
                m.keys.wait_free(at);
                K::copy_run(p, m, at, x.b, x.key + s * KEYS, first + s * KEYS * a.keys.row);
            } else {
                const int key = x.key + s * KEYS + (lane << p.cut.run_shift);
                const bool here = lane < KEYS >> p.cut.run_shift && key < a.entries &&
                                  row_exists(a.keys, sequence, key);
                const int page = here ? row_page(a.keys, sequence, key) : 0;
                m.keys.wait_free(at);
                const unsigned named = __ballot_sync(~0u, here);
                if (lane == 0) {
                    m.here[at.stage] = named;
                    m.keys.expect(at, (uint32_t)(__popc(named) << p.cut.run_shift) * (K::STAGE_BYTES / KEYS));
                }
                __syncwarp();
                if (here) K::copy_page(p, m, at, key, page);
            }
            at.advance();
        }
        __syncwarp();
    }
}

} // namespace sm90_indexer

#endif
