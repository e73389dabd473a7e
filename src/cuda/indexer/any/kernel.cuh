/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the indexer's scores and choice by mma.sync, on any GPU, any number of heads and channels.
 *
 * A block of four warps owns a query, whose heads stay in shared memory, and walks its keys, 64 a tile, two
 * tiles in shared memory. A warp holds 16 keys as operands (rows of the products) and goes through the heads
 * (columns), so a score is a sum along a row. Warp 0 appends the scores of the tile before to the list while
 * the others begin the next one.
 *
 * Limit: the products; at 64 x 128 a tile takes as long to copy as to multiply once.
 */
#ifndef QUERN_CUDA_INDEXER_ANY_KERNEL_CUH
#define QUERN_CUDA_INDEXER_ANY_KERNEL_CUH

#include "indexer/params.cuh"

namespace any_indexer
{

enum { KEYS = 64, THREADS = 128, ADDED = 256, SPARE = 64, WIDTH_MOST = 256 };

/* What the call decides of shared memory: 16-bit tiles of mma.cuh, `panels` of 64 channels. */
struct layout {
    int panels, heads, room; /* heads: rounded up to 16; room: of a list */
    __host__ __device__ size_t q_bytes() const { return (size_t)panels * heads * 128; }
    __host__ __device__ size_t key_bytes() const { return (size_t)panels * KEYS * 128; }
};

/* Byte offset of a chunk in a tile of `rows` rows. */
__device__ __forceinline__ uint32_t chunk_at(int rows, int row, int chunk)
{
    return (uint32_t)((chunk >> 3) * rows * 128 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4));
}

/* A block's shared memory. Behind it stand two buffers of keys, the query's heads, their weights, and the
 * list. */
struct __align__(128) shared
{
    float scale[2][KEYS], score[2][KEYS]; /* of the buffers */

    __device__ __forceinline__ char *keys(const layout &p, int buffer)
    {
        return (char *)(this + 1) + buffer * p.key_bytes();
    }
    __device__ __forceinline__ char *q(const layout &p)
    {
        return keys(p, 2);
    }
    __device__ __forceinline__ float *w(const layout &p)
    {
        return (float *)(q(p) + p.q_bytes());
    }
    __device__ __forceinline__ best_list list(const layout &p)
    {
        uint32_t *const rank = (uint32_t *)(w(p) + p.heads);
        return {rank, (int32_t *)(rank + p.room), 0, 0};
    }
    static size_t bytes(const layout &p)
    {
        return sizeof(shared) + 2 * p.key_bytes() + p.q_bytes() + (size_t)p.heads * 4 + (size_t)p.room * 8;
    }
};

template <typename T>
__device__ __forceinline__ void load_query(const index_kernel &a, const layout &p, shared &m, int b,
                                           int query)
{
    char *const heads = m.q(p);
    float *const w = m.w(p);
    const T *const q = (const T *)a.q.p + b * a.q.s[0] + query * a.q.s[1];
    for (int i = threadIdx.x; i < p.heads * p.panels * 8; i += THREADS) {
        const int head = i / (p.panels * 8), chunk = i % (p.panels * 8);
        load_chunk16<T>(smem_address(heads), heads, chunk_at(p.heads, head, chunk),
                        q + head * a.q.s[2] + chunk * 8, head < a.heads && chunk * 8 < a.width, a.q_wide);
    }
    for (int h = threadIdx.x; h < p.heads; h += THREADS)
        w[h] = h < a.heads ? index_weight(a, b, query, h) : 0.0f;
}

/* A query that is loaded as bf16 of the nearest codes, whose scales go to the weights; a thread a head. */
static __device__ __noinline__ void round_query(const index_kernel &a, const layout &p, char *q, float *w)
{
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int h = threadIdx.x; h < a.heads; h += THREADS) {
        float most = 0.0f;
        for (int pass = 0; pass < 2; pass++) {
            const float scale = index_round_scale(most);
            for (int c = 0; c < a.width; c += 2) {
                uint32_t *const at = (uint32_t *)(q + chunk_at(p.heads, h, c / 8) + c % 8 * 2);
                const float x = index_finite(a, __uint_as_float(*at << 16)),
                            y = index_finite(a, __uint_as_float(*at & 0xffff0000));
                if (pass == 0) most = fmaxf(most, fmaxf(fabsf(x), fabsf(y)));
                else *at = e4m3_bf16x2(two_e4m3(__fdiv_rn(x, scale), __fdiv_rn(y, scale)), 0);
            }
        }
        w[h] *= index_round_scale(most);
    }
    __syncthreads();
}

/* Keys [first, first + 64) into a buffer; two lanes a row. */
template <typename T>
__device__ __forceinline__ void load_keys(const index_kernel &a, const layout &p, shared &m, int b, int first,
                                          int buffer)
{
    const int row = threadIdx.x / 2, key = first + row, sequence = index_sequence(a, b);
    const bool here = key < a.entries && sequence >= 0 && row_exists(a.keys, sequence, key);
    row_place place = {NULL, NULL};
    if (here) place = row_at(a.keys, sequence, key);
    char *const tile = m.keys(p, buffer);
    const index_scale scale = index_scale_of(a, place.scales);
    for (int chunk = threadIdx.x % 2; chunk < p.panels * 8; chunk += 2) {
        const uint32_t at = chunk_at(KEYS, row, chunk);
        const bool some = here && chunk * 8 < a.width;
        if (a.format == ENTRY_ROWS)
            load_chunk16<T>(smem_address(tile), tile, at, (const T *)place.data + chunk * 8, some,
                            a.keys.wide);
        else *(uint4 *)(tile + at) = some ? index_codes(a, place, chunk * 8, scale) : make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x % 2 == 0)
        m.scale[buffer][row] = (here ? scale.score : NAN) * a.scale; /* NaN: chosen last */
    cp_async_commit();
}

/* The scores of a warp's 16 keys. */
template <typename T>
__device__ __forceinline__ void score_keys(const layout &p, shared &m, int heads_given, int buffer)
{
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16, steps = p.panels * 4;
    const uint32_t q = smem_address(m.q(p)), keys = smem_address(m.keys(p, buffer));
    const float *const weights = m.w(p);
    uint32_t held[WIDTH_MOST / 16][4];
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < WIDTH_MOST / 16; k++)
        if (k < steps) ldmatrix4(held[k], keys + chunk_at(KEYS, row0 + lane % 16, k * 2 + lane / 16));
    for (int head = 0; head < p.heads; head += 16) {
        float c[2][4] = {};
#pragma unroll
        for (int k = 0; k < WIDTH_MOST / 16; k++) {
            if (k >= steps) continue;
            uint32_t heads[4];
            ldmatrix4(heads, q + chunk_at(p.heads, head + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
            mma16816<T>(c[0], held[k], heads[0], heads[1]);
            mma16816<T>(c[1], held[k], heads[2], heads[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = head + i * 8 + lane % 4 * 2;
            const float2 w = *(const float2 *)&weights[column];
#pragma unroll
            for (int h = 0; h < 2; h++) { /* a head that is not there: 0 times infinity would be NaN */
                if (column < heads_given) sum[h] = fmaf(w.x, relu(c[i][h * 2]), sum[h]);
                if (column + 1 < heads_given) sum[h] = fmaf(w.y, relu(c[i][h * 2 + 1]), sum[h]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int key = row0 + lane / 4 + h * 8;
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (lane % 4 == 0) m.score[buffer][key] = sum[h] * m.scale[buffer][key];
    }
}

/* Appends a tile's scores to the list; by warp 0. */
__device__ __forceinline__ void choose(const index_kernel &a, const layout &p, shared &m, best_list &best,
                                       int b, int query, int first, int seen)
{
    float *const scores = a.scores + b * a.scores_row[0] + query * a.scores_row[1];
    if (best.n + KEYS > p.room) best_cut(best, a.k, SPARE);
    for (int i = threadIdx.x; i < KEYS; i += 32) {
        const float score = m.score[first / KEYS & 1][i];
        const bool here = first + i < seen;
        if (a.scores != NULL && here) scores[first + i] = score + 0.0f;
        best_add(best, here, rank_of(score), first + i);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    indexer_any(const __grid_constant__ index_kernel a, const __grid_constant__ layout p)
{
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    best_list best = m.list(p);
    const int b = blockIdx.x / a.queries, query = a.queries - 1 - (blockIdx.x - b * a.queries),
              seen = index_seen(a, b, query), tiles = (seen + KEYS - 1) / KEYS;
    load_query<T>(a, p, m, b, query);
    if (a.rounded) round_query(a, p, m.q(p), m.w(p));
    if (tiles > 0) load_keys<T>(a, p, m, b, 0, 0);
    for (int t = 0; t < tiles; t++) {
        if (t + 1 < tiles) load_keys<T>(a, p, m, b, (t + 1) * KEYS, (t + 1) & 1);
        else cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        score_keys<T>(p, m, a.heads, t & 1);
        __syncthreads();
        if (threadIdx.x < 32) choose(a, p, m, best, b, query, t * KEYS, seen);
    }
    cp_async_wait<0>();
    if (threadIdx.x < 32) index_store(a, b, query, best);
}

static inline layout layout_of(const indexer_args *args)
{
    return {(int)((args->q.shape[3] + 63) / 64), (int)((args->q.shape[2] + 15) / 16 * 16),
            (int)args->idx.shape[2] + ADDED};
}

template <typename T>
static quern_status launch(const stage_exec *exec, const indexer_args *args, const index_kernel &a)
{
    const layout p = layout_of(args);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, indexer_any<T>,
                         dim3((unsigned)a.batch * (unsigned)a.queries), THREADS, shared::bytes(p), "indexer",
                         a, p);
}

typedef quern_status instance(const stage_exec *exec, const indexer_args *args, const index_kernel &a);
instance indexer_bf16, indexer_f16;

} // namespace any_indexer

#endif
