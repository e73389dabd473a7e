/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lists_feed.cuh - shared memory of a block of `lists`, and the warpgroup that fills it: a query's heads, its
 * keys, its keys_index, and what it knows of the query besides: a wait for memory here keeps no product
 * waiting. */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_FEED_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_FEED_CUH

#include "indexer_loss/sm90/kernel.cuh"

namespace sm90_loss
{

enum {
    LIST_MOST = 512,
    GROUPS = 2,
    LIST_TILES = LIST_MOST / TILE,
    LIST_STAGES = 5,
    COMPUTING = GROUPS * 128,
    LISTS_THREADS = FEEDERS + COMPUTING,
    HALF_TILES = COLUMN_TILES / 2,
    LIST_FEED_REGISTERS = 40,
    LIST_REGISTERS = 232
};

/* What the feed knows of a query besides its rows. */
struct list_facts {
    int32_t row[LIST_TILES][TILE]; /* of partials, or below 0 */
    float w[HEADS];                /* 0 past the last head */
    bf16 w16[HEADS];
    float elsewhere[HEADS]; /* the logarithm of the mass that attention's heads give to window and sink */
    int32_t count;
};

struct lists_shared {
    bf16 stages[LIST_STAGES][WIDTH / 64][TILE][64];
    bf16 q[WIDTH / 64][HEADS][64], q_index[WIDTH / 64][HEADS][64];
    uint64_t positive[LIST_TILES][TILE];
    float sums[LIST_TILES][SUM_KINDS][4][TILE]; /* over a warp's heads */
    float g[LIST_TILES][TILE];
    list_facts facts[2];
    int32_t chosen[LIST_MOST]; /* the feed's; -1 past the last */
    bf16 gradient[LIST_TILES][TILE];
    float2 heads[GROUPS][HEADS]; /* the largest score of a warpgroup's entries, and the sum */
    float mass[GROUPS][HEADS], d_w[HEADS];
    float2 student[GROUPS][4];
    float loss[GROUPS][4];
    ring<LIST_STAGES> entries;
    ring<1> of_q, of_index;
};
static_assert(sizeof(lists_shared) <= 227 * 1024, "a block has room");

__device__ __forceinline__ void copy_chosen(char *to, const rows_of &from, const int32_t *chosen)
{
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const int row = half * (TILE / 2) + threadIdx.x / 16 % 8;
        copy_rows<TILE, TILE / 16>(to, from, row, threadIdx.x % 16, 0,
                                   [&](int i) { return chosen[row + i * 8]; });
    }
}

template <int TILES>
__device__ __forceinline__ void feed_tiles(lists_shared &m, ring_place<LIST_STAGES> &at, const rows_of &from)
{
    for (int tile = 0; tile < TILES; tile++) {
        m.entries.wait_free(at);
        copy_chosen((char *)m.stages[at.stage], from, m.chosen + tile * TILE);
        m.entries.give_copies(at);
        m.entries.give(at);
        at.advance();
    }
}

__device__ __forceinline__ void feed_heads(ring<1> &ring, const ring_place<1> &at, char *to,
                                           const rows_of &from, int heads)
{
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread)); /* offsets of rows kept over the queries would take all registers */
    ring.wait_free(at);
    copy_heads(to, from, heads, 0, thread);
    ring.give_copies(at);
    ring.give(at);
}

/* The query's list, and what its heads' products are weighed by. The facts of the query before the last are
 * no longer read: its index heads have been given back. */
template <int TILES>
__device__ __forceinline__ void feed_facts(const slice &s, lists_shared &m, list_facts &f, int64_t i)
{
    const loss_params &p = s.of;
    const int64_t query = s.first + i;
    const int32_t *const chosen = chosen_of(s, i);
    const int thread = threadIdx.x % 128, count = entries_of(s, i);
    int32_t entry[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
        entry[t] = t * TILE + thread < p.listed ? __ldg(chosen + t * TILE + thread) : -1;
    if (thread < HEADS) {
        const float w = thread < p.index_heads
                            ? value_at(p.w.p, p.w_dtype, s.b * p.w.s[0] + query * p.w.s[1] + thread)
                            : 0.0f;
        float elsewhere = -INFINITY;
        if (thread < p.heads)
            elsewhere = log_add_f32(
                p.lse_win.p[s.b * p.lse_win.s[0] + thread * p.lse_win.s[1] + query * p.lse_win.s[2]],
                p.sink != NULL ? p.sink[thread] : -INFINITY);
        f.w[thread] = w;
        f.w16[thread] = from_float<bf16>(w);
        f.elsewhere[thread] = elsewhere;
    }
    if (thread == 0) f.count = count;
    named_sync(2, FEEDERS); /* the list before it has been read */
#pragma unroll
    for (int t = 0; t < TILES; t++) m.chosen[t * TILE + thread] = t * TILE + thread < count ? entry[t] : -1;
    named_sync(2, FEEDERS);
}

/* The rows of partials of the query's entries. */
template <int TILES>
__device__ __forceinline__ void feed_rows(const slice &s, const lists_shared &m, list_facts &f, int64_t i)
{
    const int thread = threadIdx.x % 128;
    choice c[TILES];
    int32_t row[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const int32_t entry = s.sums != NULL ? m.chosen[t * TILE + thread] : -1;
        row[t] = entry >= 0 ? s.rows_before[entry] : INT32_MIN;
        c[t] = entry >= 0 ? s.choices[entry * s.words + i / 32] : choice{0, 0};
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
        f.row[t][thread] = row[t] + c[t].before + __popc(c[t].chose & ((1u << i % 32) - 1));
}

template <int TILES> __device__ __forceinline__ void feed_lists(const slice &s, lists_shared &m)
{
    const loss_params &p = s.of;
    const rows_of keys = {(const bf16 *)p.keys.p + s.b * p.keys.s[0], p.keys.s[1], p.dim, p.keys_wide},
                  index = {(const bf16 *)p.keys_index.p + s.b * p.keys_index.s[0], p.keys_index.s[1], p.width,
                           p.keys_index_wide};
    ring_place<LIST_STAGES> at;
    ring_place<1> heads;
    int turn = 0;
    for (int64_t i = blockIdx.x; i < s.count; i += gridDim.x) {
        const int64_t query = s.first + i;
        const rows_of q = {(const bf16 *)p.q.p + s.b * p.q.s[0] + query * p.q.s[1], p.q.s[2], p.dim,
                           p.q_wide},
                      q_index = {(const bf16 *)p.q_index.p + s.b * p.q_index.s[0] + query * p.q_index.s[1],
                                 p.q_index.s[2], p.width, p.q_index_wide};
        feed_facts<TILES>(s, m, m.facts[turn], i);
        feed_heads(m.of_q, heads, (char *)m.q, q, p.heads);
        feed_tiles<TILES>(m, at, keys);
        feed_rows<TILES>(s, m, m.facts[turn], i);
        feed_heads(m.of_index, heads, (char *)m.q_index, q_index, p.index_heads);
        feed_tiles<TILES>(m, at, index);
        heads.advance();
        turn ^= 1;
    }
}

} // namespace sm90_loss

#endif
