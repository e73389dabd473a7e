/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * schedule.cuh - which work tile a persistent block takes next, and of which sequence it is.
 *
 * A piece (the field's work tile) is what a block computes at once: up to so many queries of one sequence,
 * with heads that share keys. A block begins with the one of its own number and then takes whichever is next,
 * by a counter: no result depends on who computes it.
 */
#ifndef QUERN_CUDA_HOPPER_SCHEDULE_CUH
#define QUERN_CUDA_HOPPER_SCHEDULE_CUH

#include "common/device.cuh"

/* What the numbers of pieces are divided by, as it is, or as the host has prepared it, which takes a tenth of
 * the instructions: pieces of a section and of a tile, units, queries, heads, pieces of a view. */
struct plain_divisions {
    __device__ __forceinline__ int32_t section(int32_t x, int32_t pieces) const { return x / pieces; }
    __device__ __forceinline__ int32_t units(int32_t x, int32_t width) const { return x / width; }
    __device__ __forceinline__ int32_t part(int32_t x, int32_t per_tile) const { return x / per_tile; }
    __device__ __forceinline__ int32_t tile(int32_t x, int32_t queries) const { return x / queries; }
    __device__ __forceinline__ int32_t head(int32_t x, int32_t group) const { return x / group; }
    __device__ __forceinline__ int32_t view(int32_t x, int32_t n, int32_t queries) const
    {
        return x / ((n + queries - 1) / queries);
    }
};

struct work_divisions {
    fast_div by_section, by_units, by_last_units, by_part, by_tile, by_head, by_view;
    __device__ __forceinline__ int32_t section(int32_t x, int32_t) const { return of(x, by_section); }
    __device__ __forceinline__ int32_t units(int32_t x, int32_t width) const
    {
        return width == (int32_t)by_units.d ? of(x, by_units) : of(x, by_last_units);
    }
    __device__ __forceinline__ int32_t part(int32_t x, int32_t) const { return of(x, by_part); }
    __device__ __forceinline__ int32_t tile(int32_t x, int32_t) const { return of(x, by_tile); }
    __device__ __forceinline__ int32_t head(int32_t x, int32_t) const { return of(x, by_head); }
    __device__ __forceinline__ int32_t view(int32_t x, int32_t, int32_t) const { return of(x, by_view); }
    static __device__ __forceinline__ int32_t of(int32_t x, const fast_div &by)
    {
        return (int32_t)quotient((uint32_t)x, by);
    }
};

/* Sets the sequence of piece `i` of those cut by `unit` queries: its `view` in dim 0 of the views, its nq and
 * nk rows from q0 and k0 on in dim 1. tiles: how many tiles of `tile` queries the sequences before it have;
 * number: the sequence's. All lanes of the warp call. */
template <typename W, typename DIV = plain_divisions>
__device__ __forceinline__ bool find_piece(const seqs &s, int32_t i, int32_t unit, W *w, int32_t *first,
                                           int32_t tile = 0, int32_t *tiles = NULL, int32_t *number = NULL,
                                           const DIV &by = {})
{
    const int32_t n_q = (int32_t)s.n_q, n_kv = (int32_t)s.n_kv, batch = (int32_t)s.batch;
    if (s.cu_q == NULL) {
        const int32_t per = (n_q + unit - 1) / unit, b = by.view(i, n_q, unit);
        *first = (i - b * per) * unit;
        if (tiles != NULL) *tiles = 0; /* of a view of its own */
        if (number != NULL) *number = b;
        w->view = b;
        w->q0 = 0;
        w->nq = n_q;
        w->k0 = 0;
        w->nk = n_kv;
        return b < batch;
    }
    const int32_t *ck = s.cu_kv != NULL ? s.cu_kv : s.cu_q;
    const int lane = threadIdx.x & 31;
    int32_t before = 0; /* tiles, of the sequences lane, lane + 32 ... */
    for (int32_t b0 = 0; b0 < batch; b0 += 32) {
        int32_t n = 0, own_tiles = 0;
        if (b0 + lane < batch) {
            n = (int32_t)(cu_seqlens_at(s.cu_q, b0 + lane + 1, n_q) - cu_seqlens_at(s.cu_q, b0 + lane, n_q));
            if (tiles != NULL && n > 0) own_tiles = (n + tile - 1) / tile;
            n = n > 0 ? (n + unit - 1) / unit : 0;
        }
        int32_t sum = n;
        for (int step = 1; step < 32; step *= 2) {
            const int32_t left = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += left;
        }
        const uint32_t past = __ballot_sync(~0u, i < sum);
        if (past != 0) {
            const int owner = __ffs((int)past) - 1, b = b0 + owner;
            *first = (i - __shfl_sync(~0u, sum - n, owner)) * unit;
            if (number != NULL) *number = b;
            w->view = 0;
            w->q0 = (int32_t)cu_seqlens_at(s.cu_q, b, n_q);
            w->nq = (int32_t)cu_seqlens_at(s.cu_q, b + 1, n_q) - w->q0;
            w->k0 = (int32_t)cu_seqlens_at(ck, b, n_kv);
            w->nk = (int32_t)cu_seqlens_at(ck, b + 1, n_kv) - w->k0;
            w->nk = w->nk > 0 ? w->nk : 0;
            if (tiles != NULL)
                *tiles = (int32_t)__reduce_add_sync(~0u, before + (lane < owner ? own_tiles : 0));
            return true;
        }
        before += own_tiles;
        i -= __shfl_sync(~0u, sum, 31);
    }
    return false;
}

/* The next piece of plan.total that nobody has taken; all lanes of the warp call. plan.taken: those beyond
 * each block's first; NULL: every block has one at most. */
template <typename PLAN> __device__ __forceinline__ int32_t next_piece(const PLAN &plan)
{
    int32_t next = plan.total;
    if (plan.taken != NULL && (threadIdx.x & 31) == 0) next = (int32_t)gridDim.x + atomicAdd(plan.taken, 1);
    return __shfl_sync(~0u, next, 0);
}

#endif
