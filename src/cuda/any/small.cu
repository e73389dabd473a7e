/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* small.cu - the stages that only move data: convert, rowdot, list conversion, and the rows past the last
 * border of a packed batch. Limit of each: bytes moved over the copy rate. */
#include "any/stages.cuh"
#include "common/chunk.cuh"

#include <stdio.h>

enum { THREADS = 256 };

static unsigned blocks(int64_t n) { return (unsigned)((n + THREADS - 1) / THREADS); }

struct convert_kernel {
    view4 in, out;
    int64_t n, heads, dim, rows; /* rows: batch views * n * heads */
    const int32_t *cu;
    int64_t last;
    bool vec_in, vec_out;
};

template <typename A, typename B> __global__ void __launch_bounds__(THREADS) convert(const __grid_constant__ convert_kernel a)
{
    const int64_t per = a.dim / CHUNK, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * per) return;
    const int64_t row = i / per, c = i % per * CHUNK, h = row % a.heads, n = row / a.heads % a.n, b = row / a.heads / a.n;
    chunk x = {};
    if (a.cu == NULL || n < border(a.cu, a.last, a.n))
        x = load_chunk((const A *)a.in.p + b * a.in.s[0] + n * a.in.s[1] + h * a.in.s[2] + c, a.vec_in);
    store_chunk((B *)a.out.p + b * a.out.s[0] + n * a.out.s[1] + h * a.out.s[2] + c, x, a.vec_out);
}

bool convert_supports(const stage_exec *, const convert_args *, char *) { return true; }
size_t convert_bytes(const stage_exec *, const convert_args *) { return 0; }

template <typename A> static quern_status convert_to(const convert_kernel &a, quern_dtype to, cudaStream_t stream)
{
    const int64_t n = a.rows * (a.dim / CHUNK);
    if (n == 0) return QUERN_OK;
    if (to == QUERN_F32) convert<A, float><<<blocks(n), THREADS, 0, stream>>>(a);
    else if (to == QUERN_BF16) convert<A, bf16><<<blocks(n), THREADS, 0, stream>>>(a);
    else convert<A, f16><<<blocks(n), THREADS, 0, stream>>>(a);
    return LAUNCHED("convert");
}

quern_status convert_run(const stage_exec *exec, const convert_args *args, void *)
{
    const quern_tensor &t = args->in;
    const convert_kernel a = {view4_of(t), view4_of(args->out), t.shape[1], t.shape[2], t.shape[3], t.shape[0] * t.shape[1] * t.shape[2],
                              (const int32_t *)args->seqs.cu_q.data, args->seqs.batch, rows_aligned16(t), rows_aligned16(args->out)};
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (t.dtype == QUERN_F32) return convert_to<float>(a, args->out.dtype, stream);
    return t.dtype == QUERN_BF16 ? convert_to<bf16>(a, args->out.dtype, stream) : convert_to<f16>(a, args->out.dtype, stream);
}

struct rowdot_kernel {
    view4 a, b;
    view3 out;
    int64_t n, heads, dim, rows;
    const int32_t *cu;
    int64_t last;
    bool vec;
};

template <typename T, int LPR> __global__ void __launch_bounds__(THREADS) rowdot(const __grid_constant__ rowdot_kernel a)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LPR;
    const int c = threadIdx.x % LPR * CHUNK;
    const int64_t row = i < a.rows ? i : a.rows - 1, h = row % a.heads, n = row / a.heads % a.n, b = row / a.heads / a.n;
    float dot = 0.0f;
    if (c < a.dim && (a.cu == NULL || n < border(a.cu, a.last, a.n))) {
        const chunk x = load_chunk((const T *)a.a.p + b * a.a.s[0] + n * a.a.s[1] + h * a.a.s[2] + c, a.vec);
        const chunk y = load_chunk((const T *)a.b.p + b * a.b.s[0] + n * a.b.s[1] + h * a.b.s[2] + c, a.vec);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) dot = fmaf(x.x[e], y.x[e], dot);
    }
    for (int w = LPR / 2; w > 0; w /= 2) dot += __shfl_xor_sync(~0u, dot, w);
    if (c == 0 && i < a.rows) a.out.p[b * a.out.s[0] + h * a.out.s[1] + n * a.out.s[2]] = dot;
}

bool rowdot_supports(const stage_exec *, const rowdot_args *, char *) { return true; }
size_t rowdot_bytes(const stage_exec *, const rowdot_args *) { return 0; }

template <typename T> static quern_status rowdot_of(const rowdot_kernel &a, cudaStream_t stream)
{
    if (a.rows == 0) return QUERN_OK;
    if (a.dim <= 64) rowdot<T, 8><<<blocks(a.rows * 8), THREADS, 0, stream>>>(a);
    else if (a.dim <= 128) rowdot<T, 16><<<blocks(a.rows * 16), THREADS, 0, stream>>>(a);
    else rowdot<T, 32><<<blocks(a.rows * 32), THREADS, 0, stream>>>(a);
    return LAUNCHED("rowdot");
}

quern_status rowdot_run(const stage_exec *exec, const rowdot_args *args, void *)
{
    const quern_tensor &t = args->a;
    const rowdot_kernel a = {view4_of(t), view4_of(args->b), view3_of(args->out), t.shape[1], t.shape[2], t.shape[3],
                             t.shape[0] * t.shape[1] * t.shape[2], (const int32_t *)args->seqs.cu_q.data, args->seqs.batch,
                             rows_aligned16(t) && rows_aligned16(args->b)};
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (t.dtype == QUERN_F32) return rowdot_of<float>(a, stream);
    return t.dtype == QUERN_BF16 ? rowdot_of<bf16>(a, stream) : rowdot_of<f16>(a, stream);
}

/* One thread a list: expansion repeats each block to/from times, contraction keeps each target once. */
__global__ void list_convert(const int32_t *in, int64_t in_stride, int k_in, int32_t *out, int64_t out_stride, int k_out, int32_t *count,
                             int64_t count_stride, int64_t lists, int64_t from, int64_t to, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= lists) return;
    const int32_t *src = in + i * in_stride;
    int32_t *dst = out + i * out_stride;
    const int64_t end = (n + to - 1) / to, wide = from > to ? from / to : 1, narrow = to > from ? to / from : 1;
    int32_t last = -1;
    int kept = 0;
    while (kept < k_out) { /* the least target past `last`: sorts and removes repeats */
        int64_t best = end;
        for (int e = 0; e < k_in; e++) {
            if (src[e] < 0 || src[e] * from >= n) continue;
            const int64_t first = src[e] * wide / narrow, stop = first + wide;
            const int64_t x = last + 1 > first ? last + 1 : first;
            if (x < stop && x < best) best = x;
        }
        if (best >= end) break;
        dst[kept++] = last = (int32_t)best;
    }
    for (int e = kept; e < k_out; e++) dst[e] = -1;
    if (count != NULL) count[i * count_stride] = kept;
}

bool list_convert_supports(const stage_exec *, const list_convert_args *, char *) { return true; }
size_t list_convert_bytes(const stage_exec *, const list_convert_args *) { return 0; }

quern_status list_convert_run(const stage_exec *exec, const list_convert_args *args, void *)
{
    const int64_t lists = args->in.shape[0];
    if (lists == 0) return QUERN_OK;
    list_convert<<<blocks(lists), THREADS, 0, (cudaStream_t)exec->stream>>>(
        (const int32_t *)args->in.data, args->in.strides[0], (int)args->in.shape[1], (int32_t *)args->out.data, args->out.strides[0],
        (int)args->out.shape[1], (int32_t *)args->count.data, args->count.strides[0], lists, args->from, args->to, args->n);
    return LAUNCHED("list convert");
}

template <typename T> __global__ void tail4(view4 v, int64_t n, int64_t heads, int64_t dim, const int32_t *cu, int64_t last, float value)
{
    for (int64_t row = border(cu, last, n) + blockIdx.x; row < n; row += gridDim.x)
        for (int64_t i = threadIdx.x; i < heads * dim; i += blockDim.x) ((T *)v.p)[row * v.s[1] + i / dim * v.s[2] + i % dim] = from_float<T>(value);
}

quern_status fill_tail(const stage_exec *exec, const stage_seqs *s, bool queries, const quern_tensor *t, float value)
{
    const quern_tensor &cu = queries || s->cu_kv.data == NULL ? s->cu_q : s->cu_kv;
    if (cu.data == NULL || !present(*t) || t->shape[1] == 0) return QUERN_OK;
    const unsigned grid = t->shape[1] < 1024 ? (unsigned)t->shape[1] : 1024;
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const view4 v = view4_of(*t);
    const int32_t *borders = (const int32_t *)cu.data;
    if (t->dtype == QUERN_F32) tail4<float><<<grid, 128, 0, stream>>>(v, t->shape[1], t->shape[2], t->shape[3], borders, s->batch, value);
    else if (t->dtype == QUERN_BF16) tail4<bf16><<<grid, 128, 0, stream>>>(v, t->shape[1], t->shape[2], t->shape[3], borders, s->batch, value);
    else tail4<f16><<<grid, 128, 0, stream>>>(v, t->shape[1], t->shape[2], t->shape[3], borders, s->batch, value);
    return LAUNCHED("tail");
}

__global__ void tail3(view3 v, int64_t n, int64_t heads, const int32_t *cu, int64_t last, float value)
{
    const int64_t first = border(cu, last, n), count = (n - first) * heads;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        v.p[i / (n - first) * v.s[1] + (first + i % (n - first)) * v.s[2]] = value;
}

quern_status fill_tail_stat(const stage_exec *exec, const stage_seqs *s, const quern_tensor *t, float value)
{
    if (s->cu_q.data == NULL || !present(*t) || t->shape[2] == 0) return QUERN_OK;
    tail3<<<256, 256, 0, (cudaStream_t)exec->stream>>>(view3_of(*t), t->shape[2], t->shape[1], (const int32_t *)s->cu_q.data, s->batch, value);
    return LAUNCHED("tail");
}
