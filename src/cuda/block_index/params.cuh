/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the block indexer's kernels have in common: their arguments, what a row of scores (a
 * query and a head) chooses from, and how its list is written. */
#ifndef QUERN_CUDA_BLOCK_INDEX_PARAMS_CUH
#define QUERN_CUDA_BLOCK_INDEX_PARAMS_CUH

#include "common/launch.cuh"
#include "common/topk.cuh"
#include "stages/mask.h"

struct block_index_kernel {
    seqs sq;
    view4 q, keys;
    int32_t units, hs; /* heads of keys; query heads that share one */
    int32_t dim, k, forced_first;
    int64_t forced_local, block_size, query_offset;
    int32_t *blocks, *count; /* count, scores: or NULL */
    int64_t blocks_row[3], count_row[3], list_rows;
    float *scores;
    int64_t scores_row[3], width; /* width: blocks of a row of scores */
    fast_div by_hs;
    bool wide; /* rows can be read 16 bytes at a time */
};

/* The larger; NaN where one is. */
__device__ __forceinline__ float index_most(float x, float y)
{
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

/* A query of a sequence: how many keys it sees, and which blocks are its candidates: of [0, candidates) those
 * outside [first, local) are forced, `want` of the others are chosen. */
struct index_contest {
    int seen, candidates, first, local, want;
};

__device__ __forceinline__ index_contest index_contest_of(const block_index_kernel &a, const sequence &s,
                                                          int64_t query)
{
    const int64_t position = query + (a.query_offset >= 0 ? a.query_offset : s.nk - s.nq);
    index_contest c = {0, 0, 0, 0, 0};
    if (position < 0 || query >= s.nq) return c;
    const int64_t newest = position / a.block_size, all = mask_blocks(s.nk, a.block_size);
    c.seen = (int)(position + 1 < s.nk ? position + 1 : s.nk);
    c.candidates = (int)(newest + 1 < all ? newest + 1 : all);
    c.first = a.forced_first < c.candidates ? a.forced_first : c.candidates;
    int64_t local = a.forced_local > 0 ? newest - (a.forced_local - 1) : c.candidates;
    if (local > c.candidates) local = c.candidates;
    if (local < c.first || c.candidates <= a.k) local = c.first; /* all of them */
    c.local = (int)local;
    c.want = a.k - c.first - (c.candidates - c.local);
    if (c.want > c.local - c.first) c.want = c.local - c.first;
    return c;
}

/* Writes what is not chosen by scores: forced blocks and padding; the chosen ones belong at list + c.first.
 * By one warp. */
__device__ __forceinline__ int32_t *index_write_forced(const block_index_kernel &a, const index_contest &c,
                                                       int64_t b, int64_t head, int64_t row)
{
    const int lane = threadIdx.x % 32, chosen = c.first + c.want, end = chosen + c.candidates - c.local;
    int32_t *const list = a.blocks + b * a.blocks_row[0] + head * a.blocks_row[1] + row * a.blocks_row[2];
    for (int i = lane; i < a.k; i += 32) {
        if (i >= c.first && i < chosen) continue;
        list[i] = i < c.first ? i : i < end ? c.local + i - chosen : -1;
    }
    if (lane == 0 && a.count != NULL)
        a.count[b * a.count_row[0] + head * a.count_row[1] + row * a.count_row[2]] = end;
    return list + c.first;
}

block_index_kernel block_index_kernel_of(const block_index_args *args);
/* Varlen: lists of rows that no query has. */
quern_status block_index_pad(const stage_exec *exec, const block_index_kernel &a);
/* Whether the kernels take a call; if not, says so. */
bool block_index_takes(const block_index_args *args, char why[STAGE_WHY_BYTES]);

#endif
