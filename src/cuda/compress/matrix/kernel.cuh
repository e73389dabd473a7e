/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the products of compression with weights: of the mean (P = 1 position), or
 * `linear`, whose blocks are P = l positions of D columns each.
 *
 *   forward  Y[r] = sum_p X(r, p) W[p]          X(r, p): the f32 mean, or token i d + p plus pe[p]
 *   dW[p]  = sum_r X(r, p) (x) G[r]             G = dY
 *   dmean[r] = G[r] W^T                         mean; spread over the tokens by compress/launch.cu
 *   dX[t]  = sum_m G[t/d - m] W[t mod d + m d]^T   linear: the l/d entries that cover token t, in the order
 *                                                  of m
 *   dpe[p] = W[p] S, S = sum_r G[r]
 *
 * A block holds 16 rows of one operand in shared memory; a thread owns one column and 16 sums, so each weight
 * read from L2 is used 16 times. Long sums run in two levels (256 rows, then over those) in a fixed order.
 * Limit: f32 multiply-adds; compression is 1/l of the tokens, so this stays behind the attention.
 */
#ifndef QUERN_CUDA_COMPRESS_MATRIX_KERNEL_CUH
#define QUERN_CUDA_COMPRESS_MATRIX_KERNEL_CUH

#include "compress/matrix/params.cuh"

enum { ROWS = 16, DEPTH = 128, GROUPS = 4 };

/* X(r, p)[c] of a row that starts at `token`. */
template <typename T>
__device__ __forceinline__ float x_at(const matrix_kernel &m, int64_t r, int64_t token, int p, int h, int c)
{
    const compress_side &s = m.a.side[m.side];
    if (token < 0) return 0.0f;
    if (s.mean != NULL) return s.mean[(r * m.a.heads + h) * s.dim + c];
    const float x = to_float<T>(((const T *)s.x.p)[token + p * s.x.s[1] + c]);
    return m.pe == NULL ? x : x + value_at<T>(m.pe, m.pe_f32, h * m.ps[0] + p * m.ps[1] + c);
}

/* G[r][e]; callers keep to rows that are entries. */
template <typename T> __device__ __forceinline__ float g_at(const matrix_kernel &m, int64_t r, int h, int e)
{
    const view4 &v = m.a.side[m.side].d_cmp;
    return value_at<T>(v.p, m.a.side[m.side].d_cmp_f32,
                       r / m.a.rows * v.s[0] + r % m.a.rows * v.s[1] + h * v.s[2] + e);
}

template <typename T> __global__ void matrix_forward(const __grid_constant__ matrix_kernel m)
{
    __shared__ float tile[ROWS][DEPTH];
    __shared__ int64_t tokens[ROWS];
    const compress_side &s = m.a.side[m.side];
    const int h = blockIdx.y, e = threadIdx.x;
    const int64_t first = (int64_t)blockIdx.x * ROWS;
    if (threadIdx.x < ROWS) tokens[threadIdx.x] = token_of(m, first + threadIdx.x, h);
    float sum[ROWS] = {};
    for (int p = 0; p < m.positions; p++)
        for (int c0 = 0; c0 < s.dim; c0 += DEPTH) {
            const int depth = s.dim - c0 < DEPTH ? s.dim - c0 : DEPTH;
            __syncthreads();
            for (int i = threadIdx.x; i < ROWS * depth; i += blockDim.x)
                tile[i / depth][i % depth] =
                    x_at<T>(m, first + i / depth, tokens[i / depth], p, h, c0 + i % depth);
            __syncthreads();
            if (e >= s.dim) continue;
            float acc[ROWS] = {};
            for (int c = 0; c < depth; c++) {
                const float w =
                    value_at<T>(m.w, m.w_f32, h * m.ws[0] + (int64_t)(p * s.dim + c0 + c) * m.ws[1] + e);
#pragma unroll
                for (int r = 0; r < ROWS; r++) acc[r] = fmaf(tile[r][c], w, acc[r]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] += acc[r];
        }
    if (e >= s.dim) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t row = first + r;
        if (row < m.views * m.a.rows)
            ((T *)s.cmp.p)[row / m.a.rows * s.cmp.s[0] + row % m.a.rows * s.cmp.s[1] + h * s.cmp.s[2] + e] =
                from_float<T>(sum[r]);
    }
}

/* Rows of G into shared memory, then sum[k] = sum_e W[row_w][e] G[k][e] for this thread's weight row. */
template <typename T>
__device__ __forceinline__ void add_transposed(const matrix_kernel &m, int h, const int64_t *rows,
                                               int position, int c, float (*tile)[DEPTH], float (&sum)[ROWS])
{
    const compress_side &s = m.a.side[m.side];
    for (int e0 = 0; e0 < s.dim; e0 += DEPTH) {
        const int depth = s.dim - e0 < DEPTH ? s.dim - e0 : DEPTH;
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * depth; i += blockDim.x)
            tile[i / depth][i % depth] =
                rows[i / depth] >= 0 ? g_at<T>(m, rows[i / depth], h, e0 + i % depth) : 0.0f;
        __syncthreads();
        if (c >= s.dim) continue;
        float acc[ROWS] = {};
        const int64_t at = h * m.ws[0] + (int64_t)(position * s.dim + c) * m.ws[1] + e0;
        for (int e = 0; e < depth; e++) {
            const float w = value_at<T>(m.w, m.w_f32, at + e);
#pragma unroll
            for (int r = 0; r < ROWS; r++) acc[r] = fmaf(tile[r][e], w, acc[r]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] += acc[r];
    }
}

template <typename T> __global__ void matrix_d_mean(const __grid_constant__ matrix_kernel m)
{
    __shared__ float tile[ROWS][DEPTH];
    __shared__ int64_t rows[ROWS];
    const compress_side &s = m.a.side[m.side];
    const int h = blockIdx.y, c = threadIdx.x;
    const int64_t first = (int64_t)blockIdx.x * ROWS;
    if (threadIdx.x < ROWS)
        rows[threadIdx.x] = token_of(m, first + threadIdx.x, h) >= 0 ? first + threadIdx.x : -1;
    __syncthreads();
    float sum[ROWS] = {};
    add_transposed<T>(m, h, rows, 0, c, tile, sum);
    if (c >= s.dim) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (first + r < m.views * m.a.rows) s.d_mean[((first + r) * m.a.heads + h) * s.dim + c] = sum[r];
}

/* Tokens (j0 + k) d + phase, k < 16, of one sequence and head. */
template <typename T> __global__ void matrix_d_x(const __grid_constant__ matrix_kernel m)
{
    __shared__ float tile[ROWS][DEPTH];
    __shared__ int64_t rows[ROWS];
    const compress_side &s = m.a.side[m.side];
    const int phase = blockIdx.y, h = blockIdx.z, c = threadIdx.x;
    sequence seq;
    int64_t t0;
    if (!piece_at(m.a.sq, blockIdx.x, ROWS * m.a.d, 1, &seq, &t0)) return;
    const int64_t entries = mask_entries(seq.nq, m.a.l, m.a.d), j0 = t0 / m.a.d;
    const int64_t row0 = m.a.sq.cu_q == NULL ? seq.view_b * m.a.rows : m.a.sq.cu_kv[seq.b];
    float sum[ROWS] = {};
    for (int64_t cover = 0; cover < m.a.l / m.a.d; cover++) {
        __syncthreads();
        if (threadIdx.x < ROWS) {
            const int64_t i = j0 + threadIdx.x - cover;
            rows[threadIdx.x] = i >= 0 && i < entries ? row0 + i : -1;
        }
        add_transposed<T>(m, h, rows, phase + (int)(cover * m.a.d), c, tile, sum);
    }
    if (c >= s.dim) return;
    for (int k = 0; k < ROWS; k++) {
        const int64_t t = (j0 + k) * m.a.d + phase;
        if (t >= seq.nq) break;
        const int64_t at = seq.view_b * s.d_x.s[0] + (seq.q0 + t) * s.d_x.s[1] + h * s.d_x.s[2] + c;
        if (!s.d_x_f32) ((T *)s.d_x.p)[at] = from_float<T>(sum[k]);
        else ((float *)s.d_x.p)[at] = (m.a.add ? ((float *)s.d_x.p)[at] : 0.0f) + sum[k];
    }
}

/* The rows of share `split` of `splits`. */
__device__ __forceinline__ void share(const matrix_kernel &m, int split, int splits, int64_t *first,
                                      int64_t *end)
{
    const int64_t rows = m.views * m.a.rows, per = (rows + splits - 1) / splits;
    *first = split * per < rows ? split * per : rows;
    *end = *first + per < rows ? *first + per : rows;
}

/* 16 rows of dW[p] of head h: part[split] where there are shares, else dW itself. */
template <typename T> __global__ void matrix_d_w(const __grid_constant__ matrix_kernel m, int splits)
{
    __shared__ float tile[ROWS][ROWS];
    __shared__ int64_t tokens[ROWS];
    const compress_side &s = m.a.side[m.side];
    const int c0 = blockIdx.x * ROWS, p = blockIdx.y / splits, split = blockIdx.y % splits, h = blockIdx.z,
              e = threadIdx.x;
    float sum[ROWS] = {}, acc[ROWS] = {};
    int64_t first, end;
    share(m, split, splits, &first, &end);
    for (int64_t r0 = first; r0 < end; r0 += ROWS) {
        __syncthreads();
        if (threadIdx.x < ROWS)
            tokens[threadIdx.x] = r0 + threadIdx.x < end ? token_of(m, r0 + threadIdx.x, h) : -1;
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * ROWS; i += blockDim.x) {
            const int r = i / ROWS, c = c0 + i % ROWS;
            tile[r][i % ROWS] = c < s.dim ? x_at<T>(m, r0 + r, tokens[r], p, h, c) : 0.0f;
        }
        __syncthreads();
        if (e < s.dim)
            for (int r = 0; r < ROWS; r++) {
                if (tokens[r] < 0) continue;
                const float g = g_at<T>(m, r0 + r, h, e);
#pragma unroll
                for (int c = 0; c < ROWS; c++) acc[c] = fmaf(tile[r][c], g, acc[c]);
            }
        if ((r0 - first) % LEVEL == LEVEL - ROWS || r0 + ROWS >= end)
#pragma unroll
            for (int c = 0; c < ROWS; c++) {
                sum[c] += acc[c];
                acc[c] = 0.0f;
            }
    }
    if (e >= s.dim) return;
    for (int c = 0; c < ROWS && c0 + c < s.dim; c++) {
        if (splits > 1) m.part[(((int64_t)split * m.a.heads + h) * s.dim + c0 + c) * s.dim + e] = sum[c];
        else m.d_w[h * m.dws[0] + (int64_t)(p * s.dim + c0 + c) * m.dws[1] + e] = sum[c];
    }
}

/* The groups' sums, in order, to a share. */
__device__ __forceinline__ void store_share(const matrix_kernel &m, int h, int e, float sum)
{
    __shared__ float groups[GROUPS][256];
    const int dim = m.a.side[m.side].dim;
    groups[threadIdx.y][e] = sum;
    __syncthreads();
    if (e >= dim || threadIdx.y > 0) return;
    for (int g = 1; g < GROUPS; g++) sum += groups[g][e];
    m.part[((int64_t)blockIdx.x * m.a.heads + h) * dim + e] = sum;
}

/* part = S, by shares of the rows; a group of threads takes every fourth row. */
template <typename T> __global__ void matrix_sum_g(const __grid_constant__ matrix_kernel m)
{
    const int h = blockIdx.y, e = threadIdx.x;
    int64_t first, end;
    share(m, blockIdx.x, SPLITS, &first, &end);
    float sum = 0.0f, acc = 0.0f;
    int left = LEVEL;
#pragma unroll 4
    for (int64_t r = first + threadIdx.y; r < end; r += GROUPS) {
        acc += e < m.a.side[m.side].dim && token_of(m, r, h) >= 0 ? g_at<T>(m, r, h, e) : 0.0f;
        if (--left == 0) {
            sum += acc;
            acc = 0.0f;
            left = LEVEL;
        }
    }
    store_share(m, h, e, sum + acc);
}

template <typename T> __global__ void matrix_d_pe(const __grid_constant__ matrix_kernel m)
{
    __shared__ float total[256];
    const int p = blockIdx.x, h = blockIdx.y, c = threadIdx.x, dim = m.a.side[m.side].dim;
    if (c < dim) {
        float sum = 0.0f;
        for (int s = 0; s < SPLITS; s++) sum += m.part[((int64_t)s * m.a.heads + h) * dim + c];
        total[c] = sum;
    }
    __syncthreads();
    if (c >= dim) return;
    float sum = 0.0f;
    const int64_t at = h * m.ws[0] + (int64_t)(p * dim + c) * m.ws[1];
    for (int e = 0; e < dim; e++) sum = fmaf(value_at<T>(m.w, m.w_f32, at + e), total[e], sum);
    m.d_pe[h * m.dps[0] + p * m.dps[1] + c] = sum;
}

/* part = pe W, by shares of W's rows. */
template <typename T> __global__ void matrix_sum_pe(const __grid_constant__ matrix_kernel m)
{
    const int h = blockIdx.y, e = threadIdx.x, dim = m.a.side[m.side].dim;
    const int64_t rows = (int64_t)m.positions * dim, per = (rows + SPLITS - 1) / SPLITS,
                  first = blockIdx.x * per;
    const int64_t end = first + per < rows ? first + per : rows;
    float sum = 0.0f, acc = 0.0f;
    int left = LEVEL, c = (int)((first + threadIdx.y) % dim);
    int64_t p = (first + threadIdx.y) / dim;
#pragma unroll 4
    for (int64_t i = first + threadIdx.y; i < end; i += GROUPS) {
        const float w = e < dim ? value_at<T>(m.w, m.w_f32, h * m.ws[0] + i * m.ws[1] + e) : 0.0f;
        acc = fmaf(value_at<T>(m.pe, m.pe_f32, h * m.ps[0] + p * m.ps[1] + c), w, acc);
        c += GROUPS; /* dim is a multiple of 8 */
        if (c >= dim) {
            c -= dim;
            p++;
        }
        if (--left == 0) {
            sum += acc;
            acc = 0.0f;
            left = LEVEL;
        }
    }
    store_share(m, h, e, sum + acc);
}

/* A thread a channel. */
static unsigned threads_of(const matrix_kernel &m)
{
    return (unsigned)(m.a.side[m.side].dim + 31) / 32 * 32;
}

static unsigned row_tiles(const matrix_kernel &m)
{
    return (unsigned)((m.views * m.a.rows + ROWS - 1) / ROWS);
}

template <typename T> static quern_status multiply(const matrix_kernel &m, cudaStream_t stream)
{
    matrix_forward<T><<<dim3(row_tiles(m), (unsigned)m.a.heads), threads_of(m), 0, stream>>>(m);
    return LAUNCHED("compress by weights");
}

template <typename T> static quern_status sum_pe(const matrix_kernel &m, cudaStream_t stream)
{
    matrix_sum_pe<T><<<dim3(SPLITS, (unsigned)m.a.heads), dim3(threads_of(m), GROUPS), 0, stream>>>(m);
    return LAUNCHED("compress by weights, encodings");
}

template <typename T> static quern_status sum_g(const matrix_kernel &m, cudaStream_t stream)
{
    matrix_sum_g<T><<<dim3(SPLITS, (unsigned)m.a.heads), dim3(threads_of(m), GROUPS), 0, stream>>>(m);
    return LAUNCHED("compress backward by weights, sums");
}

template <typename T> static quern_status d_pe(const matrix_kernel &m, cudaStream_t stream)
{
    matrix_d_pe<T><<<dim3((unsigned)m.positions, (unsigned)m.a.heads), threads_of(m), 0, stream>>>(m);
    return LAUNCHED("compress backward by weights, encodings");
}

template <typename T> static quern_status d_mean(const matrix_kernel &m, cudaStream_t stream)
{
    matrix_d_mean<T><<<dim3(row_tiles(m), (unsigned)m.a.heads), threads_of(m), 0, stream>>>(m);
    return LAUNCHED("compress backward by weights, means");
}

template <typename T>
static quern_status d_x(const matrix_kernel &m, const stage_seqs &seqs, cudaStream_t stream)
{
    const int64_t pieces = piece_bound(seqs, ROWS * m.a.d, 1);
    if (pieces > 0)
        matrix_d_x<T>
            <<<dim3((unsigned)pieces, (unsigned)m.a.d, (unsigned)m.a.heads), threads_of(m), 0, stream>>>(m);
    return LAUNCHED("compress backward by weights, tokens");
}

template <typename T> static quern_status d_w(const matrix_kernel &m, int splits, cudaStream_t stream)
{
    matrix_d_w<T><<<dim3((unsigned)((m.a.side[m.side].dim + ROWS - 1) / ROWS),
                         (unsigned)(m.positions * splits), (unsigned)m.a.heads),
                    threads_of(m), 0, stream>>>(m, splits);
    return LAUNCHED("compress backward by weights");
}

#endif
