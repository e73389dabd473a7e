/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the indexer's loss and its gradients, on any GPU.
 *
 * A block has a share of a sequence's queries, one after another, and goes twice through a query's entries,
 * a tile at a time: first for the maxima and sums of every head's scores and of the indexer's; then for T and
 * P, the loss and the gradients. A product's rows are the query's heads; a warp makes squares of 16 x 16 of
 * it, by mma of 16-bit elements and on the f32 cores of floats. Sums over heads and entries go through
 * shared memory in f32, so their order is fixed.
 *
 *   scores = q keys^T, z = q_index keys_index^T
 *   dz = g w[z > 0],  d_q_index += dz keys_index,  d_keys_index += dz^T q_index
 *
 * The last is added to the share's own sums in memory, which no other block touches. Shared memory: q and
 * q_index whole, a tile of keys and keys_index, both tiles of scores. Limit: tensor cores, whose operands
 * come from shared memory 4 bytes at a time.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_KERNEL_CUH
#define QUERN_CUDA_INDEXER_LOSS_KERNEL_CUH

#include "indexer_loss/params.cuh"

enum { SQUARE = 16, PAD = 8, D_Q_SQUARES = HEADS_MOST / SQUARE * INDEX_WIDTH_MOST / SQUARE / LOSS_WARPS };

static inline __host__ __device__ int up16(int n)
{
    return (n + 15) / 16 * 16;
}

/* Takes arrays from shared memory one behind the other; from NULL to learn the bytes. */
struct shared_room {
    char *base;
    size_t used;

    template <typename T> __host__ __device__ __forceinline__ T *take(int n)
    {
        T *const array = (T *)(base + used);
        used += (size_t)n * sizeof(T);
        return array;
    }
};

/* A block's shared memory, whose arrays' lengths are the call's, and the elements of their rows. */
template <typename T> struct loss_memory {
    double *parts; /* a warp's */
    T *q, *keys, *q_index, *keys_index, *dz;
    float *scores, *z;          /* [heads][tile + 1], [index heads][tile + 1] */
    float *w, *lse, *max, *sum; /* of heads; max and sum: the last is the indexer's */
    float *student, *gradient;  /* of the tile's entries */
    int ld, ld_index, ld_scores, ld_dz;
    size_t bytes;
};

template <typename T> static __host__ __device__ loss_memory<T> memory_of(const loss_params &p, char *base)
{
    loss_memory<T> m = {};
    const int heads = up16(p.heads), index = up16(p.index_heads);
    m.ld = up16(p.dim) + PAD;
    m.ld_index = up16(p.width) + PAD;
    m.ld_scores = p.tile + 1;
    m.ld_dz = p.tile + PAD;
    shared_room room = {base, 0};
    m.parts = room.take<double>(LOSS_WARPS);
    m.q = room.take<T>(heads * m.ld);
    m.keys = room.take<T>(p.tile * m.ld);
    m.q_index = room.take<T>(index * m.ld_index);
    m.keys_index = room.take<T>(p.tile * m.ld_index);
    m.dz = room.take<T>(index * m.ld_dz);
    m.scores = room.take<float>(heads * m.ld_scores);
    m.z = room.take<float>(index * m.ld_scores);
    m.w = room.take<float>(index);
    m.lse = room.take<float>(heads);
    m.max = room.take<float>(heads + 1);
    m.sum = room.take<float>(heads + 1);
    m.student = room.take<float>(p.tile);
    m.gradient = room.take<float>(p.tile);
    m.bytes = room.used;
    return m;
}

/* ---- products ---- */

/* Element (row, k) at x[row by_row + k by_k]. */
template <typename T> struct operand {
    const T *x;
    int by_row, by_k;

    __device__ __forceinline__ T at(int row, int k) const { return x[row * by_row + k * by_k]; }
    /* Elements k and k + 1, k even. */
    __device__ __forceinline__ uint32_t pair(int row, int k) const
    {
        if (by_k == 1) return *(const uint32_t *)(x + row * by_row + k);
        const T low = at(row, k), high = at(row, k + 1);
        return *(const uint16_t *)&low | (uint32_t) * (const uint16_t *)&high << 16;
    }
};

/* c += the square of A B^T, `depth` a multiple of 16; c as mma has it: [half of the columns][4]. */
template <typename T>
__device__ __forceinline__ void multiply_square(float (&c)[2][4], const operand<T> &a, const operand<T> &b,
                                                int depth)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    if constexpr (sizeof(T) == 2) {
#pragma unroll 4
        for (int k = 0; k < depth; k += 16) {
            const uint32_t x[4] = {a.pair(g, k + t), a.pair(g + 8, k + t), a.pair(g, k + t + 8),
                                   a.pair(g + 8, k + t + 8)};
#pragma unroll
            for (int n = 0; n < 2; n++)
                mma16816<T>(c[n], x, b.pair(n * 8 + g, k + t), b.pair(n * 8 + g, k + t + 8));
        }
    } else {
        for (int k = 0; k < depth; k++) {
            const float low = a.at(g, k), high = a.at(g + 8, k);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float x = b.at(n * 8 + t, k), y = b.at(n * 8 + t + 1, k);
                c[n][0] = fmaf(low, x, c[n][0]);
                c[n][1] = fmaf(low, y, c[n][1]);
                c[n][2] = fmaf(high, x, c[n][2]);
                c[n][3] = fmaf(high, y, c[n][3]);
            }
        }
    }
}

/* Row and column of element e of half n of a square. */
__device__ __forceinline__ int square_row(int e)
{
    return threadIdx.x % 32 / 4 + e / 2 * 8;
}
__device__ __forceinline__ int square_column(int n, int e)
{
    return n * 8 + threadIdx.x % 4 * 2 + e % 2;
}

/* out[rows][ld] = a b^T, all multiples of 16. */
template <typename T>
__device__ __forceinline__ void score(float *out, int ld, const T *a, const T *b, int lda, int rows,
                                      int columns, int depth)
{
    const int across = columns / SQUARE;
    for (int i = threadIdx.x / 32; i < rows / SQUARE * across; i += LOSS_WARPS) {
        const int row0 = i / across * SQUARE, column0 = i % across * SQUARE;
        float c[2][4] = {};
        multiply_square<T>(c, {a + row0 * lda, lda, 1}, {b + column0 * lda, lda, 1}, depth);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[(row0 + square_row(e)) * ld + column0 + square_column(n, e)] = c[n][e];
    }
}

/* ---- a query ---- */

struct query_place {
    int64_t b, query, count;
    const int32_t *chosen; /* NULL: all from 0 on */

    __device__ __forceinline__ int64_t entry(int64_t i) const { return chosen != NULL ? chosen[i] : i; }
};

/* A row of `width` elements, and zeros up to a multiple of 16; all threads, `wide` rows of 16-byte loads. */
template <typename T>
__device__ __forceinline__ void load_part(T *to, const T *from, int part, bool there, bool wide)
{
    constexpr int EACH = 16 / sizeof(T);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (there && wide) x = __ldg((const uint4 *)(from + part * EACH));
    if (there && !wide)
        for (int i = 0; i < EACH; i++) ((T *)&x)[i] = from[part * EACH + i];
    *(uint4 *)(to + part * EACH) = x;
}

/* Rows of heads at (b, query), and zeros below. */
template <typename T>
__device__ __forceinline__ void load_heads(T *to, int ld, const view4 &v, const query_place &at, int heads,
                                           int width, bool wide)
{
    constexpr int EACH = 16 / sizeof(T);
    const int parts = up16(width) / EACH;
    for (int i = threadIdx.x; i < up16(heads) * parts; i += LOSS_THREADS) {
        const int row = i / parts, part = i % parts;
        const T *const from = (const T *)v.p + at.b * v.s[0] + at.query * v.s[1] + row * v.s[2];
        load_part(to + row * ld, from, part, row < heads && part * EACH < width, wide);
    }
}

/* Rows of the entries of a tile. */
template <typename T>
__device__ __forceinline__ void load_entries(T *to, int ld, const view4 &v, const query_place &at,
                                             int64_t first, int tile, int width, bool wide)
{
    constexpr int EACH = 16 / sizeof(T);
    const int parts = up16(width) / EACH;
    for (int i = threadIdx.x; i < tile * parts; i += LOSS_THREADS) {
        const int row = i / parts, part = i % parts;
        const bool there = first + row < at.count && part * EACH < width;
        const T *const from = (const T *)v.p + at.b * v.s[0] + (there ? at.entry(first + row) : 0) * v.s[1];
        load_part(to + row * ld, from, part, there, wide);
    }
}

__device__ __forceinline__ float relu(float z)
{
    return z <= 0.0f ? 0.0f : z;
}

/* Sums over `lanes` threads that follow one another, a power of two. */
__device__ __forceinline__ float sum_lanes(float x, int lanes)
{
    for (int by = lanes / 2; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

/* The tile's scores, products z, and the indexer's scores. */
template <typename T>
__device__ __forceinline__ void score_tile(const loss_params &p, const loss_memory<T> &m,
                                           const query_place &at, int64_t first)
{
    __syncthreads();
    load_entries(m.keys, m.ld, p.keys, at, first, p.tile, p.dim, p.keys_wide);
    load_entries(m.keys_index, m.ld_index, p.keys_index, at, first, p.tile, p.width, p.keys_index_wide);
    __syncthreads();
    score<T>(m.scores, m.ld_scores, m.q, m.keys, m.ld, up16(p.heads), p.tile, up16(p.dim));
    score<T>(m.z, m.ld_scores, m.q_index, m.keys_index, m.ld_index, up16(p.index_heads), p.tile,
             up16(p.width));
    __syncthreads();
    const int lanes = LOSS_THREADS / p.tile < 32 ? LOSS_THREADS / p.tile : 32, entry = threadIdx.x / lanes;
    float sum = 0.0f;
    for (int h = threadIdx.x % lanes; entry < p.tile && h < p.index_heads; h += lanes)
        sum = fmaf(m.w[h], relu(m.z[h * m.ld_scores + entry]), sum);
    sum = sum_lanes(sum, lanes) * p.scale_index;
    if (entry < p.tile && threadIdx.x % lanes == 0) m.student[entry] = sum;
    __syncthreads();
}

/* Adds a row of scores to its running maximum and sum of exponentials, of x times `scale`; two threads. */
__device__ __forceinline__ void weigh_row(const float *row, int count, float scale, float *max, float *sum)
{
    const int half = threadIdx.x % 2;
    float most = *max;
    for (int i = half; i < count; i += 2) most = fmaxf(most, row[i] * scale);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    float all = half == 0 && *sum > 0.0f ? *sum * expf(*max - most) : 0.0f;
    for (int i = half; i < count; i += 2) all += expf(row[i] * scale - most);
    all += __shfl_xor_sync(~0u, all, 1);
    __syncwarp();
    if (half == 0) *max = most, *sum = all;
}

template <typename T>
__device__ __forceinline__ void first_pass(const loss_params &p, const loss_memory<T> &m,
                                           const query_place &at)
{
    for (int h = threadIdx.x; h <= up16(p.heads); h += LOSS_THREADS) m.max[h] = -INFINITY, m.sum[h] = 0.0f;
    for (int64_t first = 0; first < at.count; first += p.tile) {
        const int count = (int)min((int64_t)p.tile, at.count - first);
        score_tile(p, m, at, first);
        const int h = threadIdx.x / 2; /* whole warps walk on: rows of padding have scores of 0 */
        if (h < up16(p.heads)) weigh_row(m.scores + h * m.ld_scores, count, p.scale, m.max + h, m.sum + h);
        __syncthreads();
        if (threadIdx.x < 32) {
            float max = m.max[up16(p.heads)], sum = m.sum[up16(p.heads)];
            weigh_row(m.student, count, 1.0f, &max, &sum);
            if (threadIdx.x == 0) m.max[up16(p.heads)] = max, m.sum[up16(p.heads)] = sum;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ double log_add(double a, double b)
{
    const double most = a > b ? a : b;
    return most == -INFINITY ? most : most + log(exp(a - most) + exp(b - most));
}

/* x summed over all threads, in order. */
__device__ __forceinline__ double sum_block(double x, double *parts)
{
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    double all = 0.0;
    for (int w = 0; w < LOSS_WARPS; w++) all += parts[w];
    return all;
}

/* The heads' normalisers to base e, and the mass that the entries have of all heads. */
template <typename T>
__device__ __forceinline__ double normalise(const loss_params &p, const loss_memory<T> &m,
                                            const query_place &at)
{
    const int h = threadIdx.x;
    double mass = 0.0;
    if (h < p.heads) {
        const double own = (double)m.max[h] + log((double)m.sum[h]),
                     window = (double)p.lse_win
                                  .p[at.b * p.lse_win.s[0] + h * p.lse_win.s[1] + at.query * p.lse_win.s[2]],
                     sink = p.sink != NULL ? (double)p.sink[h] : -INFINITY,
                     all = log_add(own, log_add(window, sink));
        mass = exp(own - all);
        m.lse[h] = (float)all;
    }
    return sum_block(mass, m.parts);
}

/* The tile's T and P become their gradient, in m.gradient; returns this thread's part of the loss. */
template <typename T>
__device__ __forceinline__ double compare(const loss_params &p, const loss_memory<T> &m, int count,
                                          float mass, float lse, float factor)
{
    const int lanes = LOSS_THREADS / p.tile < 32 ? LOSS_THREADS / p.tile : 32, entry = threadIdx.x / lanes;
    float teacher = 0.0f;
    for (int h = threadIdx.x % lanes; entry < count && h < p.heads; h += lanes)
        teacher += expf(fmaf(m.scores[h * m.ld_scores + entry], p.scale, -m.lse[h]));
    teacher = sum_lanes(teacher, lanes) / mass;
    if (entry >= p.tile || threadIdx.x % lanes != 0) return 0.0;
    const float log_p = entry < count ? m.student[entry] - lse : 0.0f;
    m.gradient[entry] = entry < count ? factor * (expf(log_p) - teacher) : 0.0f;
    return entry < count ? (double)(teacher * (logf(fmaxf(teacher, 1e-10f)) - log_p)) : 0.0;
}

template <typename T>
__device__ __forceinline__ float dz_at(const loss_params &p, const loss_memory<T> &m, int i)
{
    const int h = i / p.tile, e = i % p.tile;
    const bool some = h < p.index_heads && !(m.z[h * m.ld_scores + e] <= 0.0f);
    return some ? m.gradient[e] * m.w[h] * p.scale_index : 0.0f;
}

/* The largest of numbers that are not negative, of all threads. */
__device__ __forceinline__ float largest_of_block(float x, double *parts)
{
    for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = (double)x;
    __syncthreads();
    for (int w = 0; w < LOSS_WARPS; w++) x = fmaxf(x, (float)parts[w]);
    return x;
}

/* dz of the tile, times a power of two with which the largest is in f16's range; returns what undoes it. Adds
 * to d_w, which two threads have of head threadIdx.x / 2. */
template <typename T>
__device__ __forceinline__ float take_gradient(const loss_params &p, const loss_memory<T> &m, float &d_w)
{
    const int own = threadIdx.x / 2, all = up16(p.index_heads) * p.tile;
    float most = 0.0f;
    for (int e = threadIdx.x % 2; own < p.index_heads && e < p.tile; e += 2)
        d_w = fmaf(m.gradient[e], relu(m.z[own * m.ld_scores + e]), d_w);
    for (int i = threadIdx.x; i < all; i += LOSS_THREADS) most = fmaxf(most, fabsf(dz_at(p, m, i)));
    most = largest_of_block(most, m.parts);
    const bool small = most > 0x1p-100f && most < 0x1p100f;
    const uint32_t power = small ? __float_as_uint(most) >> 23 : 127;
    const float up = small ? __uint_as_float((254 + 13 - power) << 23) : 1.0f, down = 1.0f / up;
    for (int i = threadIdx.x; i < all; i += LOSS_THREADS)
        m.dz[i / p.tile * m.ld_dz + i % p.tile] = from_float<T>(dz_at(p, m, i) * up);
    __syncthreads();
    return down;
}

/* d_q_index += dz keys_index: a warp has some squares in registers. `down`: of take_gradient(). */
template <typename T>
__device__ __forceinline__ void add_d_q(const loss_params &p, const loss_memory<T> &m, float down,
                                        float (&d_q)[D_Q_SQUARES][2][4])
{
    const int across = up16(p.width) / SQUARE, squares = up16(p.index_heads) / SQUARE * across;
#pragma unroll
    for (int j = 0; j < D_Q_SQUARES; j++) {
        const int i = threadIdx.x / 32 + j * LOSS_WARPS;
        if (i >= squares) continue;
        float c[2][4] = {};
        multiply_square<T>(c, {m.dz + i / across * SQUARE * m.ld_dz, m.ld_dz, 1},
                           {m.keys_index + i % across * SQUARE, 1, m.ld_index}, p.tile);
#pragma unroll
        for (int e = 0; e < 8; e++) d_q[j][e / 4][e % 4] = fmaf(down, c[e / 4][e % 4], d_q[j][e / 4][e % 4]);
    }
}

/* The share's sums of the tile's entries += dz^T q_index. */
template <typename T>
__device__ __forceinline__ void add_d_keys(const loss_params &p, const loss_memory<T> &m,
                                           const query_place &at, int64_t first, float down, float *sums)
{
    const int across = up16(p.width) / SQUARE;
    for (int i = threadIdx.x / 32; i < p.tile / SQUARE * across; i += LOSS_WARPS) {
        const int row0 = i / across * SQUARE, column0 = i % across * SQUARE;
        float c[2][4] = {};
        multiply_square<T>(c, {m.dz + row0, 1, m.ld_dz}, {m.q_index + column0, 1, m.ld_index},
                           up16(p.index_heads));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int64_t entry = first + row0 + square_row(e);
            if (entry >= at.count) continue;
            float *const to = sums + at.entry(entry) * p.width + column0;
#pragma unroll
            for (int n = 0; n < 2; n++)
                if (column0 + square_column(n, e) < p.width) to[square_column(n, e)] += down * c[n][e];
        }
    }
}

/* Stores a query's gradients. */
template <typename T>
__device__ __forceinline__ void give_gradients(const loss_params &p, const query_place &at, float d_w,
                                               const float (&d_q)[D_Q_SQUARES][2][4])
{
    const int across = up16(p.width) / SQUARE, own = threadIdx.x / 2;
    d_w = (d_w + __shfl_xor_sync(~0u, d_w, 1)) * p.scale_index;
    if (p.d_w.p != NULL && own < p.index_heads && threadIdx.x % 2 == 0)
        put_at(p.d_w.p, p.w_dtype, at.b * p.d_w.s[0] + at.query * p.d_w.s[1] + own, d_w);
    if (p.d_q_index.p == NULL) return;
    T *const to = (T *)p.d_q_index.p + at.b * p.d_q_index.s[0] + at.query * p.d_q_index.s[1];
#pragma unroll
    for (int j = 0; j < D_Q_SQUARES; j++) {
        const int i = threadIdx.x / 32 + j * LOSS_WARPS;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int head = i / across * SQUARE + square_row(e),
                          column = i % across * SQUARE + square_column(n, e);
                if (head < p.index_heads && column < p.width)
                    to[head * p.d_q_index.s[2] + column] = from_float<T>(d_q[j][n][e]);
            }
    }
}

/* Returns the query's loss. */
template <typename T>
__device__ __forceinline__ double run_query(const loss_params &p, const loss_memory<T> &m,
                                            const query_place &at, float factor, float *sums)
{
    float d_q[D_Q_SQUARES][2][4] = {}, d_w = 0.0f;
    double loss = 0.0;
    if (at.count > 0) {
        __syncthreads();
        load_heads(m.q, m.ld, p.q, at, p.heads, p.dim, p.q_wide);
        load_heads(m.q_index, m.ld_index, p.q_index, at, p.index_heads, p.width, p.q_index_wide);
        for (int h = threadIdx.x; h < p.index_heads; h += LOSS_THREADS)
            m.w[h] = value_at(p.w.p, p.w_dtype, at.b * p.w.s[0] + at.query * p.w.s[1] + h);
        first_pass(p, m, at);
        const double mass = normalise(p, m, at);
        const float lse = (float)((double)m.max[up16(p.heads)] + log((double)m.sum[up16(p.heads)]));
        /* Below it T has no normal number, and there is no teacher. */
        for (int64_t first = 0; !(mass < 0x1p-126) && first < at.count; first += p.tile) {
            score_tile(p, m, at, first);
            loss += compare(p, m, (int)min((int64_t)p.tile, at.count - first), (float)mass, lse, factor);
            __syncthreads();
            const float down = take_gradient(p, m, d_w);
            if (p.d_q_index.p != NULL) add_d_q(p, m, down, d_q);
            if (sums != NULL) add_d_keys(p, m, at, first, down, sums);
        }
        loss = sum_block(loss, m.parts);
    }
    give_gradients<T>(p, at, d_w, d_q);
    return loss;
}

template <typename T>
__global__ void __launch_bounds__(LOSS_THREADS)
    indexer_loss(const __grid_constant__ loss_params p, int64_t seen)
{
    extern __shared__ __align__(16) char memory[];
    const loss_memory<T> m = memory_of<T>(p, memory);
    const int64_t b = blockIdx.x / p.shares, first = blockIdx.x % p.shares * p.share_queries,
                  end = min(first + p.share_queries, p.queries), rows = p.listed < 0 ? seen : *p.rows;
    const float factor = p.lambda / (float)max(rows, (int64_t)1);
    float *const sums = p.d_keys != NULL ? p.d_keys + blockIdx.x * p.entries * p.width : NULL;
    for (int64_t query = first; query < end; query++) {
        const int64_t i = b * p.queries + query;
        const query_place at = {b, query, p.listed < 0 ? seen_by(p, query) : p.count[i],
                                p.listed < 0 ? NULL : p.chosen + i * p.listed};
        const double loss = run_query<T>(p, m, at, factor, sums);
        if (threadIdx.x != 0) continue;
        p.losses[i] = loss;
        if (p.row_loss.p != NULL) p.row_loss.p[b * p.row_loss.s[0] + query * p.row_loss.s[1]] = (float)loss;
    }
}

template <typename T> static size_t bytes_here(const loss_params &p)
{
    return memory_of<T>(p, NULL).bytes;
}

template <typename T> static quern_status run_here(const loss_params &p, cudaStream_t stream)
{
    const int64_t blind = p.ratio - p.position - 1, first = blind > 0 ? blind : 0,
                  seen = p.entries > 0 && p.queries > first ? p.batch * (p.queries - first) : 0;
    return launch_shared({stream, NULL}, indexer_loss<T>, dim3((unsigned)(p.batch * p.shares)), LOSS_THREADS,
                         bytes_here<T>(p), "indexer_loss", p, seen);
}

#endif
