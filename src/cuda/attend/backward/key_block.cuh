/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* key_block.cuh - the keys of a block of the kernels for dK and dV, and its share of the rows that see them.
 */
#ifndef QUERN_CUDA_ATTEND_BACKWARD_KEY_BLOCK_CUH
#define QUERN_CUDA_ATTEND_BACKWARD_KEY_BLOCK_CUH

#include "attend/backward/params.cuh"

/* The keys and the share of rows that a block works on. */
struct key_block {
    sequence seq;
    int kvh, key0, key_end, block; /* block: listed */
    int index;                     /* in the inverse index */
    int share, shares;
    int64_t slot; /* of the partial sums, shares > 1 */
    int offset;   /* of key0 in the slot */
};

/* Piece `piece` of `keys` keys of a range. */
__device__ __forceinline__ bool find_range(const attend_kernel &a, int64_t piece, int64_t pieces, int keys,
                                           key_block *b)
{
    sequence flipped;
    int64_t key0;
    if (!piece_at(by_key(a.sq), piece, keys, 1, &flipped, &key0)) return false;
    b->seq = flip(flipped);
    b->kvh = blockIdx.y;
    b->key0 = (int)key0;
    b->key_end = (int)(key0 + keys < b->seq.nk ? key0 + keys : b->seq.nk);
    b->share = blockIdx.z;
    b->shares = a.splits;
    b->slot = ((int64_t)blockIdx.y * pieces + piece) * a.splits;
    b->offset = 0;
    return true;
}

/* The listed block at `place` of the tables, which order them by (view, key/value head, index). */
__device__ __forceinline__ bool find_block(const attend_kernel &a, int64_t place, key_block *b)
{
    const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1, pair = place / capacity,
                  view = pair / a.kv_heads;
    int64_t seq = view, index = place - pair * capacity;
    b->index = (int)index;
    if (a.sq.cu_q != NULL) { /* the last sequence whose blocks start at or before it */
        const int32_t *cu = by_key(a.sq).cu_q;
        int64_t lo = 0, hi = a.sq.batch;
        while (hi - lo > 1) {
            const int64_t mid = (lo + hi) / 2;
            if (cu_seqlens_at(cu, mid, a.sq.n_kv) / a.list_block + mid <= index) lo = mid;
            else hi = mid;
        }
        seq = lo;
        index -= cu_seqlens_at(cu, lo, a.sq.n_kv) / a.list_block + lo;
    }
    b->seq = sequence_at(a.sq, seq);
    b->kvh = (int)(pair - view * a.kv_heads);
    b->block = (int)index;
    if (index < 0 || index * a.list_block >= b->seq.nk) return false;
    b->key0 = (int)index * a.list_block;
    b->key_end = (int64_t)b->key0 + a.list_block < b->seq.nk ? b->key0 + a.list_block : (int)b->seq.nk;
    b->shares = a.item_start[place + 1] - a.item_start[place];
    b->slot = a.slot_start[place];
    return true;
}

/* The item of block blockIdx.x (BY_ROWS: in the order of item_at, where there is one), its keys
 * blockIdx.z * KT ... */
template <int KT, bool BY_ROWS = false>
__device__ __forceinline__ bool find_item(const attend_kernel &a, int64_t places, key_block *b)
{
    int item = blockIdx.x;
    int64_t lo = 0, hi = places;
    if (places == 0 || item >= a.item_start[places]) return false;
    if (BY_ROWS && a.item_at != NULL) item = a.item_at[item];
    while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (a.item_start[mid] <= item) lo = mid;
        else hi = mid;
    }
    if (!find_block(a, lo, b)) return false;
    b->share = item - a.item_start[lo];
    b->slot += b->share;
    b->offset = (int)blockIdx.z * KT;
    b->key0 += b->offset;
    if (b->key0 + KT < b->key_end) b->key_end = b->key0 + KT;
    return b->key0 < b->key_end;
}

#endif
