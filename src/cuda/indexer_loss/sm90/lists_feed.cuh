/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lists_feed.cuh - shared memory of a block of `lists`, and the warpgroup that fills it: a query's heads, its
 * keys, its keys_index, and what it knows of the query besides: a wait for memory here keeps no product
 * waiting, but each instruction a copy does: a query has 16384 copies of 16 bytes. */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_FEED_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_FEED_CUH

#include "indexer_loss/sm90/kernel.cuh"

namespace sm90_loss
{

enum {
    GROUPS_MOST = 4,
    LIST_TILES = LIST_MOST / TILE,
    LIST_STAGES = 5,
    HALF_TILES = COLUMN_TILES / 2
};

/* What the feed knows of a query besides its rows. */
struct list_facts {
    float w[HEADS]; /* 0 past the last head */
    bf16 w16[HEADS];
    float elsewhere[HEADS]; /* of the mass that attention's heads give to window and sink, to base 2 */
    int32_t count;
};

struct lists_shared {
    bf16 stages[LIST_STAGES][WIDTH / 64][TILE][64];
    bf16 q[WIDTH / 64][HEADS][64], q_index[WIDTH / 64][HEADS][64];
    uint64_t positive[LIST_TILES][TILE];
    float sums[LIST_TILES][SUM_KINDS][4][TILE]; /* over a warp's heads */
    float g[LIST_TILES][TILE];
    list_facts facts[2];
    int32_t rows;                          /* queries that have an entry */
    alignas(16) int32_t chosen[LIST_MOST]; /* the feed's; -1 past the last */
    bf16 gradient[LIST_TILES][TILE];
    choices_shared choices;           /* the feed's */
    float2 heads[GROUPS_MOST][HEADS]; /* the largest score of a warpgroup's entries, and the sum */
    float mass[GROUPS_MOST][HEADS], d_w[GROUPS_MOST][HEADS];
    float2 student[GROUPS_MOST][4];
    float loss[GROUPS_MOST][4];
    ring<LIST_STAGES> entries;
    ring<1> of_q, of_index;
};
static_assert(sizeof(lists_shared) <= 227 * 1024, "a block has room");

/* Where the list's number `at` stands in `chosen`: the rows that a thread copies follow one another. */
__device__ __forceinline__ int chosen_at(int at)
{
    return at / TILE * TILE + at % 8 * (TILE / 8) + at % TILE / 8;
}

/* Rows of which 16 bytes are found by one multiplication of 32 bits. */
__device__ __forceinline__ bool found_fast(const rows_of &from)
{
    return from.wide && (uint64_t)from.stride < 1u << 30;
}

/* Four rows' chunks of a thread, eight rows apart; below 0 there is none. */
__device__ __forceinline__ void copy_four(uint32_t to, const rows_of &from, int column, const int (&row)[4])
{
    const char *const base = (const char *)(from.base + column * 8);
    const uint32_t bytes = (uint32_t)from.stride * 2;
    const bool inside = column * 8 < from.channels;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool there = inside && row[i] >= 0;
        cp_async16(to + i * 8 * 128, base + (uint64_t)(there ? (uint32_t)row[i] : 0) * bytes, there);
    }
}

__device__ __forceinline__ void copy_chosen(char *to, const rows_of &from, const int32_t *chosen)
{
    const int row = threadIdx.x / 16 % 8, column = threadIdx.x % 16;
    const int32_t *const own = chosen + row * (TILE / 8);
    if (!found_fast(from)) {
        const rows_of any = {from.base, from.stride, from.channels, false};
        copy_rows<TILE, TILE / 8>(to, any, row, column, 0, [&](int i) { return own[i]; });
        return;
    }
    const uint32_t tile = smem_address(to) + tile_at<TILE>(row, column);
#pragma unroll
    for (int i = 0; i < TILE / 8; i += 4) {
        const int4 four = *(const int4 *)(own + i);
        copy_four(tile + i * 8 * 128, from, column, {four.x, four.y, four.z, four.w});
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

__device__ __forceinline__ void copy_chosen_heads(char *to, const rows_of &from, int heads)
{
    const int row = threadIdx.x / 16 % 8, column = threadIdx.x % 16;
    if (found_fast(from)) {
        const uint32_t tile = smem_address(to) + tile_at<HEADS>(row, column);
#pragma unroll 1
        for (int i = 0; i < HEADS; i += 32) {
            int four[4];
#pragma unroll
            for (int j = 0; j < 4; j++) four[j] = row + i + j * 8 < heads ? row + i + j * 8 : -1;
            copy_four(tile + i * 128, from, column, four);
        }
    } else copy_heads(to, {from.base, from.stride, from.channels, false}, heads, 0);
}

/* Gives heads whose copies are under way. */
__device__ __forceinline__ void give_heads_of(ring<1> &ring, const ring_place<1> &at)
{
    ring.give_copies(at);
    ring.give(at);
}

/* Attention's heads of a query come while the choices of the one before it are made, and its facts. */
__device__ __forceinline__ void copy_q(const slice &s, lists_shared &m, const ring_place<1> &at, int64_t i)
{
    const loss_params &p = s.of;
    if (i >= s.count) return;
    m.of_q.wait_free(at);
    copy_chosen_heads(
        (char *)m.q,
        {(const bf16 *)p.q.p + s.b * p.q.s[0] + (s.first + i) * p.q.s[1], p.q.s[2], p.dim, p.q_wide},
        p.heads);
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
            elsewhere = p.lse_win.p[s.b * p.lse_win.s[0] + thread * p.lse_win.s[1] + query * p.lse_win.s[2]];
        if (thread < p.heads && p.sink != NULL) elsewhere = log_add_f32(elsewhere, p.sink[thread]);
        f.w[thread] = w;
        f.w16[thread] = from_float<bf16>(w);
        f.elsewhere[thread] = elsewhere * log2_of_e;
    }
    if (thread == 0) f.count = count;
    named_sync(2, FEEDERS); /* the list before it has been read */
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const int at = t * TILE + thread;
        m.chosen[chosen_at(at)] = at < count ? entry[t] : -1;
    }
    named_sync(2, FEEDERS);
}

template <int TILES> __device__ __forceinline__ void feed_lists(const slice &s, lists_shared &m)
{
    const loss_params &p = s.of;
    const rows_of keys = {(const bf16 *)p.keys.p + s.b * p.keys.s[0], p.keys.s[1], p.dim, p.keys_wide},
                  index = {(const bf16 *)p.keys_index.p + s.b * p.keys_index.s[0], p.keys_index.s[1], p.width,
                           p.keys_index_wide};
    ring_place<LIST_STAGES> at;
    ring_place<1> heads;
    clear_choices(m.choices);
    copy_q(s, m, heads, blockIdx.x);
    wait_for_before(); /* for lists */
    for (int64_t i = blockIdx.x; i < s.count; i += gridDim.x) {
        const int64_t query = s.first + i;
        const rows_of q_index = {(const bf16 *)p.q_index.p + s.b * p.q_index.s[0] + query * p.q_index.s[1],
                                 p.q_index.s[2], p.width, p.q_index_wide};
        feed_facts<TILES>(s, m, m.facts[heads.parity], i);
        give_heads_of(m.of_q, heads);
        feed_tiles<TILES>(m, at, keys);
        m.of_index.wait_free(heads);
        copy_chosen_heads((char *)m.q_index, q_index, p.index_heads);
        give_heads_of(m.of_index, heads);
        feed_tiles<TILES>(m, at, index);
        const int count = m.facts[heads.parity].count;
        heads.advance();
        copy_q(s, m, heads, i + gridDim.x);
        if (s.sums != NULL)
            give_choices(
                s, m.choices, i, count, [&](int at) { return m.chosen[chosen_at(at)]; },
                [] { named_sync(2, FEEDERS); });
    }
}

} // namespace sm90_loss

#endif
