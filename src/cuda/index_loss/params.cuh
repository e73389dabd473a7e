/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the loss of NSA's block indexer, on any GPU. A list's tokens are chosen block by block, so the
 * kernels go by block: an item is up to 128 keys of a block under one list, and walks the queries that chose
 * the block, which an inverted index names in their order. What an item finds for a query lies in the
 * workspace, a part a block of the query's list, until another kernel adds the parts in the order of the
 * blocks. A call goes through the workspace in slices of queries:
 *
 *   weigh    items: maximum and sum of the student's scores, and of the teacher's where lse is not given
 *   settle   parts become lse of each query and head
 *   run      items: T, P, the parts of the loss and of d_q_index; the item's rows of d_keys_index's sums
 *   give     parts become losses and d_q_index
 *
 * Queries are numbered over the batch, and so are rows of keys. Blocks of a sequence follow one another,
 * those of a packed sequence b from its first row / block_size + b on.
 */
#ifndef QUERN_CUDA_INDEX_LOSS_PARAMS_CUH
#define QUERN_CUDA_INDEX_LOSS_PARAMS_CUH

#include "common/choices.cuh"
#include "common/launch.cuh"
#include "common/values.cuh"
#include "stages/mask.h"

namespace index_loss
{

enum { KEYS = 128, THREADS = 256, WARPS = THREADS / 32 };
enum { COARSE_HALF = 4096 }; /* of 16 bits, as ATTEND_LSE_COARSE is of f32 */

struct params {
    seqs sq;
    int64_t batch, all, keys;  /* of views; queries and rows of keys, of all views */
    int64_t lists, group, k;   /* Hs, heads of a list, entries of a list */
    int64_t block_size, query_offset;
    int64_t blocks, subs;      /* of all sequences; items of a block */
    int32_t dim, width;        /* D, D_I */
    bool shared;               /* keys_index */
    float scale2, scale_index2;   /* of powers of 2 */
    float scale_index, lambda;
    quern_dtype dtype;
    view4 q, key, q_index, key_index, d_q_index, d_keys_index;
    view3 lse, row_loss;
    const int32_t *list;
    int64_t list_s[3], loss_rows; /* loss_rows: of row_loss in a view */
    float *loss;
    int32_t *status;

    /* Of the whole call. */
    int32_t *chosen, *count; /* [lists][all][k], ascending, each block once; [lists][all] */
    int32_t *seen;           /* [lists][all]: keys of the list that the query sees */
    int32_t *rows;           /* queries with a key in some list */
    double *losses;          /* [lists][all] */
    float *d_keys;           /* [lists][keys][width], or NULL */

    /* Of a slice: queries [first, first + queries). */
    int64_t first, queries, words;
    choice *choices;                /* [lists][blocks][words] */
    int32_t *start, *items, *taken; /* [lists][blocks]: a block's first entry, how many; all so far */
    int32_t *entries;               /* query * k + place in its list */
    float2 *student, *teacher;      /* [lists][queries][k][subs] and, last, [group]: maximum and sum */
    float *lse_index, *lse_rest;    /* [lists][queries], of powers of 2; what rounding took from it */
    float *lse2;                    /* [lists][queries][group], of powers of 2 */
    uint8_t *idle;                  /* [lists][queries]: one key, so T = P */
    float2 *terms;                  /* as student: sums of T (log T - log P) and of T */
    float *d_q;                     /* [lists][queries][k][subs][width] */
};

/* A query's part of an item. */
__device__ __forceinline__ int64_t part_of(const params &p, int64_t list, int64_t entry, int64_t sub)
{
    return (list * p.queries * p.k + entry) * p.subs + sub;
}

__device__ __forceinline__ bool coarse(const params &p, float lse)
{
    const float size = fabsf(lse);
    return size > (p.dtype == QUERN_F32 ? ATTEND_LSE_COARSE : COARSE_HALF) && size < INFINITY;
}

/* lse of a head as it was handed in; false where it has to be computed. */
__device__ __forceinline__ bool given_lse(const params &p, int64_t query, int64_t head, float *lse)
{
    if (p.lse.p == NULL) return false;
    const int64_t b = p.sq.cu_q != NULL ? 0 : query / p.sq.n_q;
    *lse = p.lse.p[b * p.lse.s[0] + head * p.lse.s[1] + (query - b * p.sq.n_q) * p.lse.s[2]];
    return !coarse(p, *lse);
}

/* The sequence of a query, and its number there; false: of none. */
__device__ __forceinline__ bool query_at(const params &p, int64_t i, sequence *s, int64_t *query)
{
    int64_t b = 0, end = p.sq.batch;
    if (p.sq.cu_q == NULL) b = p.sq.n_q > 0 ? i / p.sq.n_q : 0;
    while (p.sq.cu_q != NULL && end - b > 1) {
        const int64_t middle = (b + end) / 2;
        if (p.sq.cu_q[middle] <= i) b = middle;
        else end = middle;
    }
    if (b >= p.sq.batch) return false;
    *s = sequence_at(p.sq, b);
    *query = p.sq.cu_q == NULL ? i - b * p.sq.n_q : i - s->q0;
    return *query >= 0 && *query < s->nq;
}

/* Keys that a query of a sequence sees: [0, this). */
__device__ __forceinline__ int64_t keys_seen(const params &p, const sequence &s, int64_t query)
{
    const int64_t end = query + (p.query_offset >= 0 ? p.query_offset : s.nk - s.nq) + 1;
    return end < 0 ? 0 : end < s.nk ? end : s.nk;
}

__device__ __forceinline__ int64_t first_block(const params &p, const sequence &s)
{
    return p.sq.cu_q == NULL ? s.b * mask_blocks(p.sq.n_kv, p.block_size) : s.k0 / p.block_size + s.b;
}

/* An item: keys [key0, key0 + keys) of a sequence, and the entries of those that chose them. */
struct item {
    sequence seq;
    int64_t list, sub, key0;
    int32_t keys, count;
    const int32_t *entries;
};

/* False: nothing to do. */
__device__ __forceinline__ bool item_at(const params &p, int64_t index, item *x)
{
    const int64_t sub = index % p.subs, at = index / p.subs, list = at / p.blocks, block = at % p.blocks;
    x->count = p.items[at];
    if (x->count == 0) return false;
    int64_t b = 0, end = p.sq.batch;
    if (p.sq.cu_q == NULL) b = block / mask_blocks(p.sq.n_kv, p.block_size);
    while (p.sq.cu_q != NULL && end - b > 1) {
        const int64_t middle = (b + end) / 2;
        if (first_block(p, sequence_at(p.sq, middle)) <= block) b = middle;
        else end = middle;
    }
    x->seq = sequence_at(p.sq, b);
    x->list = list;
    x->sub = sub;
    const int64_t own = (block - first_block(p, x->seq)) * p.block_size, last = own + p.block_size;
    x->key0 = own + sub * KEYS;
    int64_t left = (last < x->seq.nk ? last : x->seq.nk) - x->key0;
    left = left < 0 ? 0 : left > KEYS ? KEYS : left;
    x->keys = (int32_t)left;
    x->entries = p.entries + p.start[at];
    return true;
}

/* Of a query of the slice: how many of an item's keys it sees. */
__device__ __forceinline__ int item_seen(const params &p, const item &x, int32_t query)
{
    const int64_t own = p.first + query - (p.sq.cu_q == NULL ? x.seq.b * p.sq.n_q : x.seq.q0),
                  seen = keys_seen(p, x.seq, own) - x.key0;
    return (int)(seen < 0 ? 0 : seen < x.keys ? seen : x.keys);
}

/* Element 0 of a row: a query of the slice, or a key of an item, and a head. */
template <typename T>
__device__ __forceinline__ const T *query_row(const params &p, const view4 &v, const item &x, int32_t query,
                                              int64_t head)
{
    const int64_t i = p.first + query - (p.sq.cu_q == NULL ? x.seq.b * p.sq.n_q : 0);
    return (const T *)v.p + x.seq.view_b * v.s[0] + i * v.s[1] + head * v.s[2];
}
template <typename T>
__device__ __forceinline__ const T *key_row(const view4 &v, const item &x, int64_t key, int64_t head)
{
    return (const T *)v.p + x.seq.view_b * v.s[0] + (x.seq.k0 + x.key0 + key) * v.s[1] + head * v.s[2];
}

/* Where the item's key stands in d_keys. */
__device__ __forceinline__ float *sums_row(const params &p, const item &x, int64_t key)
{
    const int64_t row = (p.sq.cu_q == NULL ? x.seq.b * p.sq.n_kv : x.seq.k0) + x.key0 + key;
    return p.d_keys + (x.list * p.keys + row) * p.width;
}

/* The items of a slice, twice: first they weigh. */
typedef quern_status of_items(const params &p, bool weighs, cudaStream_t stream);
of_items tensor_bf16_128, tensor_bf16_256, tensor_f16_128, tensor_f16_256;
of_items plain_bf16, plain_f16, plain_f32;
/* Shared memory of a block of tensor_*. */
size_t tensor_bytes(int32_t dim);

/* Lists ascending, each block once, and the rows that count; then the same of a slice by block. */
quern_status choose_blocks(const params &p, cudaStream_t stream);
quern_status index_slice(const params &p, cudaStream_t stream);
quern_status settle(const params &p, cudaStream_t stream);
quern_status give(const params &p, cudaStream_t stream);
/* After the last slice. */
quern_status finish(const params &p, cudaStream_t stream);

} // namespace index_loss

#endif
