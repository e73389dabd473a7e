/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the block indexer of a step's tokens over pages: how a call is cut.
 *
 * A block takes up to 16 rows (tokens of one sequence, and the heads that share their keys) and a share of
 * the sequence's blocks, of which each warp has whole ones. It writes each row's maximum of each block to
 * the workspace; then a block a list chooses (choose.cu). A maximum is the same however keys are cut, so
 * lists depend on no other sequence, no share and no other token. Steps of many tokens go in slices, for
 * maxima to stay few.
 */
#ifndef QUERN_CUDA_INDEX_DECODE_PARAMS_CUH
#define QUERN_CUDA_INDEX_DECODE_PARAMS_CUH

#include "block_index/params.cuh"
#include "common/mma.cuh"
#include "common/step.cuh"

namespace index_decode
{

enum {
    WARPS = 4,
    THREADS = WARPS * 32,
    ROWS = 16,
    SHARES = 64,      /* of a sequence, at most */
    SHARE_KEYS = 512, /* of a share, at least, or a block of keys a warp */
    SLICE_BYTES = 64 << 20
};

struct index_kernel {
    step_view step;
    plane_view plane;
    view4 q;
    block_index_kernel list; /* what the prefill's lists take: the rule, where lists are written */
    int32_t heads, tokens;   /* of a block's rows */
    int32_t chunks, shares;  /* blocks of the heads that share keys; shares at most */
    int64_t first, rows;     /* rows of the call that the slice at hand has */
    float *scores;           /* [rows][lists][width] */
    int64_t width;
    bool q_wide, wide; /* rows of q, of keys can be read 16 bytes at a time */
    int32_t *status;
};

/* A row of the call. position -1: its sequence's numbers cannot be followed, it has no candidates. */
struct index_query {
    int b;
    int64_t position, left; /* left: rows of its sequence from it on, in the slice */
    int64_t before;         /* and before it */
};

/* That of row t of the call; false: it belongs to no sequence. A warp calls. */
__device__ __forceinline__ bool find_query(const index_kernel &a, int64_t t, index_query *q)
{
    q->b = step_sequence_of(a.step, t);
    if (q->b < 0) return false;
    const step_rows r = step_rows_at(a.step, q->b);
    const bool good = r.first >= 0 && plane_holds(a.plane, r.first + r.count, r.count, 0, 0);
    const int64_t from = r.row > a.first ? r.row : a.first, last = a.first + a.rows,
                  end = r.row + r.count < last ? r.row + r.count : last;
    q->position = good ? r.first + t - r.row : -1;
    q->left = end - t;
    q->before = t - from;
    return true;
}

/* What the list of a token at `position` chooses from. */
__device__ __forceinline__ index_contest contest_at(const index_kernel &a, int64_t position)
{
    const sequence seen = {0, 0, 0, position + 1, 0, position + 1};
    return index_contest_of(a.list, seen, position);
}

typedef quern_status instance(const stage_exec *exec, const index_kernel &a, const launcher &to);
instance index_f32, index_bf16_64, index_bf16_128, index_bf16_256, index_f16_64, index_f16_128, index_f16_256;
/* Chooses the lists of the slice's rows by their scores. */
quern_status index_choose(const stage_exec *exec, const index_kernel &a);

} // namespace index_decode

#endif
