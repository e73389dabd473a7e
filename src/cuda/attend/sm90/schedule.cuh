/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * schedule.cuh - the pieces of the Hopper attention kernels (hopper/schedule.cuh): their rows
 * (attend/attend.cuh), and which key slots they walk. One warp plans and writes a piece to shared memory for
 * the others.
 *
 * A piece is up to M / hs queries with their hs heads, so that its rows are one box of Q. Pieces are numbered
 * section after section of SECTION units, whose keys and values L2 serves to many blocks at once, and in a
 * section the longest causal ones of all units first, so that short ones fill what is left at the end.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_SCHEDULE_CUH
#define QUERN_CUDA_ATTEND_SM90_SCHEDULE_CUH

#include "attend/attend.cuh"
#include "hopper/schedule.cuh"

enum { SECTION = 8 };

struct work_plan {
    int32_t pieces, total; /* of a unit, of all */
    int32_t queries;       /* of a piece, at most */
    int32_t per_tile;      /* listed: pieces of a tile of queries */
    int32_t box;           /* keys of a bulk copy */
    int32_t *taken;        /* pieces taken beyond each block's first; NULL: every block has one at most */
};

/* A piece, of one sequence: `view` in dim 0 of the views, rows q0 ... and k0 ... in dim 1. */
struct work {
    int32_t view, q0, nq, k0, nk;
    int32_t unit, kvh, head0;
    int32_t query, queries; /* the first, and how many; 0: no piece */
    int32_t base, slots;    /* the first key (range); slots, 0: no row sees a key */
    int32_t lo, hi;         /* keys that every row sees: [lo, hi); of a clean list the slots [0, hi) */
    int32_t end;            /* no row sees keys at or past it */
    int32_t list_row;
};

__device__ __forceinline__ sequence sequence_of(const work &w)
{
    return {0, w.view, w.q0, w.nq, w.k0, w.nk};
}

/* Pieces of at most `rows` rows, tiles of `keys` keys; of no tile of queries but one where `listed`. */
static inline work_plan work_plan_of(const attend_args *args, const attend_kernel &a, bool listed, int rows,
                                     int keys)
{
    work_plan plan = {0, 0, rows / a.hs, 1, keys, NULL};
    if (listed) {
        if (plan.queries > a.tile) plan.queries = a.tile;
        plan.per_tile = (a.tile + plan.queries - 1) / plan.queries;
        plan.box = 16;
        while (plan.box < keys && a.list_block % (2 * plan.box) == 0) plan.box *= 2;
    }
    plan.pieces = (int32_t)(piece_bound(args->seqs, listed ? a.tile : plan.queries, 1) * plan.per_tile);
    plan.total = plan.pieces * a.units;
    return plan;
}

/* A plan's divisors, where sections have `section` units. */
static inline work_divisions divisions_of(const attend_kernel &a, const work_plan &plan, int section,
                                          bool listed)
{
    const int32_t queries = listed ? a.tile : plan.queries, n = (int32_t)a.sq.n_q,
                  per = (n + queries - 1) / queries, last = a.units % section;
    const auto by = [](int32_t d) { return fast_div_by((uint32_t)(d > 0 ? d : 1)); };
    return {by(plan.pieces * section),
            by(section),
            by(last),
            by(plan.per_tile),
            by(a.tile),
            by(a.group),
            by(per)};
}

/* Fills in piece `index`: 0 queries where a varlen batch has no such piece. SHARED: a piece has several
 * tiles, list_row is the first one's, and a section is one unit, whose keys all find room in L2, or as many
 * as UNITS says. Without KEYS it leaves out which keys the rows see, but sets the number of their sequence.
 * All lanes of the warp call. */
template <bool LISTED, bool SHARED = false, int UNITS = SHARED ? 1 : SECTION, bool KEYS = true,
          typename DIV = plain_divisions>
__device__ __forceinline__ void find_work(const attend_kernel &a, const work_plan &plan, int32_t index,
                                          work *w, int32_t *number = NULL, const DIV &by = {})
{
    w->queries = w->slots = 0;
    const int32_t unit0 = by.section(index, plan.pieces * UNITS) * UNITS,
                  width = a.units - unit0 < UNITS ? a.units - unit0 : UNITS;
    const int32_t in_section = index - unit0 * plan.pieces, before = by.units(in_section, width),
                  u = unit0 + in_section - before * width, piece = plan.pieces - 1 - before;
    const int32_t tile = LISTED ? by.part(piece, plan.per_tile) : piece;
    int32_t query, tiles;
    if (!find_piece(a.sq, tile, LISTED ? a.tile : plan.queries, w, &query, a.tile, SHARED ? &tiles : NULL,
                    number, by))
        return;
    if (SHARED) w->list_row = tiles + by.tile(query, a.tile);
    int32_t end = w->nq;
    if (LISTED) {
        w->list_row = a.sq.cu_q == NULL ? by.tile(query, a.tile) : tile;
        if (end - query > a.tile) end = query + a.tile;
        query += (piece - tile * plan.per_tile) * plan.queries;
    }
    if (query >= end) return;
    const bool by_head = a.units == a.heads;
    w->unit = u;
    w->kvh = by_head ? by.head(u, a.group) : u;
    w->head0 = by_head ? u : u * a.group;
    w->query = query;
    w->queries = end - query < plan.queries ? end - query : plan.queries;
    if (!KEYS) return;
    int last_hi;
    row_keys(a, sequence_of(*w), query, &w->base, &w->hi);
    row_keys(a, sequence_of(*w), query + w->queries - 1, &w->lo, &last_hi);
    w->slots = last_hi > w->base ? last_hi - w->base : 0;
    w->end = last_hi;
}

/* Copies a list into `clean`, ascending and without padding, repeats and blocks that start at or past key
 * `end`; returns how many are left. One warp calls; `scratch` has room for k. */
__device__ __forceinline__ int clean_by_warp(const int32_t *list, int k, int block, int end, int32_t *clean,
                                             int32_t *scratch)
{
    const int lane = threadIdx.x & 31;
    uint32_t again = 0; /* bit j: entry 32 j + lane stands before, too */
    int kept = 0;
    __syncwarp();
    for (int e = lane; e < k; e += 32) {
        const int32_t x = list[e];
        scratch[e] = x >= 0 && (int64_t)x * block < end ? x : INT32_MAX;
    }
    __syncwarp();
    for (int e = lane; e < k; e += 32) {
        const int32_t mine = scratch[e];
        bool found = false;
        for (int i = 0; i < e; i++) found = found || scratch[i] == mine;
        again |= (uint32_t)found << (e >> 5);
    }
    __syncwarp();
    for (int e = lane; e < k; e += 32)
        if (again >> (e >> 5) & 1) scratch[e] = INT32_MAX;
    __syncwarp();
    for (int e0 = 0; e0 < k; e0 += 32) {
        const int32_t mine = e0 + lane < k ? scratch[e0 + lane] : INT32_MAX;
        int at = 0;
        for (int i = 0; i < k; i++) at += scratch[i] < mine;
        if (mine != INT32_MAX) clean[at] = mine;
        kept += __popc(__ballot_sync(~0u, mine != INT32_MAX));
    }
    __syncwarp();
    return kept;
}

/* The tiles of KEYS slots whose every key is seen by every row: [from, to). */
struct seen_tiles {
    int from, to;
};

template <int KEYS, bool LISTED> __device__ __forceinline__ seen_tiles find_seen(const work &w)
{
    if (LISTED) return {0, w.hi / KEYS};
    const int end = w.hi - w.base < w.slots ? w.hi - w.base : w.slots;
    return {(w.lo - w.base + KEYS - 1) / KEYS, end > 0 ? end / KEYS : 0};
}

__device__ __forceinline__ bool tile_seen(const seen_tiles &seen, int t)
{
    return t >= seen.from && t < seen.to;
}

#endif
