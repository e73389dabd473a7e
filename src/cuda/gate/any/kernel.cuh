/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - g_b = sigmoid(q . w_b), o = sum_b g_b o_b, in one pass; and its backward in one pass:
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
#ifndef QUERN_CUDA_GATE_ANY_KERNEL_CUH
#define QUERN_CUDA_GATE_ANY_KERNEL_CUH

#include "gate/any/params.cuh"
#include "common/chunk.cuh"

#include <math.h>
#include <stdio.h>

enum { THREADS = 256 };

template <typename T>
__device__ __forceinline__ chunk weight_chunk(const gate_kernel &a, int h, int b, int c, bool in, bool vec)
{
    chunk r = {};
    if (!in) return r;
    const int64_t at = h * a.ws[0] + b * a.ws[1] + c * CHUNK;
    return a.w_f32 ? load_chunk<float>((const float *)a.w + at, vec)
                   : load_chunk<T>((const T *)a.w + at, vec);
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
    const int group = (blockIdx.y * blockDim.x + threadIdx.x) / LPR, c = threadIdx.x % LPR, col = c * CHUNK;
    const bool head_in = group < a.heads, weights = a.kind == GATE_WEIGHTS;
    const int h = head_in ? group : a.heads - 1;
    const bool in_q = weights && col < a.dim, in_v = col < a.dim_v;
    chunk w[3];
#pragma unroll
    for (int b = 0; b < 3; b++) w[b] = weight_chunk<T>(a, h, b, c, in_q, a.w_vec);
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
    const int group = (blockIdx.y * blockDim.x + threadIdx.x) / LPR, c = threadIdx.x % LPR, col = c * CHUNK;
    const bool head_in = group < a.heads, weights = a.kind == GATE_WEIGHTS, none = a.kind == GATE_NONE;
    const int h = head_in ? group : a.heads - 1;
    const bool in_q = weights && col < a.dim, in_v = col < a.dim_v;
    chunk w[3], dw[3] = {};
#pragma unroll
    for (int b = 0; b < 3; b++) w[b] = weight_chunk<T>(a, h, b, c, in_q, false);
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

template <typename T, int LPR, bool BACKWARD>
static void start(const gate_kernel &a, dim3 grid, int threads, cudaStream_t stream)
{
    if constexpr (BACKWARD) {
        if (a.same) gate_backward<T, LPR, true><<<grid, threads, 0, stream>>>(a);
        else gate_backward<T, LPR, false><<<grid, threads, 0, stream>>>(a);
    } else {
        if (a.same) gate_forward<T, LPR, true><<<grid, threads, 0, stream>>>(a);
        else gate_forward<T, LPR, false><<<grid, threads, 0, stream>>>(a);
    }
}

/* Few heads have a block of no more threads than they need. */
template <typename T, bool BACKWARD> static quern_status launch(const gate_kernel &a, cudaStream_t stream)
{
    const int dim = a.dim > a.dim_v ? a.dim : a.dim_v;
    const int lpr = dim <= 64 ? 8 : dim <= 128 ? 16 : 32;
    if (a.rows == 0 || a.heads == 0) return QUERN_OK;
    const int64_t lanes = ((int64_t)a.heads * lpr + 31) / 32 * 32;
    const int threads = lanes < THREADS ? (int)lanes : THREADS;
    const dim3 grid((unsigned)((a.rows + a.tokens - 1) / a.tokens),
                    (unsigned)((lanes + threads - 1) / threads));
    if (lpr == 8) start<T, 8, BACKWARD>(a, grid, threads, stream);
    else if (lpr == 16) start<T, 16, BACKWARD>(a, grid, threads, stream);
    else start<T, 32, BACKWARD>(a, grid, threads, stream);
    return LAUNCHED("gate");
}

#endif
