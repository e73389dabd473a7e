/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that gathers Q, dO and keys (hopper/gather.cuh). Which row a key is, and where its
 * partial goes, is read a tile ahead. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_BACKWARD_FEED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_BACKWARD_FEED_CUH

#include "attend_mqa/sm90_backward/shared.cuh"
#include "hopper/gather.cuh"

namespace sm90_mqa_backward
{

using namespace gather;

/* An item's rows of Q or dO; a head without a part has zeros. */
template <typename T>
__device__ __forceinline__ void feed_heads(T (&to)[PANELS][HEADS][64], const view4 &v, const mqa_query &q,
                                           int head, bool here, bool wide)
{
    const char *const row =
        here ? (const char *)((const T *)v.p + q.sequence * v.s[0] + q.row * v.s[1] + head * v.s[2]) : NULL;
    const char *from[ROWS_A_THREAD];
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) from[i] = passed(row, i);
#pragma unroll
    for (int half = 0; half < HALVES; half++) copy_rows<T>((char *)to[half * HALF], from, half, wide);
}

/* The key that this lane finds in a tile, and where its partial goes. */
struct found_key {
    int found, partial;
};
__device__ __forceinline__ found_key find_key(const mqa_backward &b, const mqa_query &q, int query, bool raw,
                                              int key)
{
    const int found = mqa_find_key(b.of, q, query, raw, key);
    return {found, mqa_partial_of(b, q, query, raw, key, found)};
}

template <typename T> __device__ __forceinline__ void feed(const mqa_backward &b, shared<T> &m, int items)
{
    ring_place<HALVES> at;
    uint32_t tile = 0, turn = 0;
    const int mine = found_row();
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
        const int query = item / b.groups, head = (item - query * b.groups) * HEADS + mine;
        const mqa_query q = b.of.queries[query];
        const int raw_tiles = (q.raw + KEYS - 1) / KEYS, some = raw_tiles + (q.entries + KEYS - 1) / KEYS,
                  tiles = some > 0 ? some : 1;
        found_key next = find_key(b, q, query, raw_tiles > 0, mine);
        mqa_head h = {INFINITY, 0.0f, 0.0f, 0.0f};
        if (head < b.of.heads) h = b.heads[query * b.of.heads + head];
        m.heads_free.wait_before({0, turn});
        if (threadIdx.x % 32 < 16) m.heads[mine] = h;
        feed_heads(m.q, b.of.q, q, head, h.lse2 != INFINITY, b.of.q_wide);
        feed_heads(m.d_o, b.d_o, q, head, h.lse2 != INFINITY, b.d_o_wide);
        m.heads_full.arrive_copies({});
        m.heads_full.arrive({});
        for (int t = 0; t < tiles; t++, tile ^= 1) {
            const bool raw = t < raw_tiles;
            const found_key here = next;
            const int ahead = t + 1 - (t + 1 < raw_tiles ? 0 : raw_tiles);
            next = find_key(b, q, query, t + 1 < raw_tiles, ahead * KEYS + mine);
            const row_source &source = raw ? b.of.raw : b.of.entries;
            const char *const row = mqa_row_at(source, q, here.found).data;
            const int left = raw ? q.raw - t * KEYS : q.entries - (t - raw_tiles) * KEYS;
            const char *from[ROWS_A_THREAD];
#pragma unroll
            for (int i = 0; i < ROWS_A_THREAD; i++) from[i] = passed(row, i);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                m.keys.wait_free(at);
                if (half == 0) {
                    if (threadIdx.x % 32 < 16) m.info[tile].partial[mine] = here.partial;
                    if (threadIdx.x == 0) {
                        m.info[tile].keys = left < KEYS ? left : (int)KEYS;
                        m.info[tile].last = t + 1 == tiles;
                    }
                }
                copy_rows<T>((char *)m.k[at.stage], from, half, source.wide);
                m.keys.give_copies(at);
                m.keys.give(at);
                at.advance();
            }
        }
    }
}

} // namespace sm90_mqa_backward

#endif
