/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk.cuh - what kernels over a cache's pages share: which keys a query sees, the running softmax of a warp,
 * and the sum over a block's warps.
 *
 * All rows of a block are heads of one query that read one key/value head, so they see the same keys and no
 * row has a mask of its own. Keys are slots, WARPS steps of which are taken at a time, a warp each, without a
 * barrier. The warps' sums are added in their order. A walk (tensor/walk.cuh, plain/walk.cuh) has
 *
 *   ROWS, KEYS, DIM        rows of a block; keys of a step; columns, padded
 *   queries, ring          a block's shared memory: the rows of Q, and a warp's keys on their way
 *   load()                 Q's rows into shared memory
 *   run()                  walks slots [0, n) of a plane, adds P V to the warp's sums
 *   store_sums()           the warp's sums into shared memory
 */
#ifndef QUERN_CUDA_DECODE_WALK_CUH
#define QUERN_CUDA_DECODE_WALK_CUH

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/step.cuh"

namespace decode_walk
{

enum { WARPS = 4, THREADS = WARPS * 32 };

/* Keys [lo, end) of a sequence; slot 0 is `start`, a multiple of 16 up to lo, so that a step of 16 slots lies
 * in one page. */
struct range_keys {
    int64_t start, lo, end;
    __device__ __forceinline__ int64_t operator()(int slot) const
    {
        const int64_t key = start + slot;
        return key >= lo && key < end ? key : -1;
    }
};
static __device__ __forceinline__ range_keys range_of(int64_t lo, int64_t end)
{
    return {lo / 16 * 16, lo, end};
}

/* What a walk reads: rows of a head of sequence b. */
struct walk_source {
    const plane_view &plane;
    int64_t b;
    int head;
    int32_t *status;

    template <class Keys> __device__ __forceinline__ plane_row row(const Keys &keys, int slot, int n) const
    {
        const int64_t key = slot < n ? keys(slot) : -1;
        if (key < 0) return {NULL, 0};
        return plane_row_at(plane, b, head, key, status);
    }

    /* The same in two steps, so that a warp does not wait for the table: a key and its page, as the table has
     * it, and the row. */
    struct place {
        int64_t key; /* -1: none */
        int32_t page;
    };
    template <class Keys> __device__ __forceinline__ place find(const Keys &keys, int slot, int n) const
    {
        const int64_t key = slot < n ? keys(slot) : -1;
        const int32_t *const page = key < 0 ? NULL : plane_page(plane, b, (uint32_t)key / CACHE_BLOCK);
        if (page == NULL) return {-1, 0};
        return {key, __ldg(page)};
    }
    __device__ __forceinline__ plane_row row(const place &at) const
    {
        if (at.key < 0) return {NULL, 0};
        return plane_row_in(plane, plane_block_in(plane, at.page, head, status), (uint32_t)at.key);
    }
};

/* The rows of Q that a block takes, in elements. */
template <typename T> struct query_rows {
    const T *q;
    int64_t stride;
    int rows, dim;
    bool wide;
};

/* Scores are not kept. */
struct no_scores {
    __device__ __forceinline__ bool wanted() const { return false; }
    __device__ __forceinline__ void operator()(int, int, float) const {}
};

/* A row's running maximum, in powers of two, after those of a step; *held: the factor of what it has. */
static __device__ __forceinline__ float raise_top(float top, float most, float *held)
{
    const float next = fmaxf(top, most);
    *held = top == -INFINITY ? 0.0f : exp2_fast(top - next);
    return next;
}
static __device__ __forceinline__ float base_of(float top)
{
    return top == -INFINITY ? 0.0f : top;
}

/* A block's shared memory. */
template <class W> struct block_memory {
    union {
        typename W::ring ring[WARPS];
        float o[WARPS][W::ROWS][W::DIM]; /* after the walk */
    };
    typename W::queries q;
    float top[WARPS][W::ROWS], sum[WARPS][W::ROWS];
};

/* A row's maximum and sum over all warps, and the warps' factors. */
struct row_total {
    float top, sum, factor[WARPS];
};
template <class W> static __device__ __forceinline__ row_total total_of(const block_memory<W> &m, int row)
{
    row_total t;
    t.top = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; w++) t.top = fmaxf(t.top, m.top[w][row]);
    t.sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        t.factor[w] = exp2_fast(m.top[w][row] - base_of(t.top));
        t.sum = fmaf(m.sum[w][row], t.factor[w], t.sum);
    }
    return t;
}
template <class W>
static __device__ __forceinline__ float4 total_at(const block_memory<W> &m, const row_total &t, int row,
                                                  int column)
{
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float4 x = *(const float4 *)&m.o[w][row][column];
        all.x = fmaf(x.x, t.factor[w], all.x);
        all.y = fmaf(x.y, t.factor[w], all.y);
        all.z = fmaf(x.z, t.factor[w], all.z);
        all.w = fmaf(x.w, t.factor[w], all.w);
    }
    return all;
}

/* The natural log of a row's sum; what its sum is divided by, as a factor; the same with a sink. */
static __device__ __forceinline__ float lse_of(float top, float sum)
{
    const float ln2 = 0.693147180559945309f;
    return sum == 0.0f ? -INFINITY : (base_of(top) + log2f(sum)) * ln2;
}
static __device__ __forceinline__ float factor_of(float sum, float lse, const float *sink)
{
    const float own = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (sink == NULL || sum == 0.0f) return own;
    return *sink == INFINITY ? 0.0f : own / (1.0f + expf(*sink - lse));
}

/* Four elements of a row; wide: `to` is aligned to all of them. */
template <typename T> static __device__ __forceinline__ void store_four(T *to, const float4 &x, bool wide)
{
    const T y[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z), from_float<T>(x.w)};
    if (wide) {
        if constexpr (sizeof(T) == 4) *(float4 *)to = x;
        else *(uint2 *)to = *(const uint2 *)y;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = y[i];
    }
}

} // namespace decode_walk

#endif
