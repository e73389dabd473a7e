/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gate.cu - g_b = sigmoid(q . w_b), o = sum_b g_b o_b, in one pass; and its backward in one pass:
 *   r_b = dO . o_b,  dO_b = g_b dO,  delta_b = g_b r_b,  dlogit_b = r_b g_b (1 - g_b),
 *   dQ = sum_b dlogit_b w_b,  dW_b = sum over rows of dlogit_b q.
 *
 * LPR lanes own a row (one head of one token), eight elements each, so a row is one coalesced read per
 * tensor. A lane group keeps its head over a slice of tokens: the head's three weight vectors stay in
 * registers (24 floats a lane), and the backward's dW accumulates there, is written once per slice, and is
 * summed in slice order by a second kernel. The next row is loaded while this one is reduced across the lanes
 * (12 shuffles): 48 KB in flight an SM. Where all activations have one layout, one offset serves them all.
 * Limit: bytes moved over the copy rate.
 */
#include "common/chunk.cuh"
#include "stages.cuh"

#include <math.h>
#include <stdio.h>

enum { THREADS = 256, MOST_SLICES = 264 };

struct gate_kernel {
    int64_t rows;        /* tokens, all sequences */
    int64_t n;           /* tokens of one batch view */
    int64_t tokens;      /* of a slice */
    int64_t valid_index; /* varlen: index of the last element of cu */
    const int32_t *cu;
    int heads, dim, dim_v, kind;
    view4 q, o, d_o, ob[3], d_ob[3], d_q;
    view4 gates, d_gates;
    view3 delta[3];
    const void *w;
    int64_t ws[2];
    bool w_f32, vec, dq_f32, add_q, same; /* same: q, o, o_b, d_o, d_o_b have the strides of o or d_o */
    float *dw_part;                       /* [slices][H][3][D] */
};

template <typename T>
__device__ __forceinline__ chunk weight_chunk(const gate_kernel &a, int h, int b, int c, bool in)
{
    chunk r = {};
    if (!in) return r;
    const int64_t at = h * a.ws[0] + b * a.ws[1] + c * CHUNK;
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        r.x[i] = a.w_f32 ? ((const float *)a.w)[at + i] : to_float<T>(((const T *)a.w)[at + i]);
    return r;
}

/* Eight elements as they stand in memory. ONCE: evicted first, which the forward gains from and the backward
 * not. */
template <typename T> struct raw_chunk {
    uint4 r[sizeof(T) / 2];
};

template <typename T, bool ONCE>
__device__ __forceinline__ raw_chunk<T> load_raw(const void *base, int64_t at, bool vec)
{
    raw_chunk<T> c;
    const T *p = (const T *)base + at;
    if (vec) {
#pragma unroll
        for (unsigned i = 0; i < sizeof(T) / 2; i++)
            c.r[i] = ONCE ? __ldcs((const uint4 *)p + i) : __ldg((const uint4 *)p + i);
    } else {
        T *t = (T *)c.r;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) t[i] = p[i];
    }
    return c;
}

template <typename T> __device__ __forceinline__ float element(const raw_chunk<T> &c, int i)
{
    return to_float<T>(((const T *)c.r)[i]);
}

/* A token that a lane group walks over: its batch view, its place in it, and its offset where layouts are
 * one. */
struct place {
    int64_t b, n, at;
};

__device__ __forceinline__ place place_at(const gate_kernel &a, const view4 &like, int64_t row, int h,
                                          int col)
{
    const int64_t b = a.rows == a.n ? 0 : row / a.n, n = row - b * a.n;
    return {b, n, b * like.s[0] + n * like.s[1] + h * like.s[2] + col};
}

template <bool SAME>
__device__ __forceinline__ int64_t offset_of(const view4 &v, const place &p, int h, int col)
{
    return SAME ? p.at : p.b * v.s[0] + p.n * v.s[1] + h * v.s[2] + col;
}

__device__ __forceinline__ float *floats_at(const view4 &v, const place &p, int h)
{
    return (float *)v.p + p.b * v.s[0] + p.n * v.s[1] + h * v.s[2];
}

template <typename T, int LPR, bool SAME>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 2 ? 3 : 2)
    gate_forward(const __grid_constant__ gate_kernel a)
{
    const int group = (blockIdx.y * THREADS + threadIdx.x) / LPR, c = threadIdx.x % LPR, col = c * CHUNK;
    const bool head_in = group < a.heads, weights = a.kind == GATE_WEIGHTS;
    const int h = head_in ? group : a.heads - 1;
    const bool in_q = weights && col < a.dim, in_v = col < a.dim_v;
    chunk w[3];
#pragma unroll
    for (int b = 0; b < 3; b++) w[b] = weight_chunk<T>(a, h, b, c, in_q);
    const int64_t valid = a.cu != NULL ? cu_seqlens_at(a.cu, a.valid_index, a.n) : a.n;
    const int64_t first = (int64_t)blockIdx.x * a.tokens,
                  end = first + a.tokens < a.rows ? first + a.tokens : a.rows;
    struct loaded {
        place p;
        bool live;
        raw_chunk<T> q, ob[3];
    } next, now;
    auto load = [&](int64_t row, loaded &x) {
        x.q = {};
        x.ob[0] = {};
        x.ob[1] = {};
        x.ob[2] = {};
        x.p = place_at(a, a.ob[0], row, h, col);
        x.live = row < end && x.p.n < valid;
        if (!x.live) return;
        if (in_q) x.q = load_raw<T, true>(a.q.p, offset_of<SAME>(a.q, x.p, h, col), a.vec);
        if (!in_v) return;
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (a.ob[i].p != NULL)
                x.ob[i] = load_raw<T, true>(a.ob[i].p, offset_of<SAME>(a.ob[i], x.p, h, col), a.vec);
    };
    load(first, next);
    for (int64_t row = first; row < end; row++) {
        now = next;
        load(row + 1, next);
        const place &p = now.p;
        float g[3] = {};
        if (weights) {
#pragma unroll
            for (int e = 0; e < CHUNK; e++) {
                const float q = element(now.q, e);
#pragma unroll
                for (int i = 0; i < 3; i++) g[i] = fmaf(q, w[i].x[e], g[i]);
            }
#pragma unroll
            for (int step = LPR / 2; step > 0; step /= 2)
#pragma unroll
                for (int i = 0; i < 3; i++) g[i] += __shfl_xor_sync(~0u, g[i], step);
        }
        if (!head_in) continue;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (weights) g[i] = 1.0f / (1.0f + expf(-g[i]));
            else if (a.kind == GATE_NONE) g[i] = 1.0f / 3.0f;
            else g[i] = now.live ? floats_at(a.gates, p, h)[i] : 0.0f;
        }
        if (a.gates.p != NULL && a.kind != GATE_GIVEN && c < 3)
            floats_at(a.gates, p, h)[c] = now.live ? (c == 0 ? g[0] : c == 1 ? g[1] : g[2]) : 0.0f;
        if (a.o.p == NULL || !in_v) continue;
        chunk o;
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            o.x[e] = fmaf(g[2], element(now.ob[2], e),
                          fmaf(g[1], element(now.ob[1], e), g[0] * element(now.ob[0], e)));
        store_chunk((T *)a.o.p + offset_of<SAME>(a.o, p, h, col), o, a.vec);
    }
}

/* x[i] by selection: a computed index would put x into local memory. */
__device__ __forceinline__ float of_branch(const float (&x)[3], int i)
{
    return i == 0 ? x[0] : i == 1 ? x[1] : x[2];
}

/* A block's share of d_w_gate, of one head's chunk of channels. */
__device__ __forceinline__ void store_dw_part(const gate_kernel &a, int h, int col, const chunk (&dw)[3])
{
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float *p = a.dw_part + (((int64_t)blockIdx.x * a.heads + h) * 3 + i) * a.dim + col;
#pragma unroll
        for (int e = 0; e < CHUNK; e++) p[e] = dw[i].x[e];
    }
}

template <typename T, int LPR, bool SAME>
__global__ void __launch_bounds__(THREADS, 2) gate_backward(const __grid_constant__ gate_kernel a)
{
    const int group = (blockIdx.y * THREADS + threadIdx.x) / LPR, c = threadIdx.x % LPR, col = c * CHUNK;
    const bool head_in = group < a.heads, weights = a.kind == GATE_WEIGHTS, none = a.kind == GATE_NONE;
    const int h = head_in ? group : a.heads - 1;
    const bool in_q = weights && col < a.dim, in_v = col < a.dim_v;
    chunk w[3], dw[3] = {};
#pragma unroll
    for (int b = 0; b < 3; b++) w[b] = weight_chunk<T>(a, h, b, c, in_q);
    const int64_t valid = a.cu != NULL ? cu_seqlens_at(a.cu, a.valid_index, a.n) : a.n;
    const int64_t first = (int64_t)blockIdx.x * a.tokens,
                  end = first + a.tokens < a.rows ? first + a.tokens : a.rows;
    struct loaded {
        place p;
        bool live;
        float g[3];
        raw_chunk<T> q, d_o, ob[3];
    } next, now;
    auto load = [&](int64_t row, loaded &x) {
        x.q = {};
        x.d_o = {};
        x.ob[0] = {};
        x.ob[1] = {};
        x.ob[2] = {};
        x.p = place_at(a, a.d_o, row, h, col);
        x.live = row < end && x.p.n < valid;
        x.g[0] = x.g[1] = x.g[2] = none ? 1.0f / 3.0f : 0.0f;
        if (!x.live) return;
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (!none) x.g[i] = floats_at(a.gates, x.p, h)[i];
        if (in_q) x.q = load_raw<T, false>(a.q.p, offset_of<SAME>(a.q, x.p, h, col), a.vec);
        if (!in_v) return;
        x.d_o = load_raw<T, false>(a.d_o.p, offset_of<SAME>(a.d_o, x.p, h, col), a.vec);
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (a.ob[i].p != NULL)
                x.ob[i] = load_raw<T, false>(a.ob[i].p, offset_of<SAME>(a.ob[i], x.p, h, col), a.vec);
    };
    load(first, next);
    for (int64_t row = first; row < end; row++) {
        now = next;
        load(row + 1, next);
        const place &p = now.p;
        float dot[3] = {}, dlogit[3];
#pragma unroll
        for (int e = 0; e < CHUNK; e++) {
            const float g_o = element(now.d_o, e);
#pragma unroll
            for (int i = 0; i < 3; i++) dot[i] = fmaf(g_o, element(now.ob[i], e), dot[i]);
        }
#pragma unroll
        for (int step = LPR / 2; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < 3; i++) dot[i] += __shfl_xor_sync(~0u, dot[i], step);
#pragma unroll
        for (int i = 0; i < 3; i++) dlogit[i] = weights ? dot[i] * now.g[i] * (1.0f - now.g[i]) : 0.0f;
        if (!head_in) continue;
        if (c < 3) {
            const float r = of_branch(dot, c), g = of_branch(now.g, c);
            const view3 &delta = a.delta[c];
            if (delta.p != NULL) delta.p[p.b * delta.s[0] + h * delta.s[1] + p.n * delta.s[2]] = g * r;
            if (a.d_gates.p != NULL) floats_at(a.d_gates, p, h)[c] = r;
            if (a.gates.p != NULL && none) floats_at(a.gates, p, h)[c] = now.live ? g : 0.0f;
        }
        if (in_v) {
#pragma unroll
            for (int i = 0; i < 3; i++) {
                if (a.d_ob[i].p == NULL) continue;
                chunk d;
#pragma unroll
                for (int e = 0; e < CHUNK; e++) d.x[e] = now.g[i] * element(now.d_o, e);
                store_chunk((T *)a.d_ob[i].p + offset_of<SAME>(a.d_ob[i], p, h, col), d, a.vec);
            }
        }
        if (!in_q) continue;
        if (a.d_q.p != NULL) {
            chunk d;
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
                d.x[e] = fmaf(dlogit[2], w[2].x[e], fmaf(dlogit[1], w[1].x[e], dlogit[0] * w[0].x[e]));
            const int64_t at = offset_of<false>(a.d_q, p, h, col);
            if (a.dq_f32) {
                float *dst = (float *)a.d_q.p + at;
#pragma unroll
                for (int e = 0; e < CHUNK; e++) dst[e] = (a.add_q ? dst[e] : 0.0f) + d.x[e];
            } else {
                store_chunk((T *)a.d_q.p + at, d, a.vec);
            }
        }
#pragma unroll
        for (int i = 0; i < 3; i++)
#pragma unroll
            for (int e = 0; e < CHUNK; e++) dw[i].x[e] = fmaf(dlogit[i], element(now.q, e), dw[i].x[e]);
    }
    if (a.dw_part != NULL && head_in && in_q) store_dw_part(a, h, col, dw);
}

/* dW = the slices' shares: 32 lanes sum interleaved slices, then the lanes in order. */
__global__ void gate_sum_dw(const float *part, int64_t slices, int64_t count, int dim, float *dw, int64_t s0,
                            int64_t s1)
{
    const int64_t i = (int64_t)blockIdx.x * 32 + threadIdx.x;
    __shared__ float sums[8][32];
    float sum = 0.0f;
    if (i < count)
        for (int64_t s = threadIdx.y; s < slices; s += 8) sum += part[s * count + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= count) return;
    for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
    dw[i / dim / 3 * s0 + i / dim % 3 * s1 + i % dim] = sum;
}

/* Tokens of a slice: few where there are few, so that all of the GPU works; at most MOST_SLICES slices where
 * the backward leaves a share of dW for each. Depends on the shape alone, as the order of that sum does. */
static int64_t tokens_of(int64_t rows, bool shares)
{
    const int64_t tokens = shares ? (rows + MOST_SLICES - 1) / MOST_SLICES : rows / 2048;
    return tokens < 2 ? 2 : shares || tokens < 32 ? tokens : 32;
}

static int64_t slices_of(const gate_args *args)
{
    const int64_t rows = args->q.shape[0] * args->q.shape[1], tokens = tokens_of(rows, true);
    return (rows + tokens - 1) / tokens;
}

static gate_kernel kernel_of(const gate_args *args, void *workspace)
{
    gate_kernel a = {};
    const bool varlen = args->seqs.cu_q.data != NULL;
    const quern_tensor &shape = present(args->q) ? args->q : present(args->o) ? args->o : args->d_o;
    a.n = shape.shape[1];
    a.rows = shape.shape[0] * a.n;
    a.heads = (int)shape.shape[2];
    a.cu = varlen ? (const int32_t *)args->seqs.cu_q.data : NULL;
    a.valid_index = args->seqs.batch;
    a.kind = args->kind;
    a.dim = present(args->q) ? (int)args->q.shape[3] : 0;
    a.q = view4_of(args->q);
    a.o = view4_of(args->o);
    a.d_o = view4_of(args->d_o);
    a.d_q = view4_of(args->d_q);
    a.gates = view4_of(args->gates);
    a.d_gates = view4_of(args->d_gates);
    a.vec = (!present(args->q) || rows_aligned16(args->q)) &&
            (!present(args->o) || rows_aligned16(args->o)) &&
            (!present(args->d_o) || rows_aligned16(args->d_o));
    for (int i = 0; i < 3; i++) {
        a.ob[i] = view4_of(args->o_b[i]);
        a.d_ob[i] = view4_of(args->d_o_b[i]);
        a.delta[i] = view3_of(args->delta[i]);
        if (present(args->o_b[i])) {
            a.dim_v = (int)args->o_b[i].shape[3];
            a.vec = a.vec && rows_aligned16(args->o_b[i]);
        }
        if (present(args->d_o_b[i])) a.vec = a.vec && rows_aligned16(args->d_o_b[i]);
    }
    if (present(args->o)) a.dim_v = (int)args->o.shape[3];
    if (present(args->d_o)) a.dim_v = (int)args->d_o.shape[3];
    a.dq_f32 = args->d_q.dtype == QUERN_F32;
    a.add_q = args->accumulate;
    if (present(args->d_q) && !a.dq_f32) a.vec = a.vec && rows_aligned16(args->d_q);
    a.w = args->w_gate.data;
    a.w_f32 = args->w_gate.dtype == QUERN_F32;
    a.ws[0] = args->w_gate.strides[0];
    a.ws[1] = args->w_gate.strides[1];
    if (present(args->d_w_gate)) a.dw_part = (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    const view4 &like = args->d_o.ndim > 0 ? a.d_o : a.ob[0];
    a.same = true;
    const view4 *const all[] = {&a.q,     &a.o,       &a.d_o,     &a.ob[0],  &a.ob[1],
                                &a.ob[2], &a.d_ob[0], &a.d_ob[1], &a.d_ob[2]};
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 3; j++) a.same = a.same && (all[i]->p == NULL || all[i]->s[j] == like.s[j]);
    a.tokens = tokens_of(a.rows, a.dw_part != NULL);
    return a;
}

template <typename T, int LPR, bool BACKWARD>
static void start(const gate_kernel &a, dim3 grid, cudaStream_t stream)
{
    if constexpr (BACKWARD) {
        if (a.same) gate_backward<T, LPR, true><<<grid, THREADS, 0, stream>>>(a);
        else gate_backward<T, LPR, false><<<grid, THREADS, 0, stream>>>(a);
    } else {
        if (a.same) gate_forward<T, LPR, true><<<grid, THREADS, 0, stream>>>(a);
        else gate_forward<T, LPR, false><<<grid, THREADS, 0, stream>>>(a);
    }
}

template <typename T, bool BACKWARD> static quern_status launch(const gate_kernel &a, cudaStream_t stream)
{
    const int dim = a.dim > a.dim_v ? a.dim : a.dim_v;
    const int lpr = dim <= 64 ? 8 : dim <= 128 ? 16 : 32;
    if (a.rows == 0 || a.heads == 0) return QUERN_OK;
    const dim3 grid((unsigned)((a.rows + a.tokens - 1) / a.tokens),
                    (unsigned)(((int64_t)a.heads * lpr + THREADS - 1) / THREADS));
    if (lpr == 8) start<T, 8, BACKWARD>(a, grid, stream);
    else if (lpr == 16) start<T, 16, BACKWARD>(a, grid, stream);
    else start<T, 32, BACKWARD>(a, grid, stream);
    return LAUNCHED("gate");
}

template <bool BACKWARD>
static quern_status by_dtype(const gate_args *args, const gate_kernel &a, cudaStream_t stream)
{
    const quern_tensor &act = present(args->q) ? args->q : present(args->o) ? args->o : args->d_o;
    if (act.dtype == QUERN_F32) return launch<float, BACKWARD>(a, stream);
    if (act.dtype == QUERN_BF16) return launch<bf16, BACKWARD>(a, stream);
    return launch<f16, BACKWARD>(a, stream);
}

bool gate_supports(const stage_exec *, const gate_args *args, char why[STAGE_WHY_BYTES])
{
    const quern_tensor &value = present(args->o) ? args->o : args->d_o; /* gates alone have neither */
    return dims_fit(args->q.shape[3], value.shape[3], why);
}

size_t gate_backward_bytes(const stage_exec *, const gate_args *args)
{
    if (!present(args->d_w_gate)) return 0;
    return (size_t)slices_of(args) * (size_t)(args->d_w_gate.shape[0] * 3 * args->d_w_gate.shape[2]) * 4 + 15;
}

quern_status gate_forward_run(const stage_exec *exec, const gate_args *args, void *)
{
    return by_dtype<false>(args, kernel_of(args, NULL), (cudaStream_t)exec->stream);
}

quern_status gate_backward_run(const stage_exec *exec, const gate_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const gate_kernel a = kernel_of(args, workspace);
    const quern_status status = by_dtype<true>(args, a, stream);
    if (status != QUERN_OK || !present(args->d_w_gate)) return status;
    const int64_t count = (int64_t)a.heads * 3 * a.dim;
    if (count == 0) return QUERN_OK;
    gate_sum_dw<<<(unsigned)((count + 31) / 32), dim3(32, 8), 0, stream>>>(
        a.dw_part, slices_of(args), count, a.dim, (float *)args->d_w_gate.data, args->d_w_gate.strides[0],
        args->d_w_gate.strides[1]);
    return LAUNCHED("gate dW");
}
