/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - mean compression of K and V, and its backward.
 *
 * Forward: a thread owns eight columns of one head (of K or of V) and sums them over a quarter of the block's
 * l tokens, eight 16-byte loads in flight; 64 neighbours read 1 KB of each token's row contiguously, and the
 * four quarters are added in shared memory, in order. Overlapping blocks (d < l) read from L2. A projection
 * multiplies the f32 mean, kept in workspace, by W. Backward: a thread writes d tokens' columns from the l/d
 * entries that cover them. Limit: forward reads K and V once (read rate), backward writes dK and dV once
 * (fill rate).
 */
#ifndef QUERN_CUDA_COMPRESS_MEAN_KERNEL_CUH
#define QUERN_CUDA_COMPRESS_MEAN_KERNEL_CUH

#include "compress/matrix/params.cuh"
#include "common/chunk.cuh"

enum { THREADS = 256, COLUMNS = 64, PARTS = THREADS / COLUMNS };

/* VEC: all rows are aligned (asked at run time, it would keep loads from being issued together). ONCE: blocks
 * do not overlap, so each token is read once. */
template <typename T, bool VEC, bool ONCE>
__global__ void __launch_bounds__(THREADS) compress_mean(const __grid_constant__ compress_kernel a)
{
    __shared__ float4 shares[PARTS - 1][2][COLUMNS];
    let_next_start();
    const int chunks_k = a.side[0].dim / CHUNK * a.heads, column = threadIdx.x % COLUMNS,
              part = threadIdx.x / COLUMNS;
    const int groups = (chunks_k + a.side[1].dim / CHUNK * a.heads + COLUMNS - 1) / COLUMNS;
    const int64_t at =
        blockIdx.x / (unsigned)groups; /* neighbouring blocks read neighbouring columns of the same tokens */
    int c = (int)(blockIdx.x - at * groups) * COLUMNS + column;
    const int which = c >= chunks_k;
    if (which) c -= chunks_k;
    const compress_side &x = a.side[which];
    const int per_head = x.dim / CHUNK;
    const bool mine = c < per_head * a.heads;
    const int h = mine ? c / per_head : 0, col = mine ? (c - h * per_head) * CHUNK : 0;
    const int64_t vb = a.sq.cu_q != NULL ? 0 : at / a.rows, row = at - vb * a.rows;
    sequence seq;
    int64_t entry;
    const bool in = mine && entry_at(a, vb, row, &seq, &entry);
    float sum[CHUNK] = {};
    if (in) {
        const int from = (int)(part * a.l / PARTS), to = (int)((part + 1) * a.l / PARTS);
        const T *p = (const T *)x.x.p + seq.view_b * x.x.s[0] + (seq.q0 + entry * a.d + from) * x.x.s[1] +
                     h * x.x.s[2] + col;
#pragma unroll 8
        for (int t = from; t < to; t++, p += x.x.s[1]) {
            const chunk v = load_chunk<T, ONCE>(p, VEC);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) sum[i] += v.x[i];
        }
    }
    if (part > 0) {
        shares[part - 1][0][column] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        shares[part - 1][1][column] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
    if (part > 0 || !mine) return;
#pragma unroll
    for (int s = 0; s < PARTS - 1; s++) {
        const float4 lo = shares[s][0][column], hi = shares[s][1][column];
        sum[0] += lo.x;
        sum[1] += lo.y;
        sum[2] += lo.z;
        sum[3] += lo.w;
        sum[4] += hi.x;
        sum[5] += hi.y;
        sum[6] += hi.z;
        sum[7] += hi.w;
    }
    chunk mean;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) mean.x[i] = sum[i] / (float)a.l;
    if (x.mean != NULL) store_chunk(x.mean + ((vb * a.rows + row) * a.heads + h) * x.dim + col, mean, true);
    else
        store_chunk((T *)x.cmp.p + vb * x.cmp.s[0] + row * x.cmp.s[1] + h * x.cmp.s[2] + col, mean,
                    x.vec_out);
}

/* Tokens [j d, (j + 1) d) of a sequence lie in the entries j - l/d + 1 ... j. */
template <typename T>
__global__ void __launch_bounds__(THREADS) compress_spread(const __grid_constant__ compress_kernel a)
{
    const int chunks_k = a.side[0].d_x.p != NULL ? a.side[0].dim / CHUNK * a.heads : 0;
    int c = blockIdx.y * blockDim.x + threadIdx.x;
    const int which = c >= chunks_k;
    if (which) c -= chunks_k;
    const compress_side &x = a.side[which];
    const int per_head = x.dim / CHUNK;
    if (x.d_x.p == NULL || c >= per_head * a.heads) return;
    const int h = c / per_head, col = c % per_head * CHUNK;
    sequence seq;
    int64_t t0;
    if (!piece_at(a.sq, blockIdx.x, a.d, 1, &seq, &t0)) return;
    const bool reads = x.d_mean != NULL || x.d_cmp.p != NULL;
    const int64_t entries = reads ? mask_entries(seq.nq, a.l, a.d) : 0, j = t0 / a.d;
    const int64_t row0 = a.sq.cu_q == NULL || entries == 0 ? 0 : a.sq.cu_kv[seq.b];
    chunk sum = {};
    for (int64_t e = j - a.l / a.d + 1 < 0 ? 0 : j - a.l / a.d + 1; e <= j && e < entries; e++) {
        chunk v;
        if (x.d_mean != NULL)
            v = load_chunk(x.d_mean + ((seq.view_b * a.rows + row0 + e) * a.heads + h) * x.dim + col, true);
        else {
            const int64_t at = seq.view_b * x.d_cmp.s[0] + (row0 + e) * x.d_cmp.s[1] + h * x.d_cmp.s[2] + col;
            v = x.d_cmp_f32 ? load_chunk((const float *)x.d_cmp.p + at, x.vec_d)
                            : load_chunk((const T *)x.d_cmp.p + at, x.vec_d);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum.x[i] += v.x[i];
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) sum.x[i] /= (float)a.l;
    const int64_t end = t0 + a.d < seq.nq ? t0 + a.d : seq.nq;
    const int64_t at = seq.view_b * x.d_x.s[0] + (seq.q0 + t0) * x.d_x.s[1] + h * x.d_x.s[2] + col;
    for (int64_t t = t0; t < end; t++) {
        const int64_t p = at + (t - t0) * x.d_x.s[1];
        if (!x.d_x_f32) {
            store_chunk((T *)x.d_x.p + p, sum, x.vec_out);
        } else if (!a.add) {
            store_chunk((float *)x.d_x.p + p, sum, x.vec_out);
        } else {
            chunk v = load_chunk((float *)x.d_x.p + p, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v.x[i] += sum.x[i];
            store_chunk((float *)x.d_x.p + p, v, x.vec_out);
        }
    }
}

template <typename T>
static quern_status means(const compress_kernel &a, int64_t rows, int chunks, cudaStream_t stream)
{
    const unsigned grid = (unsigned)(rows * ((chunks + COLUMNS - 1) / COLUMNS));
    if (!(a.side[0].vec && a.side[1].vec)) compress_mean<T, false, false><<<grid, THREADS, 0, stream>>>(a);
    else if (a.d < a.l) compress_mean<T, true, false><<<grid, THREADS, 0, stream>>>(a);
    else compress_mean<T, true, true><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("compress mean");
}

template <typename T>
static quern_status spread(const compress_kernel &a, int64_t pieces, int chunks, cudaStream_t stream)
{
    const int threads = chunks < THREADS ? (chunks + 31) / 32 * 32 : THREADS;
    compress_spread<T>
        <<<dim3((unsigned)pieces, (unsigned)((chunks + threads - 1) / threads)), threads, 0, stream>>>(a);
    return LAUNCHED("compress spread");
}

#endif
