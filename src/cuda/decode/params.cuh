/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - dense attention of a step's tokens over their pages: how a call is cut.
 *
 * A block takes one query, up to ROWS of the heads that share a key/value head, and a share of the keys.
 * A sequence with at most STEP_QUERIES tokens in the call is cut into at most SHARES shares of SHARE_KEYS
 * keys or more, by the number of keys that the query sees alone, so its bits are those of any other batch.
 * Shares write their maximum, sum and values to the workspace; combine.cu adds them in order. More tokens
 * fill the machine by themselves.
 */
#ifndef QUERN_CUDA_DECODE_PARAMS_CUH
#define QUERN_CUDA_DECODE_PARAMS_CUH

#include "decode/walk.cuh"

namespace decode_dense
{

enum { STEP_QUERIES = 8, SHARES = 32, SHARE_KEYS = 512 };

struct dense_kernel {
    step_view step;
    plane_view plane;
    view4 q, o;
    view3 lse;
    const float *sink;
    int64_t window;
    float scale2;
    int32_t heads, group, chunks; /* query heads; those of a key/value head; blocks of these */
    int32_t shares;               /* at most */
    bool by_sequence;             /* parts are numbered by sequence, as rows are many */
    bool q_wide, o_wide;
    float *values; /* [part][Dv] */
    float2 *sums;  /* [part]: maximum, sum */
    int32_t *status;
};

/* How n keys, from `start` on, are cut. */
struct cut {
    int64_t per;
    int32_t shares;
};
__host__ __device__ __forceinline__ cut cut_of(int64_t n)
{
    int64_t shares = (n + SHARE_KEYS - 1) / SHARE_KEYS;
    if (shares < 1) shares = 1;
    if (shares > SHARES) shares = SHARES;
    const int64_t per = ((n + shares - 1) / shares + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK;
    return {per, n > 0 ? (int32_t)((n + per - 1) / per) : 1};
}

/* A query of the step: its sequence, its keys, and its row among those that have parts. */
struct dense_query {
    int b;
    bool good; /* false: its sequence's numbers cannot be followed, it sees no key */
    decode_walk::range_keys keys;
    int64_t n; /* slots */
    cut parts;
    int64_t row;
};

/* That of row t of the call. False: it belongs to no sequence. A warp calls. */
__device__ __forceinline__ bool find_query(const dense_kernel &a, int64_t t, dense_query *q)
{
    q->b = step_sequence_of(a.step, t);
    if (q->b < 0) return false;
    const step_rows r = step_rows_at(a.step, q->b);
    const int64_t i = t - r.row, position = r.first + i;
    q->good = r.first >= 0 && plane_holds(a.plane, r.first + r.count, r.count, 0, 0);
    q->keys = decode_walk::range_of(q->good ? mask_window_first(position, a.window) : 0,
                                    q->good ? position + 1 : 0);
    q->n = q->keys.end - q->keys.start;
    q->parts = r.count <= STEP_QUERIES ? cut_of(q->n) : cut{q->n, 1};
    q->row = a.by_sequence ? q->b * (int64_t)STEP_QUERIES + i : t;
    return true;
}

__device__ __forceinline__ int64_t part_at(const dense_kernel &a, const dense_query &q, int head, int share)
{
    return (q.row * a.heads + head) * a.shares + share;
}

typedef quern_status instance(const stage_exec *exec, const dense_kernel &a, const launcher &to);
instance dense_bf16_64, dense_bf16_128, dense_bf16_256, dense_f16_64, dense_f16_128, dense_f16_256;
instance dense_plain_f32, dense_plain_bf16, dense_plain_f16;
quern_status dense_combine(const stage_exec *exec, const dense_kernel &a, int64_t rows, quern_dtype dtype);

} // namespace decode_dense

#endif
