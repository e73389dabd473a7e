/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the backward of pairs by mma.sync on any GPU.
 *
 * A block of eight warps owns 32 heads of one query and walks its keys, 32 a tile. Warp (r, c) makes S and dP
 * of heads 16 r ... with keys 8 c ..., dQ of heads 16 r ... in panels 2 c and 2 c + 1, and a tile's partials
 * of keys 16 r ... in the same panels. P and then dS pass through one buffer, so that Q, dO and K fit in the
 * shared memory of the smallest GPUs: 3 x 32 KB and 2 KB. dQ and partials take 64 registers each.
 * Limit: the products of the tensor cores, less what five barriers a tile cost and keys that are not
 * fetched ahead.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_ANY_BACKWARD_KERNEL_CUH
#define QUERN_CUDA_ATTEND_MQA_ANY_BACKWARD_KERNEL_CUH

#include "attend_mqa/backward/backward.cuh"

namespace any_mqa_backward
{

enum { HEADS = 32, KEYS = 32, PANELS = MQA_DIM / 64, THREADS = 256, COLUMN_WARPS = 4, TILES = 16 };

template <typename T> struct shared {
    T q[PANELS][HEADS][64], d_o[PANELS][HEADS][64], k[PANELS][KEYS][64];
    T weights[HEADS][KEYS]; /* P, then dS */
    int32_t partial[KEYS];
};

/* Byte offset of 16-byte chunk `chunk` of a row of weights: rows of 64 bytes, two to a line of banks. */
__device__ __forceinline__ uint32_t weights_at(int row, int chunk)
{
    return (uint32_t)(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
}

/* Copies one row a group of eight lanes, `dim` elements, zeros to the panel's end; NULL: zeros. */
template <typename T> __device__ __forceinline__ void copy_row(T *tile, const T *from, int dim, bool wide)
{
    const int row = threadIdx.x / 8, c = threadIdx.x % 8 * 8;
    for (int p = 0; p * 64 < dim; p++)
        load_chunk16<T>(smem_address(tile), (char *)tile, tile_at<32>(row, p * 8 + c / 8), from + p * 64 + c,
                        from != NULL && p * 64 + c < dim, wide);
}

/* A head's row, or NULL where it has no part: past the last head, or P is 0. */
template <typename T>
__device__ __forceinline__ const T *head_row(const mqa_backward &b, const view4 &v, const mqa_query &q,
                                             int query, int head)
{
    if (head >= b.of.heads || b.heads[query * b.of.heads + head].lse2 == INFINITY) return NULL;
    return (const T *)v.p + q.sequence * v.s[0] + q.row * v.s[1] + head * v.s[2];
}

/* Keys [first, first + 32) of a query's raw rows, or else of its entries. */
template <typename T>
__device__ __forceinline__ void load_keys(const mqa_backward &b, shared<T> &m, const mqa_query &q, int query,
                                          bool raw, int first)
{
    const int row = threadIdx.x / 8, found = mqa_find_key(b.of, q, query, raw, first + row);
    const row_source &source = raw ? b.of.raw : b.of.entries;
    copy_row<T>(m.k[0][0], (const T *)mqa_row_at(source, q, found).data, b.of.dim, source.wide);
    if (threadIdx.x % 8 == 0) m.partial[row] = mqa_partial_of(b, q, query, raw, first + row, found);
    cp_async_commit();
}

/* S and dP of this warp's 16 heads and 8 keys. */
template <typename T>
__device__ __forceinline__ void multiply_keys(const shared<T> &m, float (&s)[4], float (&dp)[4], int dim,
                                              int row0, int part)
{
    const int lane = threadIdx.x % 32;
    const uint32_t q = smem_address(m.q), d_o = smem_address(m.d_o), k = smem_address(m.k);
#pragma unroll 1
    for (int k0 = 0; k0 < dim; k0 += 32) {
        uint32_t keys[4], x[4];
        ldmatrix4(keys, k + tile_at<KEYS>(part * 8 + lane % 8, k0 / 8 + lane / 8));
        load_a<HEADS>(x, q, row0, k0, lane);
        mma16816<T>(s, x, keys[0], keys[1]);
        load_a<HEADS>(x, q, row0, k0 + 16, lane);
        mma16816<T>(s, x, keys[2], keys[3]);
        load_a<HEADS>(x, d_o, row0, k0, lane);
        mma16816<T>(dp, x, keys[0], keys[1]);
        load_a<HEADS>(x, d_o, row0, k0 + 16, lane);
        mma16816<T>(dp, x, keys[2], keys[3]);
    }
}

/* S and dP become P and dS. */
__device__ __forceinline__ void find_gradients(const mqa_backward &b, const mqa_head (&heads)[2], int keys,
                                               int column, float (&s)[4], float (&dp)[4])
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const mqa_head &h = heads[c / 2];
        const bool sees = column + c % 2 < keys && h.lse2 != INFINITY;
        s[c] = sees ? exp2_fast(fmaf(s[c], b.of.scale2, -h.lse2)) : 0.0f;
        dp[c] = sees ? s[c] * (dp[c] - h.delta) * h.scale : 0.0f;
    }
}

/* The warps put weights of 16 heads and 8 keys each into their buffer. */
template <typename T>
__device__ __forceinline__ void put_weights(shared<T> &m, const float (&x)[4], int row, int part)
{
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++)
        *(uint32_t *)((char *)m.weights + weights_at(row + h * 8, part) + threadIdx.x % 4 * 4) =
            pack2<T>(x[h * 2], x[h * 2 + 1]);
    __syncthreads();
}

/* Partials of 16 keys from row0 on += weights^T times the heads' rows, in 128 columns. */
template <typename T>
__device__ __forceinline__ void multiply_heads(const shared<T> &m, float (&sums)[TILES][4], uint32_t rows,
                                               int row0, int part)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h0 = 0; h0 < HEADS; h0 += 16) {
        uint32_t a[4];
        ldmatrix4_trans(a, smem_address(m.weights) +
                               weights_at(h0 + lane / 16 * 8 + lane % 8, row0 / 8 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < TILES; i += 2) {
            uint32_t v[4];
            load_b_trans<HEADS>(v, rows, h0, part * 128 + i * 8, lane);
            mma16816<T>(sums[i], a, v[0], v[1]);
            mma16816<T>(sums[i + 1], a, v[2], v[3]);
        }
    }
}

/* dQ of 16 heads from row0 on += dS K, in 128 columns. */
template <typename T>
__device__ __forceinline__ void multiply_gradients(const shared<T> &m, float (&d_q)[TILES][4], int row0,
                                                   int part)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k0 = 0; k0 < KEYS; k0 += 16) {
        uint32_t a[4];
        ldmatrix4(a, smem_address(m.weights) + weights_at(row0 + lane % 16, k0 / 8 + lane / 16));
#pragma unroll
        for (int i = 0; i < TILES; i += 2) {
            uint32_t v[4];
            load_b_trans<KEYS>(v, smem_address(m.k), k0, part * 128 + i * 8, lane);
            mma16816<T>(d_q[i], a, v[0], v[1]);
            mma16816<T>(d_q[i + 1], a, v[2], v[3]);
        }
    }
}

/* Stores row h of a thread's two, in 128 columns from column0 on. */
template <typename T>
__device__ __forceinline__ void store_row(T *to, const float (&x)[TILES][4], int h, int column0, int dim)
{
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int column = column0 + i * 8;
        if (column >= dim) continue;
        to[column] = from_float<T>(x[i][h * 2]);
        to[column + 1] = from_float<T>(x[i][h * 2 + 1]);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) attend_mqa_backward_any(const __grid_constant__ mqa_backward b)
{
    extern __shared__ __align__(1024) char memory[];
    shared<T> &m = *(shared<T> *)memory;
    const mqa_kernel &a = b.of;
    const int query = blockIdx.x / b.groups, group = blockIdx.x - query * b.groups, head0 = group * HEADS;
    const int warp = threadIdx.x / 32, part = warp % COLUMN_WARPS, row0 = warp / COLUMN_WARPS * 16,
              row = row0 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2, dim = (a.dim + 63) / 64 * 64;
    const mqa_query q = a.queries[query];
    const int raw_tiles = (q.raw + KEYS - 1) / KEYS, tiles = raw_tiles + (q.entries + KEYS - 1) / KEYS;
    const int loaded = head0 + threadIdx.x / 8;
    copy_row<T>(m.q[0][0], head_row<T>(b, a.q, q, query, loaded), a.dim, a.q_wide);
    copy_row<T>(m.d_o[0][0], head_row<T>(b, b.d_o, q, query, loaded), a.dim, b.d_o_wide);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    mqa_rotate<T, HEADS>(a, (char *)m.d_o, q.position, threadIdx.x, THREADS);
    mqa_head heads[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = head0 + row + h * 8;
        heads[h] = head < a.heads ? b.heads[query * a.heads + head] : mqa_head{INFINITY, 0.0f, 0.0f, 0.0f};
    }
    float d_q[TILES][4] = {};
    for (int t = 0; t < tiles; t++) {
        const bool raw = t < raw_tiles;
        const int first = (t - (raw ? 0 : raw_tiles)) * KEYS;
        __syncthreads(); /* the tile before has been used */
        load_keys(b, m, q, query, raw, first);
        cp_async_wait<0>();
        __syncthreads();
        float s[4] = {}, dp[4] = {}, sums[TILES][4] = {};
        multiply_keys(m, s, dp, dim, row0, part);
        find_gradients(b, heads, (raw ? q.raw : q.entries) - first, part * 8 + column, s, dp);
        put_weights(m, s, row, part);
        if (part * 128 < dim) multiply_heads(m, sums, smem_address(m.d_o), row0, part);
        put_weights(m, dp, row, part);
        if (part * 128 >= dim) continue;
        multiply_heads(m, sums, smem_address(m.q), row0, part);
        multiply_gradients(m, d_q, row0, part);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t partial = m.partial[row + h * 8];
            if (partial >= 0)
                store_row((T *)b.partials + (partial * b.groups + group) * a.dim, sums, h,
                          part * 128 + column, a.dim);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = head0 + row + h * 8;
        if (b.d_q.p != NULL && head < a.heads)
            store_row((T *)b.d_q.p + q.sequence * b.d_q.s[0] + q.row * b.d_q.s[1] + head * b.d_q.s[2], d_q, h,
                      part * 128 + column, a.dim);
    }
}

template <typename T> static quern_status launch(const stage_exec *exec, const mqa_backward &b)
{
    return launch_shared({(cudaStream_t)exec->stream, NULL}, attend_mqa_backward_any<T>,
                         dim3((unsigned)b.of.rows * (unsigned)b.groups), THREADS, sizeof(shared<T>),
                         "backward of attention over entries", b);
}

mqa_pairs pairs_bf16, pairs_f16;

} // namespace any_mqa_backward

#endif
