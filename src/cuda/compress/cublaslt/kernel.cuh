/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - compression's products by weights, and their gradients, on tensor cores, for inputs of 16
 * bits. For each product a kernel packs the operands without gaps, cuBLASLt (common/gemm.cu) multiplies all
 * heads at once with f32 sums, and a kernel stores the result, each place once and in one order.
 *
 * An entry compresses l tokens, entries begin d tokens apart, so overlap = l / d entries read a token:
 *   y    = [rows][positions][terms][D] x [positions][terms][D][D]     of tokens or means
 *   d_x  = [blocks of d tokens][overlap][terms][D] x [d][D][overlap][terms][D]^T: entries j - m, m < overlap,
 *          read token j d + f, at position m d + f of W; the mean's gradient is the case of one position
 *   d_w  = [rows][positions][parts][D]^T x [rows][parts][D]
 *
 * Values that need more than 16 bits (means, gradients and weights in f32) are split into two parts of bf16:
 * the value rounded, and its remainder rounded. That keeps the range and loses 2^-18 of a value. The other
 * operand is bf16 then, too: an f16 splits into two parts exactly. f16 means times f16 weights use parts of
 * f16. The terms of y and d_x are the pairs (part of the row, part of W): (0, 0), (1, 0), (0, 1). The last
 * leaves NaN and infinity out, which the first has added already. d_w multiplies all parts of X by all of G
 * and adds the up to four products. X = tokens + pe is never formed: pe W is added to y, and pe (x) S, S =
 * sum of G's rows, to d_w (both in `total`).
 *
 * Rows, then positions, are divided so that an operand takes at most 32 MiB: it is then in L2 when cuBLASLt
 * reads it, and no workspace grows with the sequence. Limit: packing and storing; D is too small to fill the
 * tensor cores.
 */
#ifndef QUERN_CUDA_COMPRESS_CUBLASLT_KERNEL_CUH
#define QUERN_CUDA_COMPRESS_CUBLASLT_KERNEL_CUH

#include "compress/cublaslt/params.cuh"
#include "common/chunk.cuh"
#include "common/gemm.cuh"

enum { THREADS = 256 };

/* ---- kernels ---- */

template <typename E> __device__ __forceinline__ void split(const chunk &v, chunk &high, chunk &low)
{
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float x = to_float<E>(from_float<E>(v.x[i]));
        if (isinf(x) && !isinf(v.x[i]))
            x = __uint_as_float(__float_as_uint(v.x[i]) & 0xffff0000u); /* rounded up to infinity: truncate */
        high.x[i] = x;
        low.x[i] = isinf(x) ? 0.0f : v.x[i] - x;
    }
}

__device__ __forceinline__ chunk finite(chunk v)
{
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        if (!isfinite(v.x[i])) v.x[i] = 0.0f;
    return v;
}

/* Stores the terms of a row, one every dim elements: its parts, then, where W has two, the first again. */
template <typename E>
__device__ __forceinline__ void store_terms(E *to, const chunk &v, int parts, int terms, int dim)
{
    chunk high = v, low;
    if (terms > 1) split<E>(v, high, low);
    store_chunk(to, high, true);
    if (parts > 1) store_chunk(to + dim, low, true);
    if (terms > parts) store_chunk(to + parts * dim, finite(high), true);
}

/* Packs W [heads][P D][D] as [heads][P][terms][D][D], or for d_x (overlap > 0) as
 * [heads][d][D][overlap][terms][D]: its first part once for each part of the rows, then its second if any. */
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS)
    gemm_weights(const __grid_constant__ matrix_kernel m, int parts, int terms, int overlap, E *to)
{
    const int dim = m.a.side[m.side].dim, per = dim / CHUNK;
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)m.a.heads * m.positions * dim * per) return;
    const int e = (int)(i % per) * CHUNK, c = (int)(i / per % dim);
    const int64_t at = i / per / dim, h = at / m.positions, p = at % m.positions,
                  from = h * m.ws[0] + (p * dim + c) * m.ws[1] + e;
    const chunk w =
        m.w_f32 ? load_chunk((const float *)m.w + from, m.w_vec) : load_chunk((const T *)m.w + from, m.w_vec);
    int64_t step = dim;
    if (overlap == 0) {
        to += (at * terms * dim + c) * dim + e;
        step *= dim;
    } else {
        const int64_t stride = m.positions / overlap, row = (h * stride + p % stride) * dim + c;
        to += (row * overlap + p / stride) * terms * dim + e;
    }
    chunk high = w, low;
    if (terms > parts) {
        split<E>(w, high, low);
        store_chunk(to + parts * step, low, true);
    }
    store_chunk(to, high, true);
    if (parts > 1) store_chunk(to + step, high, true);
}

/* Packs rows `first` ... of X at positions [p0, p0 + count), a block of threads a row:
 * [heads][rows][count][terms][D]. */
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) gemm_rows(const __grid_constant__ matrix_kernel m, int64_t first,
                                                     int64_t p0, int count, int parts, int terms, E *to)
{
    const compress_side &s = m.a.side[m.side];
    const int per = s.dim / CHUNK;
    const int64_t r = first + blockIdx.x, token = token_of(m, r, 0);
    for (int i = threadIdx.x; i < count * m.a.heads * per; i += THREADS) {
        const int c = i % per * CHUNK, h = i / per % m.a.heads, p = i / per / m.a.heads;
        chunk v = {};
        if (token >= 0 && s.mean != NULL) v = load_chunk(s.mean + (r * m.a.heads + h) * s.dim + c, true);
        else if (token >= 0)
            v = load_chunk((const T *)s.x.p + token + (p0 + p) * s.x.s[1] + h * s.x.s[2] + c, s.vec);
        store_terms<E>(to + (((int64_t)h * gridDim.x + blockIdx.x) * count + p) * terms * s.dim + c, v, parts,
                       terms, s.dim);
    }
}

/* Packs rows of G: [heads][rows][overlap][terms][D]. Row r is entry r; or, for d_x of tokens (`blocks`), the
 * entries that read block r of d tokens: the m0-th before the newest one, and those before that. */
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS)
    gemm_gradients(const __grid_constant__ matrix_kernel m, int64_t first, bool blocks, int64_t m0,
                   int overlap, int parts, int terms, E *to)
{
    const compress_side &s = m.a.side[m.side];
    const int per = s.dim / CHUNK;
    int64_t row = first + blockIdx.x, newest = 0, entries = 0; /* row: of entry 0 */
    if (blocks) {
        sequence seq;
        int64_t t0;
        if (piece_at(m.a.sq, row, m.a.d, 1, &seq, &t0)) {
            newest = t0 / m.a.d;
            entries = mask_entries(seq.nq, m.a.l, m.a.d);
            row = m.a.sq.cu_q == NULL ? seq.view_b * m.a.rows : m.a.sq.cu_kv[seq.b];
        }
    } else if (token_of(m, row, 0) >= 0) {
        entries = 1;
    }
    for (int i = threadIdx.x; i < overlap * m.a.heads * per; i += THREADS) {
        const int c = i % per * CHUNK, h = i / per % m.a.heads, before = i / per / m.a.heads;
        const int64_t entry = newest - m0 - before, r = row + entry;
        chunk v = {};
        if (entry >= 0 && entry < entries) {
            const int64_t at =
                r / m.a.rows * s.d_cmp.s[0] + r % m.a.rows * s.d_cmp.s[1] + h * s.d_cmp.s[2] + c;
            v = s.d_cmp_f32 ? load_chunk((const float *)s.d_cmp.p + at, s.vec_d)
                            : load_chunk((const T *)s.d_cmp.p + at, s.vec_d);
        }
        store_terms<E>(to + (((int64_t)h * gridDim.x + blockIdx.x) * overlap + before) * terms * s.dim + c, v,
                       parts, terms, s.dim);
    }
}

/* Stores y from [heads][rows][D]. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_to_rows(const __grid_constant__ matrix_kernel m, int64_t first, const float *from)
{
    const compress_side &s = m.a.side[m.side];
    const int64_t r = first + blockIdx.x;
    T *out = (T *)s.cmp.p + r / m.a.rows * s.cmp.s[0] + r % m.a.rows * s.cmp.s[1];
    for (int i = threadIdx.x; i < m.a.heads * s.dim / CHUNK; i += THREADS) {
        const int c = i * CHUNK % s.dim, h = i * CHUNK / s.dim;
        chunk v = load_chunk(from + ((int64_t)h * gridDim.x + blockIdx.x) * s.dim + c, true);
        if (m.pe != NULL) {
            const bool entry = token_of(m, r, 0) >= 0;
#pragma unroll
            for (int k = 0; k < CHUNK; k++) v.x[k] += entry ? m.total[h * s.dim + c + k] : 0.0f;
        }
        store_chunk(out + h * s.cmp.s[2] + c, v, s.vec_out);
    }
}

/* Stores d_x of the tokens f0 ... f0 + count - 1 of each block of d, from [heads][rows][count][D]. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_to_tokens(const __grid_constant__ matrix_kernel m, int64_t first, int64_t f0, int count,
                   const float *from)
{
    const compress_side &s = m.a.side[m.side];
    const int per = s.dim / CHUNK;
    sequence seq;
    int64_t t0;
    if (!piece_at(m.a.sq, first + blockIdx.x, m.a.d, 1, &seq, &t0)) return;
    for (int i = threadIdx.x; i < count * m.a.heads * per; i += THREADS) {
        const int c = i % per * CHUNK, h = i / per % m.a.heads, f = i / per / m.a.heads;
        const int64_t t = t0 + f0 + f;
        if (t >= seq.nq) break;
        chunk v = load_chunk(from + (((int64_t)h * gridDim.x + blockIdx.x) * count + f) * s.dim + c, true);
        const int64_t at = seq.view_b * s.d_x.s[0] + (seq.q0 + t) * s.d_x.s[1] + h * s.d_x.s[2] + c;
        if (!s.d_x_f32) {
            store_chunk((T *)s.d_x.p + at, v, s.vec_out);
            continue;
        }
        if (m.a.add) {
            const chunk old = load_chunk((float *)s.d_x.p + at, false);
#pragma unroll
            for (int k = 0; k < CHUNK; k++) v.x[k] += old.x[k];
        }
        store_chunk((float *)s.d_x.p + at, v, s.vec_out);
    }
}

/* Stores d_w at positions [p0, p0 + count) from [heads][count][x_parts][D][g_parts][D]. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_to_weights(const __grid_constant__ matrix_kernel m, int64_t p0, int64_t count, int x_parts,
                    int g_parts, const float *from)
{
    const int dim = m.a.side[m.side].dim;
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= m.a.heads * count * dim * dim) return;
    const int e = (int)(i % dim), c = (int)(i / dim % dim);
    const int64_t at = i / dim / dim, h = at / count, p = at % count;
    const float *v = from + ((at * x_parts * dim + c) * g_parts) * dim + e;
    float sum = v[0];
    if (isfinite(sum)) {
        float less = 0.0f;
        for (int k = x_parts * g_parts - 1; k > 0; k--)
            less += v[((int64_t)(k / g_parts) * dim * g_parts + k % g_parts) * dim];
        sum += less;
    }
    if (m.pe != NULL)
        sum = fmaf(value_at<T>(m.pe, m.pe_f32, h * m.ps[0] + (p0 + p) * m.ps[1] + c), m.total[h * dim + e],
                   sum);
    m.d_w[h * m.dws[0] + ((p0 + p) * dim + c) * m.dws[1] + e] = sum;
}

static gemm_shape shape_of(const gemm_plan &p, int64_t m, int64_t n, int64_t k)
{
    gemm_shape s = {};
    s.f16 = p.f16;
    s.batch = p.heads;
    s.m = m;
    s.n = n;
    s.k = k;
    s.lda = k;
    s.ldb = n;
    s.ldc = n;
    s.a_stride = m * k;
    s.b_stride = k * n;
    s.c_stride = m * n;
    s.scratch_bytes = (int64_t)p.scratch;
    return s;
}

static int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}
static unsigned blocks_of(int64_t items)
{
    return (unsigned)((items + THREADS - 1) / THREADS);
}

/* ---- the three products ---- */

/* E: the dtype of the products' operands. */
template <typename T, typename E>
static quern_status y_product(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                              cudaStream_t stream)
{
    const blocking &u = p.y;
    const int64_t depth = p.terms * p.dim;
    const int parts = (int)p.x_parts, terms = (int)p.terms;
    quern_status status = QUERN_OK;
    gemm_weights<T, E><<<blocks_of(p.heads * p.positions * p.dim * p.dim / CHUNK), THREADS, 0, stream>>>(
        m, parts, terms, 0, (E *)at.weights);
    for (int64_t r = 0; r < u.all_rows; r += u.rows) {
        const int64_t rows = smaller(u.rows, u.all_rows - r);
        for (int64_t i = 0; i < p.positions && status == QUERN_OK; i += u.outer) {
            const int64_t count = smaller(u.outer, p.positions - i);
            gemm_rows<T, E>
                <<<(unsigned)rows, THREADS, 0, stream>>>(m, r, i, (int)count, parts, terms, (E *)at.a);
            gemm_shape s = shape_of(p, rows, p.dim, count * depth);
            s.b_stride = p.positions * depth * p.dim;
            status = LAUNCHED("compress by weights, rows");
            if (status == QUERN_OK)
                status = gemm_run(s, at.a, at.weights + i * depth * p.dim * 2, (float *)at.c, i > 0,
                                  at.scratch, stream);
        }
        if (status != QUERN_OK) return status;
        gemm_to_rows<T><<<(unsigned)rows, THREADS, 0, stream>>>(m, r, (const float *)at.c);
    }
    return LAUNCHED("compress by weights");
}

/* cuBLASLt writes the mean's gradient itself. */
template <typename T, typename E>
static quern_status d_x_product(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                cudaStream_t stream)
{
    const blocking &u = p.d_x;
    const bool mean = m.a.side[m.side].mean != NULL;
    const int parts = (int)p.g_parts, terms = (int)p.terms;
    const int64_t depth = p.terms * p.dim;
    quern_status status = QUERN_OK;
    gemm_weights<T, E><<<blocks_of(p.heads * p.positions * p.dim * p.dim / CHUNK), THREADS, 0, stream>>>(
        m, parts, terms, (int)p.overlap, (E *)at.weights);
    for (int64_t r = 0; r < u.all_rows; r += u.rows) {
        const int64_t rows = smaller(u.rows, u.all_rows - r);
        for (int64_t f = 0; f < p.stride; f += u.outer) {
            const int64_t count = smaller(u.outer, p.stride - f);
            for (int64_t i = 0; i < p.overlap && status == QUERN_OK; i += u.inner) {
                const int64_t overlap = smaller(u.inner, p.overlap - i);
                if (f == 0 || u.inner < p.overlap)
                    gemm_gradients<T, E><<<(unsigned)rows, THREADS, 0, stream>>>(m, r, !mean, i, (int)overlap,
                                                                                 parts, terms, (E *)at.a);
                gemm_shape s = shape_of(p, rows, count * p.dim, overlap * depth);
                s.b_transposed = 1;
                s.ldb = p.overlap * depth;
                s.b_stride = p.stride * p.dim * s.ldb;
                if (mean) {
                    s.ldc = p.heads * p.dim;
                    s.c_stride = p.dim;
                }
                float *c = mean ? m.a.side[m.side].d_mean + r * s.ldc : (float *)at.c;
                status = LAUNCHED("compress backward, gradients");
                if (status == QUERN_OK)
                    status = gemm_run(s, at.a, at.weights + (f * p.dim * s.ldb + i * depth) * 2, c, i > 0,
                                      at.scratch, stream);
            }
            if (status != QUERN_OK) return status;
            if (!mean)
                gemm_to_tokens<T>
                    <<<(unsigned)rows, THREADS, 0, stream>>>(m, r, f, (int)count, (const float *)at.c);
        }
    }
    return LAUNCHED("compress backward by weights");
}

template <typename T, typename E>
static quern_status d_w_product(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                cudaStream_t stream)
{
    const blocking &u = p.d_w;
    quern_status status = QUERN_OK;
    for (int64_t i = 0; i < p.positions; i += u.outer) {
        const int64_t count = smaller(u.outer, p.positions - i);
        for (int64_t r = 0; r < u.all_rows && status == QUERN_OK; r += u.rows) {
            const int64_t rows = smaller(u.rows, u.all_rows - r);
            gemm_rows<T, E><<<(unsigned)rows, THREADS, 0, stream>>>(m, r, i, (int)count, (int)p.x_parts,
                                                                    (int)p.x_parts, (E *)at.a);
            gemm_gradients<T, E><<<(unsigned)rows, THREADS, 0, stream>>>(m, r, false, 0, 1, (int)p.g_parts,
                                                                         (int)p.g_parts, (E *)at.b);
            gemm_shape s = shape_of(p, count * p.x_parts * p.dim, p.g_parts * p.dim, rows);
            s.a_transposed = 1;
            s.lda = s.m;
            status = LAUNCHED("compress weights' gradient, operands");
            if (status == QUERN_OK)
                status = gemm_run(s, at.a, at.b, (float *)at.c, r > 0, at.scratch, stream);
        }
        if (status != QUERN_OK) return status;
        gemm_to_weights<T><<<blocks_of(p.heads * count * p.dim * p.dim), THREADS, 0, stream>>>(
            m, i, count, (int)p.x_parts, (int)p.g_parts, (const float *)at.c);
    }
    return LAUNCHED("compress weights' gradient");
}

template <typename T, typename E>
static quern_status backward(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                             cudaStream_t stream)
{
    quern_status status = QUERN_OK;
    if (p.d_x.all_rows > 0) status = d_x_product<T, E>(p, m, at, stream);
    return status == QUERN_OK && m.d_w != NULL ? d_w_product<T, E>(p, m, at, stream) : status;
}

#endif
