/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that copies heads and entries. Sixteen lanes copy 128 channels of a row, so a
 * thread has 16 bytes of every eighth row. What lies beyond a query's entries, heads or channels becomes 0.
 * */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_FEED_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_FEED_CUH

#include "indexer_loss/sm90/shared.cuh"

namespace sm90_loss
{

/* Rows that are read from a view: of a sequence, from its element 0 on. */
struct rows_of {
    const bf16 *base;
    int64_t stride;
    int channels;
    bool wide;
};

/* A thread's chunks of N rows of a tile, eight apart from `row` on: `which` says which row of the view stands
 * there, or -1. The view's alignment is asked once: a branch a row takes 200 clocks each. */
template <int ROWS, int N, typename Which>
__device__ __forceinline__ void copy_rows(char *to, const rows_of &from, int row, int column, int channel,
                                          const Which &which)
{
    const uint32_t tile = smem_address(to), place = tile_at<ROWS>(row, column);
    const int at = channel + column * 8;
    if (!from.wide) {
#pragma unroll 1
        for (int i = 0; i < N; i++) {
            const int here = which(i);
            const bool there = here >= 0 && at < from.channels;
            load_chunk16<bf16>(tile, to, place + i * 8 * 128,
                               from.base + (there ? here * from.stride + at : 0), there, false);
        }
        return;
    }
    int here[N];
#pragma unroll
    for (int i = 0; i < N; i++) here[i] = at < from.channels ? which(i) : -1;
#pragma unroll
    for (int i = 0; i < N; i++)
        cp_async16(tile + place + i * 8 * 128, from.base + (here[i] >= 0 ? here[i] * from.stride + at : 0),
                   here[i] >= 0);
}

/* 128 channels from `channel` on of 64 heads, into two panels, by a thread of 128. */
__device__ __forceinline__ void copy_heads(char *to, const rows_of &from, int heads, int channel,
                                           int thread = threadIdx.x % 128)
{
    const int row = thread / 16;
    copy_rows<HEADS, HEADS / 8>(to, from, row, thread % 16, channel, [&](int i) {
        return row + i * 8 < heads ? row + i * 8 : -1;
    });
}

/* The same of a tile of entries: those from `first` on of `count`, or which `chosen` lists there. */
template <bool LISTS>
__device__ __forceinline__ void copy_entries(char *to, const rows_of &from, const int32_t *chosen, int first,
                                             int count, int channel)
{
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const int row = half * (TILE / 2) + threadIdx.x / 16 % 8;
        copy_rows<TILE, TILE / 16>(to, from, row, threadIdx.x % 16, channel, [&](int i) {
            const int at = first + row + i * 8;
            return at >= count ? -1 : LISTS ? __ldg(chosen + at) : at;
        });
    }
}

/* The ring's next stage. */
template <bool LISTS, int QUERIES, int STAGES>
__device__ __forceinline__ void fill(shared<QUERIES, STAGES> &m, ring_place<STAGES> &at, const rows_of &from,
                                     const int32_t *chosen, int first, int count, int channel)
{
    m.entries.wait_free(at);
    copy_entries<LISTS>((char *)m.stages[at.stage], from, chosen, first, count, channel);
    m.entries.give_copies(at);
    m.entries.give(at);
    at.advance();
}

/* `tiles` of the block's queries, of which most entries `count`. */
template <bool LISTS, int QUERIES, int STAGES>
__device__ __forceinline__ void feed(const slice &s, shared<QUERIES, STAGES> &m, char *heads, int tiles,
                                     int count, bool gradients)
{
    const loss_params &p = s.of;
    const int64_t first = (int64_t)blockIdx.x * QUERIES;
    const int chunks = (p.dim + WIDTH - 1) / WIDTH;
    for (int q = 0; q < QUERIES && first + q < s.count; q++) {
        const int64_t query = s.first + first + q;
        const rows_of of = {(const bf16 *)p.q.p + s.b * p.q.s[0] + query * p.q.s[1], p.q.s[2], p.dim,
                            p.q_wide},
                      index = {(const bf16 *)p.q_index.p + s.b * p.q_index.s[0] + query * p.q_index.s[1],
                               p.q_index.s[2], p.width, p.q_index_wide};
        for (int c = 0; c < chunks; c++)
            copy_heads(heads + (q * chunks + c) * LOSS_HEAD_BYTES, of, p.heads, c * WIDTH);
        copy_heads((char *)m.q_index[q], index, p.index_heads, 0);
    }
    m.heads_full.arrive_copies({});
    m.heads_full.arrive({});
    const int32_t *const chosen = chosen_of(s, first);
    const rows_of keys = {(const bf16 *)p.keys.p + s.b * p.keys.s[0], p.keys.s[1], p.dim, p.keys_wide},
                  index = {(const bf16 *)p.keys_index.p + s.b * p.keys_index.s[0], p.keys_index.s[1], p.width,
                           p.keys_index_wide};
    ring_place<STAGES> at;
    for (int walk = 0; walk < (gradients ? 3 : 2); walk++)
        for (int tile = 0; tile < tiles; tile++) {
            for (int c = 0; walk < 2 && c < chunks; c++)
                fill<LISTS>(m, at, keys, chosen, tile * TILE, count, c * WIDTH);
            if (walk > 0) fill<LISTS>(m, at, index, chosen, tile * TILE, count, 0);
        }
}

} // namespace sm90_loss

#endif
