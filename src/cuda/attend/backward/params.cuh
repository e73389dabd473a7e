/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the two kernels of attention's backward for bf16 and f16 share. */
#ifndef QUERN_CUDA_ATTEND_BACKWARD_PARAMS_CUH
#define QUERN_CUDA_ATTEND_BACKWARD_PARAMS_CUH

#include "attend/attend.cuh"

#include <math.h>

enum { BACKWARD_STEP = 64 }; /* keys or rows that a block takes at a time */

/* Writes args->delta anew where o's rounding spoils it (delta.cu says where), before the two read
 * it. */
quern_status attend_backward_delta(const attend_args *args, const attend_launch &l, cudaStream_t stream);

/* dK and dV by pieces of `keys` keys (any GPU's kernels: backward_keys(args)), or by listed blocks: how many;
 * into how many shares each range's rows are cut, and whether the first may be short; bytes of the shares'
 * partial gradients; their sum, after the kernels that write them. */
int backward_keys(const attend_args *args);
int64_t backward_pieces(const attend_args *args, int keys);
int backward_splits(const attend_args *args, int keys);
bool backward_short_first(const attend_args *args, int keys);
size_t backward_shares_bytes(const attend_args *args, int keys);
quern_status backward_sum_shares(const attend_args *args, const attend_launch &l, cudaStream_t stream);

/* What every backward in 16 bits does before its kernels, and after them: delta, the inverted index, room for
 * shares, which starts at a->part; the sum of the shares, the rows past the last sequence. */
quern_status backward_begin(const stage_exec *exec, const attend_args *args, int keys, void *workspace,
                            attend_launch *l);
quern_status backward_end(const stage_exec *exec, const attend_args *args, const attend_launch &l);
/* Sequences as pieces of keys, and back. */
__device__ __forceinline__ seqs by_key(const seqs &s)
{
    return {s.batch, s.n_kv, s.n_q, s.cu_kv != NULL ? s.cu_kv : s.cu_q, s.cu_q};
}

__device__ __forceinline__ sequence flip(const sequence &s)
{
    return {s.b, s.view_b, s.k0, s.nk, s.q0, s.nq};
}

/* The first query in [0, nq] for which `seen` holds; seen is false, then true. */
template <typename F> __device__ __forceinline__ int first_query(int64_t nq, F seen)
{
    int64_t lo = 0, hi = nq;
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if (seen(mid)) hi = mid;
        else lo = mid + 1;
    }
    return (int)lo;
}

/* Tiles of BACKWARD_STEP queries of a sequence. */
struct tile_range {
    int from, to;
};

/* Those that see some of the keys from `first` to `last`: whatever the mask, they are consecutive. */
__device__ __forceinline__ tile_range tiles_that_see(const attend_kernel &a, const sequence &seq, int first,
                                                     int last)
{
    int from, to, other;
    key_queries(a, seq, first, &from, &other);
    key_queries(a, seq, last, &other, &to);
    return {from < seq.nq ? from / BACKWARD_STEP : INT32_MAX, (to + BACKWARD_STEP - 1) / BACKWARD_STEP};
}

/* With tiles_shared: the first tile of a share, for pieces of `keys` keys. With short_first the first shares
 * are short. They come last, so all blocks of threads end at about the same time. No product is fused with a
 * sum: whoever asks gets the same. */
__device__ __forceinline__ int share_start(const attend_kernel &a, const sequence &seq, int keys, int share)
{
    const int tiles = ((int)seq.nq + BACKWARD_STEP - 1) / BACKWARD_STEP,
              pieces = ((int)seq.nk + keys - 1) / keys;
    const float at = __fdiv_rn((float)share, (float)a.splits),
                even = a.short_first && pieces > 2 ? __fdiv_rn(2.0f, (float)pieces) : 1.0f;
    const float part = __fmul_rn(at, __fadd_rn(even, __fmul_rn(1.0f - even, __fmul_rn(at, at))));
    return share < a.splits ? (int)__fmul_rn((float)tiles, part) : tiles;
}

/* The tiles of a share among those that see a piece. */
__device__ __forceinline__ tile_range tiles_of_share(const attend_kernel &a, const sequence &seq, int keys,
                                                     const tile_range &seen, int share)
{
    return {max(seen.from, share_start(a, seq, keys, share)),
            min(seen.to, share_start(a, seq, keys, share + 1))};
}

/* A row's lse in the exp2 domain; +inf for a row without keys. */
__device__ __forceinline__ float exp2_lse(float lse)
{
    return lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
}

/* The forward's lse in the exp2 domain, delta and row_scale of one row. */
__device__ __forceinline__ void row_statistics(const attend_kernel &a, const sequence &seq, int64_t n,
                                               int64_t head, float *lse2, float *delta, float *row_scale)
{
    *lse2 = exp2_lse(a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]]);
    *delta = a.delta.p[seq.view_b * a.delta.s[0] + head * a.delta.s[1] + n * a.delta.s[2]];
    *row_scale =
        a.row_scale.p == NULL
            ? 1.0f
            : a.row_scale.p[seq.view_b * a.row_scale.s[0] + head * a.row_scale.s[1] + n * a.row_scale.s[2]];
}

/* A zero as + 0: the sign of the products may come from a row that is not seen, by a factor of 0. */
template <typename T>
__device__ __forceinline__ void store_pair(void *base, int64_t at, float x, float y, bool f32, bool add)
{
    x += 0.0f;
    y += 0.0f;
    if (f32) {
        float *p = (float *)base + at;
        p[0] = add ? p[0] + x : x;
        p[1] = add ? p[1] + y : y;
    } else {
        T *p = (T *)base + at;
        p[0] = from_float<T>(x);
        p[1] = from_float<T>(y);
    }
}

#endif
