/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plan.cuh - what Hopper's kernels of the indexer walk: items, each a tile of queries and a share of the keys
 * that it sees, and how these stand in memory.
 *
 * Where tiles are few, keys are cut into shares by what the last query of a tile sees, so that all
 * multiprocessors have items. Each share's best of a query go to memory, and merge.cu chooses among them.
 * Neither a score's bits nor the choice depend on the cut, which follows from shapes alone.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_PLAN_PLAN_CUH
#define QUERN_CUDA_INDEXER_SM90_PLAN_PLAN_CUH

#include "common/scan.cuh"
#include "hopper/tma.cuh"
#include "indexer/params.cuh"

namespace sm90_indexer
{

enum {
    HEADS = 64,
    WIDTH = 128,
    MOST_QUERIES = 4, /* of a tile */
    KEYS = 128,       /* of a stage */
    SHARE_LEAST = 1024,
    MOST_CHOSEN = 2048 /* of the longest list */
};

/* How the keys stand, and into how many shares they are cut at most. */
struct key_cut {
    int32_t run_shift; /* a copy takes 2^run_shift rows, at most KEYS: a page, or a part of it */
    bool planar;       /* bytes: a page's codes stand before its scales */
    int32_t shares;    /* 1: lists go to the results */
};
/* What the feed of a kernel reads. */
struct plan {
    index_kernel a;
    key_cut cut;
    int32_t items;
    CUtensorMap map; /* of rows of 16 bits */
};
/* Lists of the shares: [B, T, shares, k]; rank 0: no entry. */
struct share_lists {
    uint32_t *rank;
    int32_t *index;
};

enum { SCALE_BYTES = 4 };
/* Bytes of a row's codes. */
__host__ __device__ constexpr int codes_of(entry_format format)
{
    return format == ENTRY_FP4 ? WIDTH / 2 : WIDTH;
}

__device__ __forceinline__ int share_keys(int seen, int shares)
{
    if (shares == 1) return seen;
    const int keys = ((seen + shares - 1) / shares + KEYS - 1) / KEYS * KEYS;
    return keys < SHARE_LEAST ? SHARE_LEAST : keys;
}

/* Keys from `key` on; stages 0: there are none. seen: keys that the tile's last query sees. */
struct item_of {
    int b, query, key, stages, share, seen, sequence;
};
/* Of Q queries a tile; the last queries, which see the most, come first. */
template <int Q> __device__ __forceinline__ item_of item_at(const plan &p, int item)
{
    const index_kernel &a = p.a;
    const key_cut &f = p.cut;
    const int groups = (a.queries + Q - 1) / Q, all = groups * a.batch,
              share = f.shares == 1 ? 0 : item / all, rest = item - share * all, group = rest / a.batch;
    item_of x = {rest - group * a.batch, (groups - 1 - group) * Q, 0, 0, share};
    x.sequence = index_sequence(a, x.b);
    const int seen = index_seen(a, x.b, x.query + Q < a.queries ? x.query + Q - 1 : a.queries - 1),
              keys = share_keys(seen, f.shares);
    x.key = share * keys;
    x.seen = seen;
    if (x.key < seen) x.stages = ((seen - x.key < keys ? seen - x.key : keys) + KEYS - 1) / KEYS;
    return x;
}

/* What a block takes, one item after the other, of Q queries a tile. */
template <int Q> struct block_items {
    int item = (int)blockIdx.x;

    __device__ __forceinline__ block_items(const plan &) {}
    /* False: there are no more. */
    __device__ __forceinline__ bool next(const plan &p, item_of *x)
    {
        for (; item < p.items; item += (int)gridDim.x) {
            *x = item_at<Q>(p, item);
            if (x->stages == 0) continue;
            item += (int)gridDim.x;
            return true;
        }
        return false;
    }
};

/* Of single queries all stages follow one another, and a block has an even share of them; many queries are
 * not cut. A warp calls. */
template <> struct block_items<1> {
    enum { CUT_MOST = 512 };
    int b, from, step; /* the next query, and which of its stages is the first */
    int64_t left;      /* stages that the block takes yet */

    static __device__ __forceinline__ int stages_of(const index_kernel &a, int b)
    {
        return b < a.batch ? (index_place_of(a, b).seen + KEYS - 1) / KEYS : 0;
    }
    __device__ __forceinline__ block_items(const plan &p)
    {
        const index_kernel &a = p.a;
        const int lane = threadIdx.x % 32;
        int64_t all = 0, before = 0;
        b = (int)blockIdx.x;
        from = 0;
        step = (int)gridDim.x;
        left = INT64_MAX;
        if (a.batch > CUT_MOST) return;
        for (int b0 = 0; b0 < a.batch; b0 += 32)
            all += __reduce_add_sync(~0u, (unsigned)stages_of(a, b0 + lane));
        const int64_t first = all * blockIdx.x / gridDim.x;
        left = all * (blockIdx.x + 1) / gridDim.x - first;
        step = 1;
        for (int b0 = 0; b0 < a.batch; b0 += 32) {
            const uint32_t own = (uint32_t)stages_of(a, b0 + lane), upto = sum_to_lane(own);
            const unsigned past = __ballot_sync(~0u, first < before + upto);
            const int owner = past != 0 ? __ffs((int)past) - 1 : 31;
            b = b0 + owner;
            from = (int)(first - before - __shfl_sync(~0u, upto - own, owner));
            if (past != 0) return;
            before += __shfl_sync(~0u, upto, 31);
        }
    }
    __device__ __forceinline__ bool next(const plan &p, item_of *x)
    {
        int stages = 0;
        for (; stages == 0 && left > 0 && b < p.a.batch; b += step, from = 0) {
            const index_place place = index_place_of(p.a, b);
            const int all = (place.seen + KEYS - 1) / KEYS - from;
            stages = all < left ? all : (int)left;
            *x = {b, 0, from * KEYS, stages, 0, place.seen, place.sequence};
        }
        if (step == 1) left -= stages;
        return stages > 0;
    }
};

/* A query's list of a share. */
__device__ __forceinline__ int64_t list_at(const plan &p, int b, int query, int share)
{
    return (((int64_t)b * p.a.queries + query) * p.cut.shares + share) * p.a.k;
}

/* Stores it; by one warp. */
__device__ __forceinline__ void store_share(const plan &p, const share_lists &lists, const item_of &x,
                                            int query, const best_list &best)
{
    const int64_t at = list_at(p, x.b, query, x.share);
    for (int i = threadIdx.x % 32; i < p.a.k; i += 32) {
        lists.rank[at + i] = i < best.n ? best.rank[i] : 0;
        lists.index[at + i] = i < best.n ? best.index[i] : -1;
    }
}

/* Queries of a sequence; a varlen batch is one of single queries. */
static inline int64_t queries_of(const indexer_args *args)
{
    return present(args->cu) ? 1 : args->q.shape[1];
}
/* Sets p's items, of Q queries a tile; returns the blocks that walk them. */
template <int Q> static inline unsigned set_items(const stage_exec *exec, plan *p)
{
    p->items = (int32_t)((p->a.queries + Q - 1) / Q * (int64_t)p->a.batch * p->cut.shares);
    return (unsigned)(p->items < exec->multiprocessors ? p->items : exec->multiprocessors);
}
/* By how many shares a tile's keys are cut, by shapes alone, as is the workspace. */
int shares_of(const stage_exec *exec, const indexer_args *args);
/* Whether Hopper's kernels take a call. */
bool sm90_takes(const stage_exec *exec, const indexer_args *args);
/* A call's plan, whose varlen batch, if it is one, is spread to `spread` (params.cuh). */
quern_status make_plan(const stage_exec *exec, const indexer_args *args, void *spread, plan *p);
quern_status merge_shares(const stage_exec *exec, const plan &p, const share_lists &lists);

} // namespace sm90_indexer

#endif
