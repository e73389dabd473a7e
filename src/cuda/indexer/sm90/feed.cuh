/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warps that copy: keys by bulk copies, a lane a page or part of one; queries by loads. */
#ifndef QUERN_CUDA_INDEXER_SM90_FEED_CUH
#define QUERN_CUDA_INDEXER_SM90_FEED_CUH

#include "indexer/sm90/shared.cuh"

namespace sm90_indexer
{

enum { CHUNKS = WIDTH / 8, ROWS_AT_ONCE = Q_FILLERS / CHUNKS };
/* Heads that a thread asks for at once: of one query all, as its keys wait for them. */
template <int Q> constexpr int at_once()
{
    return Q == 1 ? (HEADS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE : 4;
}

/* Eight channels that are not aligned. */
template <typename T> __device__ __forceinline__ uint4 load_apart(const T *from)
{
    uint4 x;
#pragma unroll
    for (int i = 0; i < 8; i++) ((T *)&x)[i] = from[i];
    return x;
}

/* Calls put(i, row, x) for eight channels from c on of heads row0, row0 + ROWS_AT_ONCE ... of a tile, number
 * i of at_once(). */
template <typename T, int Q, typename Put>
__device__ __forceinline__ void load_heads(const index_kernel &a, const item_of &x, int row0, int c,
                                           const Put &put)
{
    enum { N = at_once<Q>() };
    const T *const first = (const T *)a.q.p + x.b * a.q.s[0] + x.query * a.q.s[1] + c;
    const auto from = [&](int row) { return first + row / HEADS * a.q.s[1] + row % HEADS * a.q.s[2]; };
    const auto here = [&](int row) { return row < Q * HEADS && x.query + row / HEADS < a.queries; };
    if (!a.q_wide) {
#pragma unroll 1
        for (int i = 0; i < N; i++) {
            const int row = row0 + i * ROWS_AT_ONCE;
            put(i, row, here(row) ? load_apart(from(row)) : make_uint4(0, 0, 0, 0));
        }
        return;
    }
    uint4 held[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int row = row0 + i * ROWS_AT_ONCE;
        held[i] = here(row) ? __ldg((const uint4 *)from(row)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < N; i++) put(i, row0 + i * ROWS_AT_ONCE, held[i]);
}
/* The weight of one of them: that of the lane's number among the CHUNKS lanes of a head. */
template <int Q>
__device__ __forceinline__ float load_weight(const index_kernel &a, const item_of &x, int row0, int t)
{
    static_assert(at_once<Q>() <= CHUNKS, "each has a lane");
    const int row = row0 + t % CHUNKS * ROWS_AT_ONCE, query = x.query + row / HEADS;
    const bool here = t % CHUNKS < at_once<Q>() && row < Q * HEADS && query < a.queries;
    return here ? index_weight(a, x.b, query, row % HEADS) : 0.0f;
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
        for (int row0 = t / CHUNKS; row0 < Q * HEADS; row0 += at_once<Q>() * ROWS_AT_ONCE) {
            const float weight = load_weight<Q>(a, x, row0, t);
            load_heads<T, Q>(a, x, row0, c, [&](int i, int row, uint4 x) {
                if (row >= Q * HEADS) return;
                K::template store_channels<TILE>((char *)m.q[stage][row / TILE], row % TILE, c, x);
                if (t % CHUNKS == i) m.w[stage][row / HEADS][row % HEADS] = weight;
            });
        }
    }
};

/* By Q_FILLERS threads, this one number t. */
template <typename K, int Q, int STAGES>
__device__ __forceinline__ void feed_queries(const plan &p, fed<K, Q, STAGES> &m, int t)
{
    ring_place<m.ROUNDS> at;
    block_items<Q> items(p);
    for (item_of x; items.next(p, &x);) {
        m.queries.wait_free(at);
        K::fill_queries(p.a, m, at.stage, x, t);
        if (Q == 1 && t == 0) m.item[at.stage] = x;
        async_fence();
        m.queries.give(at);
        at.advance();
    }
    if (Q > 1) return;
    m.queries.wait_free(at);
    if (t == 0) m.item[at.stage].stages = 0;
    m.queries.give(at);
}

/* By one warp. A run that the table does not name (`here`) is not copied; its scores become NaN. The first
 * item's keys come behind its queries, but for a few, as all blocks begin at once. */
template <typename K, int Q, int STAGES>
__device__ __forceinline__ void feed_keys(const plan &p, fed<K, Q, STAGES> &m)
{
    const index_kernel &a = p.a;
    enum { BEFORE = 4 };
    const int lane = threadIdx.x % 32;
    bool begins = Q == 1;
    ring_place<STAGES> at;
    block_items<Q> items(p);
    for (item_of x; items.next(p, &x); begins = false) {
        const char *const first = a.keys.p + x.b * a.keys.page + x.key * a.keys.row;
        for (int s = 0; s < x.stages; s++) {
            if (begins && s == BEFORE) m.queries.wait_full({});
            if (a.keys.table == NULL) {
                if (lane > 0) break;
                m.keys.wait_free(at);
                K::copy_run(p, m, at, x.b, x.key + s * KEYS, first + s * KEYS * a.keys.row);
            } else {
                const int key = x.key + s * KEYS + (lane << p.cut.run_shift);
                const bool here = lane < KEYS >> p.cut.run_shift && key < a.entries &&
                                  row_exists(a.keys, x.sequence, key);
                const int page = here ? row_page(a.keys, x.sequence, key) : 0;
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
