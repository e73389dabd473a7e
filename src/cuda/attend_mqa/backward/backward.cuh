/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.cuh - what the backward kernels of attention whose heads share their keys have in common. With
 * lse' = log(e^lse + e^sink), P = e^(scale S - lse') and dO rotated to the query's position:
 *
 *   delta = rowsum(dO o O);  dS = scale P o (dO K^T - delta);  dQ = dS K;  dK = P^T dO + dS^T Q;
 *   dsink = -sum e^(sink - lse') delta
 *
 * A call is cut into slices of queries (slices.cu). Of each slice:
 *
 *   plan         the forward's: which rows a query sees
 *   statistics   lse' and delta of its heads (statistics.cu)
 *   ranks        how many of the slice's queries before a query chose the same entry (ranks.cu)
 *   pairs        an item is a query and a group of its heads. It owns its dQ and writes what it adds to dK of
 *                each of its keys as a row of partials (any_backward, sm90_backward)
 *   sums         adds the partials of each row of keys in the order of the queries (sums.cu)
 *
 * Raw rows' partials stand query by query. Those of an entry stand together: its first row, plus the rank. So
 * each is written once and read once, and no sum depends on the order in which blocks run. Partials are in
 * the activations' dtype, as P and dS are: their rounding is as large as that of these.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_BACKWARD_CUH
#define QUERN_CUDA_ATTEND_MQA_BACKWARD_CUH

#include "attend_mqa/params.cuh"
#include "common/choices.cuh"

/* Of a query's head. lse2: lse' in powers of two, + inf: P is 0; scale: of dS, 0 where the head sees one key
 * and no sink; sink: its share of -dsink. */
struct mqa_head {
    float lse2, delta, scale, sink;
};

struct mqa_backward {
    mqa_kernel of; /* of the slice's queries */
    view4 d_o, d_q;
    bool d_o_wide, d_q_wide;
    mqa_head *heads; /* [queries][heads] */
    choice *choices; /* [entries of the slice's sequences][words] */
    int32_t *first;  /* of the entry's partials */
    int32_t *taken;  /* partials of entries so far */
    int32_t words, groups, raw_most;
    int64_t sequence0, entry_rows; /* the slice's first sequence; entries of a sequence */
    void *partials;                /* [rows][groups][dim] */
    bool raw_wanted, entries_wanted;
};

/* Which entry of the slice's sequences is entry `found` of a query. */
__device__ __forceinline__ int64_t mqa_entry_of(const mqa_backward &b, const mqa_query &q, int found)
{
    return (q.sequence - b.sequence0) * b.entry_rows + found;
}

/* The row of partials of key `key` of a query, which is row `found` of its source; -1: none is wanted. */
__device__ __forceinline__ int mqa_partial_of(const mqa_backward &b, const mqa_query &q, int query, bool raw,
                                              int key, int found)
{
    if (found < 0 || !(raw ? b.raw_wanted : b.entries_wanted)) return -1;
    if (raw) return query * b.raw_most + key;
    const int64_t entry = mqa_entry_of(b, q, found);
    const int2 x = __ldg((const int2 *)b.choices + entry * b.words + query / 32);
    const int raw_rows = b.raw_wanted ? b.of.rows * b.raw_most : 0;
    return raw_rows + __ldg(b.first + entry) + x.y + __popc((uint32_t)x.x & ((1u << query % 32) - 1));
}

/* Rotates the last channels of ROWS rows in a tile to a query's position; thread `thread` of `threads`. */
template <typename T, typename A, int ROWS>
__device__ __forceinline__ void mqa_rotate_rows(const mqa_kernel &a, char *tile, int position, int thread,
                                                int threads)
{
    const mqa_rotation &r = a.rotation;
    const A *const cosine = (const A *)r.table + position * r.row, *const sine = cosine + r.dim / 2;
    const int pairs = r.dim / 2, first = a.dim - r.dim;
#pragma unroll 1
    for (int i = thread; i < ROWS * pairs; i += threads) {
        const int row = i / pairs, pair = i - row * pairs, c = first + pair * 2;
        uint32_t *const at = (uint32_t *)(tile + tile_at<ROWS>(row, c / 8) + c % 8 * 2);
        const float2 x = unpack2<T>(*at);
        const float cos = to_float<A>(cosine[pair]), sin = to_float<A>(sine[pair]);
        *at = pack2<T>(x.x * cos - x.y * sin, x.x * sin + x.y * cos);
    }
}
template <typename T, int ROWS>
__device__ __forceinline__ void mqa_rotate(const mqa_kernel &a, char *tile, int position, int thread,
                                           int threads)
{
    if (a.rotation.dim == 0) return;
    if (a.rotation.dtype == QUERN_F32) mqa_rotate_rows<T, float, ROWS>(a, tile, position, thread, threads);
    else mqa_rotate_rows<T, T, ROWS>(a, tile, position, thread, threads);
}

/* What the sums of a slice need besides. Of a sequence that is cut, raw rows that later queries see are
 * carried on in f32, and all entries. */
struct mqa_sums {
    mqa_backward b;
    int64_t n_q, n_kv, window;
    int64_t first, end;     /* the slice's queries, in the sequence that is cut; else its sequences' */
    int64_t raw0, raw_rows; /* the slice's raw rows, from raw0 on */
    int64_t entry_rows;     /* the entries of all its sequences */
    bool cut, begins, ends; /* the slice begins, ends its sequence */
    view3 d_kv, d_entries;  /* `p` is in fact of the activations' dtype, or f32: */
    bool wide_kv, wide_entries;
    const float *carried;   /* [raw_most][dim] */
    float *carry, *entries; /* [raw_most][dim]; [entry_rows][dim] */
};

quern_status mqa_head_statistics(cudaStream_t stream, const mqa_backward &b, quern_dtype dtype);
quern_status mqa_sink_sums(cudaStream_t stream, const mqa_backward &b, double *sums, float *d_sink,
                           bool begins, bool ends);
quern_status mqa_rank_choices(cudaStream_t stream, const mqa_backward &b, int64_t entries);
quern_status mqa_sum_partials(cudaStream_t stream, const mqa_sums &s, quern_dtype dtype);

/* Launches the pairs of a slice. */
typedef quern_status mqa_pairs(const stage_exec *exec, const mqa_backward &b);

/* Whether the backward takes a call; its workspace and run with items of `heads` heads. */
bool mqa_backward_takes(const attend_mqa_args *args, char why[STAGE_WHY_BYTES]);
size_t mqa_backward_bytes(const attend_mqa_args *args, int heads);
quern_status mqa_backward_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace, int heads,
                              mqa_pairs *pairs);

#endif
