/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.cu - mean compression of K and V, with an optional projection, and its backward.
 *
 * Forward: a thread owns eight columns of one head (of K or of V) and sums them over the block's l tokens,
 * eight 16-byte loads in flight; the threads of a block cover all heads, so each token's row is read once,
 * contiguously. Overlapping blocks (d < l) meet in L2. A projection multiplies the f32 mean, kept in
 * workspace, by W. Backward: a thread writes d tokens' columns from the l/d entries that cover them.
 * Limit: forward reads K and V once (read rate), backward writes dK and dV once (fill rate).
 */
#include "any/stages.cuh"
#include "common/chunk.cuh"

#include <stdio.h>

enum { THREADS = 256, SPLITS = 32 };

struct half_kernel { /* K or V */
    view4 x, cmp, d_cmp, d_x;
    float *mean, *d_mean; /* contiguous [rows][heads][dim], with a projection only */
    int dim;
    bool vec, vec_out, vec_d, d_cmp_f32, d_x_f32;
};

struct compress_kernel {
    seqs sq;
    half_kernel half[2];
    int heads;
    int64_t l, d, rows; /* rows: compressed rows of one batch view */
    bool add;
};

/* Sequence lengths in compressed rows, summed: cu_cmp [batch + 1]. One warp. */
__global__ void compress_borders(seqs sq, int64_t l, int64_t d, int32_t *cu_cmp)
{
    int32_t total = 0;
    if (threadIdx.x == 0) cu_cmp[0] = 0;
    for (int64_t base = 0; base < sq.batch; base += 32) {
        const int64_t b = base + threadIdx.x;
        int32_t n = 0;
        if (b < sq.batch) {
            const int64_t len = border(sq.cu_q, b + 1, sq.n_q) - border(sq.cu_q, b, sq.n_q);
            n = len >= l ? (int32_t)((len - l) / d + 1) : 0;
        }
        for (int w = 1; w < 32; w *= 2) {
            const int32_t left = __shfl_up_sync(~0u, n, w);
            if (threadIdx.x >= (unsigned)w) n += left;
        }
        if (b < sq.batch) cu_cmp[b + 1] = total + n;
        total += __shfl_sync(~0u, n, 31);
    }
}

/* The sequence of compressed row `row` of batch view `vb`, and the entry within it; false for a row past
 * the last. */
__device__ __forceinline__ bool entry_at(const compress_kernel &a, int64_t vb, int64_t row, sequence *seq, int64_t *entry)
{
    if (a.sq.cu_q == NULL) {
        *seq = sequence_at(a.sq, vb);
        *entry = row;
        return true;
    }
    int64_t lo = 0, hi = a.sq.batch; /* the last sequence that starts at or before row, empty ones skipped */
    while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (a.sq.cu_kv[mid] <= row) lo = mid;
        else hi = mid;
    }
    *seq = sequence_at(a.sq, lo);
    *entry = row - a.sq.cu_kv[lo];
    return a.sq.batch > 0 && row < a.sq.cu_kv[a.sq.batch];
}

template <typename T> __global__ void __launch_bounds__(THREADS) compress_mean(const __grid_constant__ compress_kernel a)
{
    const int chunks_k = a.half[0].dim / CHUNK * a.heads;
    int c = blockIdx.y * THREADS + threadIdx.x;
    const int which = c >= chunks_k;
    if (which) c -= chunks_k;
    const half_kernel &x = a.half[which];
    const int per_head = x.dim / CHUNK;
    if (c >= per_head * a.heads) return;
    const int h = c / per_head, col = c % per_head * CHUNK;
    const int64_t vb = blockIdx.x / a.rows, row = blockIdx.x % a.rows;
    sequence seq;
    int64_t entry;
    const bool in = entry_at(a, vb, row, &seq, &entry);
    float sum[CHUNK] = {};
    if (in) {
        const T *p = (const T *)x.x.p + seq.view_b * x.x.s[0] + (seq.q0 + entry * a.d) * x.x.s[1] + h * x.x.s[2] + col;
#pragma unroll 8
        for (int64_t t = 0; t < a.l; t++) {
            const chunk v = load_chunk(p + t * x.x.s[1], x.vec);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) sum[i] += v.x[i];
        }
    }
    chunk mean;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) mean.x[i] = sum[i] / (float)a.l;
    if (x.mean != NULL) store_chunk(x.mean + ((vb * a.rows + row) * a.heads + h) * x.dim + col, mean, true);
    else store_chunk((T *)x.cmp.p + vb * x.cmp.s[0] + row * x.cmp.s[1] + h * x.cmp.s[2] + col, mean, x.vec_out);
}

template <typename T> __device__ __forceinline__ float weight(const void *w, bool f32, int64_t at)
{
    return f32 ? ((const float *)w)[at] : to_float<T>(((const T *)w)[at]);
}

/* out[r][e] = sum_c in[r][c] W[c][e] (or W[e][c] where TRANSPOSED) for one head; 16 rows a block. `in` is f32
 * contiguous [rows][heads][dim] or the view (VIEW). */
template <typename T, bool TRANSPOSED>
__global__ void compress_project(const float *in, view4 in_view, bool in_view_f32, int64_t view_rows, float *out, view4 out_view,
                                 const void *w, bool w_f32, const int64_t ws0, const int64_t ws1, int heads, int dim, int64_t rows)
{
    extern __shared__ float tile[]; /* [16][dim] */
    const int h = blockIdx.y;
    const int64_t first = (int64_t)blockIdx.x * 16;
    for (int i = threadIdx.x; i < 16 * dim; i += blockDim.x) {
        const int64_t r = first + i / dim;
        float x = 0.0f;
        if (r < rows) {
            if (in != NULL) x = in[(r * heads + h) * dim + i % dim];
            else {
                const int64_t at = r / view_rows * in_view.s[0] + r % view_rows * in_view.s[1] + h * in_view.s[2] + i % dim;
                x = in_view_f32 ? ((const float *)in_view.p)[at] : to_float<T>(((const T *)in_view.p)[at]);
            }
        }
        tile[i] = x;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < dim; e += blockDim.x) {
        float acc[16] = {};
        for (int c = 0; c < dim; c++) {
            const float x = weight<T>(w, w_f32, h * ws0 + (TRANSPOSED ? e * ws1 + c : c * ws1 + e));
#pragma unroll
            for (int r = 0; r < 16; r++) acc[r] = fmaf(tile[r * dim + c], x, acc[r]);
        }
#pragma unroll
        for (int r = 0; r < 16; r++) {
            const int64_t row = first + r;
            if (row >= rows) continue;
            if (out != NULL) out[(row * heads + h) * dim + e] = acc[r];
            else ((T *)out_view.p)[row / view_rows * out_view.s[0] + row % view_rows * out_view.s[1] + h * out_view.s[2] + e] = from_float<T>(acc[r]);
        }
    }
}

/* dW[h][c][e] = sum_r mean[r][h][c] d_cmp[r][h][e]: SPLITS fixed shares of the rows, summed in order. */
template <typename T>
__global__ void compress_dw(const float *mean, view4 d, bool d_f32, int64_t view_rows, int heads, int dim, int64_t rows, float *part)
{
    const int h = blockIdx.z, split = blockIdx.y, c = blockIdx.x;
    const int64_t per = (rows + SPLITS - 1) / SPLITS, first = split * per, end = first + per < rows ? first + per : rows;
    for (int e = threadIdx.x; e < dim; e += blockDim.x) {
        float acc = 0.0f;
        for (int64_t r = first; r < end; r++) {
            const int64_t at = r / view_rows * d.s[0] + r % view_rows * d.s[1] + h * d.s[2] + e;
            acc = fmaf(mean[(r * heads + h) * dim + c], d_f32 ? ((const float *)d.p)[at] : to_float<T>(((const T *)d.p)[at]), acc);
        }
        part[(((int64_t)split * heads + h) * dim + c) * dim + e] = acc;
    }
}

__global__ void compress_dw_sum(const float *part, int64_t count, int dim, float *dw, int64_t s0, int64_t s1)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float sum = 0.0f;
    for (int s = 0; s < SPLITS; s++) sum += part[s * count + i];
    const int64_t h = i / dim / dim;
    dw[h * s0 + i / dim % dim * s1 + i % dim] = sum;
}

/* Tokens [j d, (j + 1) d) of a sequence lie in the entries j - l/d + 1 ... j. */
template <typename T> __global__ void __launch_bounds__(THREADS) compress_spread(const __grid_constant__ compress_kernel a)
{
    const int chunks_k = a.half[0].d_x.p != NULL ? a.half[0].dim / CHUNK * a.heads : 0;
    int c = blockIdx.y * THREADS + threadIdx.x;
    const int which = c >= chunks_k;
    if (which) c -= chunks_k;
    const half_kernel &x = a.half[which];
    const int per_head = x.dim / CHUNK;
    if (x.d_x.p == NULL || c >= per_head * a.heads) return;
    const int h = c / per_head, col = c % per_head * CHUNK;
    sequence seq;
    int64_t t0;
    if (!piece_at(a.sq, blockIdx.x, a.d, 1, &seq, &t0)) return;
    const int64_t entries = seq.nq >= a.l ? (seq.nq - a.l) / a.d + 1 : 0, j = t0 / a.d;
    const int64_t row0 = a.sq.cu_q == NULL ? 0 : a.sq.cu_kv[seq.b];
    chunk sum = {};
    for (int64_t e = j - a.l / a.d + 1 < 0 ? 0 : j - a.l / a.d + 1; e <= j && e < entries; e++) {
        chunk v;
        if (x.d_mean != NULL) v = load_chunk(x.d_mean + ((seq.view_b * a.rows + row0 + e) * a.heads + h) * x.dim + col, true);
        else {
            const int64_t at = seq.view_b * x.d_cmp.s[0] + (row0 + e) * x.d_cmp.s[1] + h * x.d_cmp.s[2] + col;
            v = x.d_cmp_f32 ? load_chunk((const float *)x.d_cmp.p + at, x.vec_d) : load_chunk((const T *)x.d_cmp.p + at, x.vec_d);
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

static const quern_tensor &dims_of(const quern_tensor &a, const quern_tensor &b) { return present(a) ? a : b; }

/* Rows of the compressed tensors in one batch view. */
static int64_t cmp_rows(const compress_args *args)
{
    const quern_tensor &t = present(args->k_cmp) ? args->k_cmp : present(args->d_k_cmp) ? args->d_k_cmp : args->v_cmp;
    return dims_of(t, args->d_v_cmp).shape[1];
}

static compress_kernel kernel_of(const compress_args *args)
{
    compress_kernel a = {};
    a.sq = seqs_of(args->seqs);
    a.heads = (int)args->k.shape[2];
    a.l = args->block_size, a.d = args->stride, a.rows = cmp_rows(args);
    a.add = args->accumulate;
    const quern_tensor *x[2] = {&args->k, &args->v}, *cmp[2] = {&args->k_cmp, &args->v_cmp};
    const quern_tensor *d_cmp[2] = {&args->d_k_cmp, &args->d_v_cmp}, *d_x[2] = {&args->d_k, &args->d_v};
    for (int i = 0; i < 2; i++) {
        half_kernel &h = a.half[i];
        h.x = view4_of(*x[i]), h.cmp = view4_of(*cmp[i]), h.d_cmp = view4_of(*d_cmp[i]), h.d_x = view4_of(*d_x[i]);
        h.dim = (int)x[i]->shape[3];
        h.vec = rows_aligned16(*x[i]);
        h.vec_out = rows_aligned16(present(*d_x[i]) ? *d_x[i] : *cmp[i]);
        h.vec_d = rows_aligned16(*d_cmp[i]);
        h.d_cmp_f32 = d_cmp[i]->dtype == QUERN_F32, h.d_x_f32 = d_x[i]->dtype == QUERN_F32;
    }
    return a;
}

struct compress_memory {
    float *mean[2], *d_mean[2], *dw[2];
};

static compress_memory carve(const compress_args *args, bool backward, void *workspace, size_t *bytes)
{
    compress_memory m = {};
    float *p = (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    size_t used = 0;
    const quern_tensor *w[2] = {&args->w_k, &args->w_v}, *x[2] = {&args->k, &args->v}, *dw[2] = {&args->d_w_k, &args->d_w_v};
    const int64_t views = args->k.shape[0], rows = cmp_rows(args);
    for (int i = 0; i < 2; i++) {
        if (!present(*w[i])) continue;
        const size_t n = (size_t)(views * rows * x[i]->shape[2] * x[i]->shape[3]);
        m.mean[i] = p + used, used += n;
        if (!backward) continue;
        m.d_mean[i] = p + used, used += n;
        if (present(*dw[i])) m.dw[i] = p + used, used += (size_t)(SPLITS * x[i]->shape[2] * x[i]->shape[3] * x[i]->shape[3]);
    }
    *bytes = used > 0 ? used * 4 + 15 : 0;
    return m;
}

bool compress_supports(const quern_exec *, const compress_args *args, char why[STAGE_WHY_BYTES])
{
    if (args->kind == QUERN_NSA_COMPRESS_LINEAR) {
        snprintf(why, STAGE_WHY_BYTES, "compress linear: the cuda backend takes mean and given");
        return false;
    }
    return true;
}

size_t compress_forward_bytes(const quern_exec *, const compress_args *args)
{
    size_t bytes;
    carve(args, false, NULL, &bytes);
    return bytes;
}

size_t compress_backward_bytes(const quern_exec *, const compress_args *args)
{
    size_t bytes;
    carve(args, true, NULL, &bytes);
    return bytes;
}

template <typename T> static quern_status means(const compress_args *args, const compress_kernel &a, cudaStream_t stream)
{
    const int64_t views = args->k.shape[0];
    const int chunks = (a.half[0].dim + a.half[1].dim) / CHUNK * a.heads;
    if (views * a.rows == 0 || chunks == 0) return QUERN_OK;
    compress_mean<T><<<dim3((unsigned)(views * a.rows), (unsigned)((chunks + THREADS - 1) / THREADS)), THREADS, 0, stream>>>(a);
    return LAUNCHED("compress mean");
}

template <typename T> static quern_status forward(const compress_args *args, void *workspace, cudaStream_t stream)
{
    compress_kernel a = kernel_of(args);
    size_t bytes;
    const compress_memory m = carve(args, false, workspace, &bytes);
    const quern_tensor *w[2] = {&args->w_k, &args->w_v};
    for (int i = 0; i < 2; i++) a.half[i].mean = m.mean[i];
    if (args->seqs.cu_q.data != NULL) compress_borders<<<1, 32, 0, stream>>>(a.sq, a.l, a.d, (int32_t *)args->seqs.cu_kv.data);
    quern_status status = means<T>(args, a, stream);
    const int64_t rows = args->k.shape[0] * a.rows;
    for (int i = 0; i < 2 && status == QUERN_OK && rows > 0; i++) {
        if (m.mean[i] == NULL) continue;
        const int dim = a.half[i].dim;
        compress_project<T, false><<<dim3((unsigned)((rows + 15) / 16), (unsigned)a.heads), 128, 16 * dim * 4, stream>>>(
            m.mean[i], a.half[i].cmp, false, a.rows, NULL, a.half[i].cmp, w[i]->data, w[i]->dtype == QUERN_F32, w[i]->strides[0], w[i]->strides[1],
            a.heads, dim, rows);
        status = LAUNCHED("compress project");
    }
    return status;
}

template <typename T> static quern_status backward(const compress_args *args, void *workspace, cudaStream_t stream)
{
    compress_kernel a = kernel_of(args);
    size_t bytes;
    const compress_memory m = carve(args, true, workspace, &bytes);
    const quern_tensor *w[2] = {&args->w_k, &args->w_v}, *dw[2] = {&args->d_w_k, &args->d_w_v};
    const int64_t rows = args->k.shape[0] * a.rows;
    quern_status status = QUERN_OK;
    for (int i = 0; i < 2; i++) a.half[i].mean = m.mean[i], a.half[i].d_mean = m.d_mean[i];
    if (m.dw[0] != NULL || m.dw[1] != NULL) {
        compress_kernel only_mean = a; /* a half without a projection has no mean to keep */
        for (int i = 0; i < 2; i++)
            if (m.mean[i] == NULL) only_mean.half[i].dim = 0;
        status = means<T>(args, only_mean, stream);
    }
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        if (m.d_mean[i] == NULL) continue;
        const half_kernel &h = a.half[i];
        const bool w_f32 = w[i]->dtype == QUERN_F32;
        if (rows > 0)
            compress_project<T, true><<<dim3((unsigned)((rows + 15) / 16), (unsigned)a.heads), 128, 16 * h.dim * 4, stream>>>(
                NULL, h.d_cmp, h.d_cmp_f32, a.rows, m.d_mean[i], h.d_cmp, w[i]->data, w_f32, w[i]->strides[0], w[i]->strides[1], a.heads, h.dim, rows);
        if (m.dw[i] != NULL) {
            compress_dw<T><<<dim3((unsigned)h.dim, SPLITS, (unsigned)a.heads), 128, 0, stream>>>(m.mean[i], h.d_cmp, h.d_cmp_f32, a.rows, a.heads, h.dim,
                                                                                                rows, m.dw[i]);
            const int64_t count = (int64_t)a.heads * h.dim * h.dim;
            compress_dw_sum<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(m.dw[i], count, h.dim, (float *)dw[i]->data, dw[i]->strides[0], dw[i]->strides[1]);
        }
        status = LAUNCHED("compress backward");
    }
    const int chunks = ((present(args->d_k) ? a.half[0].dim : 0) + (present(args->d_v) ? a.half[1].dim : 0)) / CHUNK * a.heads;
    const int64_t pieces = piece_bound(args->seqs, a.d, 1);
    if (status != QUERN_OK || chunks == 0 || pieces == 0) return status;
    compress_spread<T><<<dim3((unsigned)pieces, (unsigned)((chunks + THREADS - 1) / THREADS)), THREADS, 0, stream>>>(a);
    return LAUNCHED("compress spread");
}

quern_status compress_forward_run(const quern_exec *exec, const compress_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (args->k.dtype == QUERN_F32) return forward<float>(args, workspace, stream);
    return args->k.dtype == QUERN_BF16 ? forward<bf16>(args, workspace, stream) : forward<f16>(args, workspace, stream);
}

quern_status compress_backward_run(const quern_exec *exec, const compress_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    quern_status status = args->k.dtype == QUERN_F32    ? backward<float>(args, workspace, stream)
                          : args->k.dtype == QUERN_BF16 ? backward<bf16>(args, workspace, stream)
                                                        : backward<f16>(args, workspace, stream);
    if (args->accumulate) return status;
    if (status == QUERN_OK) status = fill_tail(exec, &args->seqs, true, &args->d_k, 0.0f);
    return status != QUERN_OK ? status : fill_tail(exec, &args->seqs, true, &args->d_v, 0.0f);
}
