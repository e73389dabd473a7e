/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention of a token's heads over keys that are values at once, by mma.sync on any GPU.
 *
 * A block of eight warps owns 32 heads of one query and walks its keys, 32 a tile, two tiles in shared
 * memory: one is copied (or decoded) while the other is used. Warp (r, c) makes the scores of rows 16 r ...
 * with keys 8 c ..., and O's rows 16 r ... in panels 2 c and 2 c + 1. So four warps share a row: they
 * exchange its maximum and P through shared memory, and each keeps the sum of its own keys until the end.
 *
 * Shared memory: Q 32 KB, K 2 x 32 KB, P 2 KB: all that a block of the smallest GPUs may have. O takes 64
 * registers.
 * Limit: the products of the tensor cores, less what three barriers a tile cost.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_ANY_KERNEL_CUH
#define QUERN_CUDA_ATTEND_MQA_ANY_KERNEL_CUH

#include "attend_mqa/params.cuh"

namespace any_mqa
{

enum { HEADS = 32, KEYS = 32, PANELS = MQA_DIM / 64, THREADS = 256, COLUMN_WARPS = 4, O_TILES = 16 };

template <typename T> struct shared {
    T q[PANELS][HEADS][64];
    T k[2][PANELS][KEYS][64];
    T p[HEADS][KEYS];
    float exchanged[COLUMN_WARPS][HEADS];
};

/* Byte offset of 16-byte chunk `chunk` of a row of P: rows of 64 bytes, two to a line of banks. */
__device__ __forceinline__ uint32_t p_at(int row, int chunk)
{
    return (uint32_t)(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
}

/* Copies one row a group of eight lanes, `dim` elements; NULL: zeros. */
template <typename T> __device__ __forceinline__ void copy_row(T *tile, const char *from, int dim, bool wide)
{
    const int row = threadIdx.x / 8, c = threadIdx.x % 8;
    for (int p = 0; p * 64 < dim; p++)
        load_chunk16<T>(smem_address(tile), (char *)tile, tile_at<32>(row, p * 8 + c),
                        (const T *)from + p * 64 + c * 8, from != NULL && p * 64 + c * 8 < dim, wide);
}

/* Keys [first, first + 32) of a query's raw rows, or else of its entries. */
template <typename T, bool BYTES>
__device__ __forceinline__ void load_keys(const mqa_kernel &a, T *tile, const mqa_query &q, int query,
                                          bool raw, int first)
{
    const int row = threadIdx.x / 8, c = threadIdx.x % 8, found = mqa_find_key(a, q, query, raw, first + row);
    const row_source &source = raw ? a.raw : a.entries;
    const row_place place = mqa_row_at(source, q, found);
    if constexpr (BYTES) {
        for (int p = 0; p < PANELS; p++)
            *(uint4 *)((char *)tile + tile_at<32>(row, p * 8 + c)) =
                found >= 0 ? mqa_decode(place, p, c * 8, source.wide) : make_uint4(0, 0, 0, 0);
    } else {
        copy_row(tile, place.data, a.dim, source.wide);
    }
    cp_async_commit();
}

/* A row's softmax; `sum`: of the keys of this thread. */
struct row_state {
    float base[2], sum[2];
};

/* Makes P of a tile from this warp's scores; the base follows the maximum once that has risen by 2^8.
 * shrink: what O and the sums so far are to be multiplied by. */
template <typename T>
__device__ __forceinline__ void exchange_weights(const mqa_kernel &a, shared<T> &m, const float (&s)[4],
                                                 int keys, row_state &r, float (&shrink)[2], int row,
                                                 int part)
{
    const int column = part * 8 + threadIdx.x % 4 * 2;
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; c++) x[c] = column + c % 2 < keys ? s[c] : -INFINITY;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = fmaxf(x[h * 2], x[h * 2 + 1]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (threadIdx.x % 4 == 0) m.exchanged[part][row + h * 8] = top;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = m.exchanged[0][row + h * 8];
        for (int w = 1; w < COLUMN_WARPS; w++) top = fmaxf(top, m.exchanged[w][row + h * 8]);
        top *= a.scale2;
        const bool first = r.base[h] == -INFINITY, rises = first || top > r.base[h] + 8.0f;
        shrink[h] = rises && !first ? exp2_fast(r.base[h] - top) : 1.0f;
        if (rises) r.base[h] = top;
        const float base = r.base[h] == -INFINITY ? 0.0f : r.base[h];
        x[h * 2] = exp2_fast(fmaf(x[h * 2], a.scale2, -base));
        x[h * 2 + 1] = exp2_fast(fmaf(x[h * 2 + 1], a.scale2, -base));
        r.sum[h] = r.sum[h] * shrink[h] + x[h * 2] + x[h * 2 + 1];
        *(uint32_t *)((char *)m.p + p_at(row + h * 8, part) + threadIdx.x % 4 * 4) =
            pack2<T>(x[h * 2], x[h * 2 + 1]);
    }
    __syncthreads();
}

/* The scores of this warp's 16 rows with its 8 keys. */
template <typename T>
__device__ __forceinline__ void multiply_keys(const shared<T> &m, float (&s)[4], int buffer, int dim,
                                              int row0, int part)
{
    const int lane = threadIdx.x % 32;
    const uint32_t q = smem_address(m.q), k = smem_address(m.k[buffer]);
#pragma unroll 2
    for (int k0 = 0; k0 < dim; k0 += 32) {
        uint32_t low[4], high[4], keys[4]; /* of keys: 32 channels */
        load_a<HEADS>(low, q, row0, k0, lane);
        load_a<HEADS>(high, q, row0, k0 + 16, lane);
        ldmatrix4(keys, k + tile_at<KEYS>(part * 8 + lane % 8, k0 / 8 + lane / 8));
        mma16816<T>(s, low, keys[0], keys[1]);
        mma16816<T>(s, high, keys[2], keys[3]);
    }
}

/* O += P K in this warp's two panels. */
template <typename T>
__device__ __forceinline__ void multiply_values(const shared<T> &m, float (&o)[O_TILES][4], int buffer,
                                                int row0, int part)
{
    const int lane = threadIdx.x % 32;
    const uint32_t k = smem_address(m.k[buffer]);
#pragma unroll
    for (int k0 = 0; k0 < KEYS; k0 += 16) {
        uint32_t p[4];
        ldmatrix4(p, smem_address(m.p) + p_at(row0 + lane % 16, k0 / 8 + lane / 16));
#pragma unroll
        for (int i = 0; i < O_TILES; i += 2) {
            uint32_t v[4];
            load_b_trans<KEYS>(v, k, k0, part * 128 + i * 8, lane);
            mma16816<T>(o[i], p, v[0], v[1]);
            mma16816<T>(o[i + 1], p, v[2], v[3]);
        }
    }
}

/* A row's sum over the four warps that share it. */
template <typename T>
__device__ __forceinline__ void merge_sums(shared<T> &m, float (&sum)[2], int row, int part)
{
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (threadIdx.x % 4 == 0) m.exchanged[part][row + h * 8] = sum[h];
    }
    __syncthreads();
    for (int h = 0; h < 2; h++) {
        sum[h] = 0.0f;
        for (int w = 0; w < COLUMN_WARPS; w++) sum[h] += m.exchanged[w][row + h * 8];
    }
}

/* Stores a thread's part of a row, rotated back. */
template <typename T>
__device__ __forceinline__ void store_row(const mqa_kernel &a, const mqa_query &q,
                                          const float (&o)[O_TILES][4], int h, float factor, int head,
                                          int column0)
{
    T *const to = (T *)a.o.p + q.sequence * a.o.s[0] + q.row * a.o.s[1] + head * a.o.s[2];
#pragma unroll
    for (int i = 0; i < O_TILES; i++) {
        const int column = column0 + i * 8;
        if (column >= a.dim) continue;
        float x = factor == 0.0f ? 0.0f : o[i][h * 2] * factor,
              y = factor == 0.0f ? 0.0f : o[i][h * 2 + 1] * factor;
        if (a.rotation.dtype == QUERN_F32) mqa_rotate_back<float>(a, q.position, column, x, y);
        else mqa_rotate_back<T>(a, q.position, column, x, y);
        to[column] = from_float<T>(x);
        to[column + 1] = from_float<T>(y);
    }
}

template <typename T, bool BYTES>
__global__ void __launch_bounds__(THREADS)
    attend_mqa_any(const __grid_constant__ mqa_kernel a, const int groups)
{
    extern __shared__ __align__(1024) char memory[];
    shared<T> &m = *(shared<T> *)memory;
    const int query = blockIdx.x / groups, head0 = (blockIdx.x - query * groups) * HEADS;
    const int warp = threadIdx.x / 32, part = warp % COLUMN_WARPS, row0 = warp / COLUMN_WARPS * 16,
              row = row0 + threadIdx.x % 32 / 4, dim = (a.dim + 63) / 64 * 64;
    const mqa_query q = a.queries[query];
    const int raw_tiles = (q.raw + KEYS - 1) / KEYS, tiles = raw_tiles + (q.entries + KEYS - 1) / KEYS;
    const T *const heads = (const T *)a.q.p + q.sequence * a.q.s[0] + q.row * a.q.s[1];
    const int loaded = head0 + threadIdx.x / 8;
    copy_row(m.q[0][0], loaded < a.heads ? (const char *)(heads + loaded * a.q.s[2]) : NULL, a.dim, a.q_wide);
    float o[O_TILES][4] = {};
    row_state all = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}}, window = all;
    for (int t = -1; t < tiles; t++) {
        const bool ahead_raw = t + 1 < raw_tiles;
        if (t + 1 < tiles)
            load_keys<T, BYTES>(a, m.k[(t + 1) & 1][0][0], q, query, ahead_raw,
                                (t + 1 - (ahead_raw ? 0 : raw_tiles)) * KEYS);
        else cp_async_commit();
        if (t < 0) continue;
        cp_async_wait<1>();
        __syncthreads();
        const int keys = t < raw_tiles ? q.raw - t * KEYS : q.entries - (t - raw_tiles) * KEYS;
        float s[4] = {}, shrink[2];
        multiply_keys(m, s, t & 1, dim, row0, part);
        exchange_weights(a, m, s, keys, all, shrink, row, part);
        if (shrink[0] != 1.0f || shrink[1] != 1.0f) {
#pragma unroll
            for (int i = 0; i < O_TILES; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[i][c] *= shrink[c / 2];
        }
        if (part * 128 < dim) multiply_values(m, o, t & 1, row0, part);
        if (t + 1 == raw_tiles) window = all;
        __syncthreads(); /* the tile's buffer and P are free */
    }
    cp_async_wait<0>();
    merge_sums(m, all.sum, row, part);
    merge_sums(m, window.sum, row, part);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = head0 + row + h * 8;
        if (head >= a.heads) continue;
        const float lse = mqa_log_sum(all.base[h], all.sum[h]),
                    factor = mqa_factor(a.sink != NULL ? a.sink[head] : -INFINITY, lse, all.sum[h]);
        store_row<T>(a, q, o, h, factor, head, part * 128 + threadIdx.x % 4 * 2);
        if (part != 0 || threadIdx.x % 4 != 0) continue;
        const int64_t b = q.sequence, n = q.row;
        if (a.lse.p != NULL) a.lse.p[b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]] = lse;
        if (a.lse_win.p != NULL)
            a.lse_win.p[b * a.lse_win.s[0] + head * a.lse_win.s[1] + n * a.lse_win.s[2]] =
                mqa_log_sum(window.base[h], window.sum[h]);
    }
}

template <typename T, bool BYTES> static quern_status launch(const launcher &to, const mqa_kernel &a)
{
    const int groups = (a.heads + HEADS - 1) / HEADS;
    return launch_shared(to, attend_mqa_any<T, BYTES>, dim3((unsigned)a.rows * (unsigned)groups), THREADS,
                         sizeof(shared<T>), "attention over entries", a, groups);
}

typedef quern_status instance(const launcher &to, const mqa_kernel &a);
instance attend_mqa_bf16, attend_mqa_f16;

} // namespace any_mqa

#endif
