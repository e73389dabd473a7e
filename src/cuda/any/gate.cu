/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gate.cu - g_b = sigmoid(q . w_b), o = sum_b g_b o_b, in one pass; and its backward in one pass:
 *   r_b = dO . o_b,  dO_b = g_b dO,  delta_b = g_b r_b,  dlogit_b = r_b g_b (1 - g_b),
 *   dQ = sum_b dlogit_b w_b,  dW_b = sum over rows of dlogit_b q.
 *
 * LPR lanes own a row (one head of one token), eight elements each, so a row is one coalesced read per
 * tensor. A lane group keeps its head over TOKENS tokens: the head's three weight vectors stay in registers
 * (24 floats a lane), and the backward's dW accumulates there, is written once per group, and is summed in
 * token order by a second kernel. Limit: bytes moved over the copy rate.
 */
#include "any/stages.cuh"
#include "common/chunk.cuh"

#include <math.h>
#include <stdio.h>

enum { TOKENS = 32, THREADS = 256 };

struct gate_kernel {
    int64_t rows; /* tokens, all sequences */
    int64_t n;    /* tokens of one batch view */
    int64_t valid_index; /* packed: batch (index of the last border), else -1 */
    const int32_t *cu;
    int heads, dim, dim_v, kind;
    view4 q, o, d_o, ob[3], d_ob[3], d_q;
    view4 gates, d_gates;
    view3 delta[3];
    const void *w;
    int64_t ws[2];
    bool w_f32, vec, dq_f32, add_q;
    float *dw_part; /* [slices][H][3][D] */
};

__device__ __forceinline__ float sum_lanes(float x, int lanes)
{
    for (int w = lanes / 2; w > 0; w /= 2) x += __shfl_xor_sync(~0u, x, w);
    return x;
}

template <typename T> __device__ __forceinline__ chunk weight_chunk(const gate_kernel &a, int h, int b, int c, bool in)
{
    chunk r = {};
    if (!in) return r;
    const int64_t at = h * a.ws[0] + b * a.ws[1] + c * CHUNK;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) r.x[i] = a.w_f32 ? ((const float *)a.w)[at + i] : to_float<T>(((const T *)a.w)[at + i]);
    return r;
}

template <typename T> __device__ __forceinline__ T *row_at(const view4 &v, int64_t b, int64_t n, int64_t h)
{
    return (T *)v.p + b * v.s[0] + n * v.s[1] + h * v.s[2];
}

template <typename T, int LPR, bool BACKWARD> __global__ void __launch_bounds__(THREADS) gate(const __grid_constant__ gate_kernel a)
{
    const int group = (blockIdx.y * THREADS + threadIdx.x) / LPR, c = threadIdx.x % LPR;
    const bool head_in = group < a.heads;
    const int h = head_in ? group : a.heads - 1;
    const bool in_q = c * CHUNK < a.dim, in_v = c * CHUNK < a.dim_v;
    const bool weights = a.kind == QUERN_NSA_GATE_WEIGHTS;
    chunk w[3], dw[3] = {};
#pragma unroll
    for (int b = 0; b < 3; b++) w[b] = weight_chunk<T>(a, h, b, c, weights && in_q);
    const int64_t valid = a.cu != NULL ? border(a.cu, a.valid_index, a.n) : a.n;
    const int64_t first = (int64_t)blockIdx.x * TOKENS, end = first + TOKENS < a.rows ? first + TOKENS : a.rows;
#pragma unroll 2
    for (int64_t row = first; row < end; row++) {
        const int64_t b = row / a.n, n = row - b * a.n;
        const bool live = n < valid;
        chunk q = {}, ob[3] = {}, g_o = {};
        if (live) {
            if (weights && in_q) q = load_chunk(row_at<T>(a.q, b, n, h) + c * CHUNK, a.vec);
            if (in_v) {
#pragma unroll
                for (int i = 0; i < 3; i++)
                    if (a.ob[i].p != NULL) ob[i] = load_chunk(row_at<T>(a.ob[i], b, n, h) + c * CHUNK, a.vec);
                if (BACKWARD) g_o = load_chunk(row_at<T>(a.d_o, b, n, h) + c * CHUNK, a.vec);
            }
        }
        float g[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (!BACKWARD && weights) {
                float dot = 0.0f;
#pragma unroll
                for (int e = 0; e < CHUNK; e++) dot = fmaf(q.x[e], w[i].x[e], dot);
                g[i] = 1.0f / (1.0f + expf(-sum_lanes(dot, LPR)));
            } else if (a.kind == QUERN_NSA_GATE_NONE) {
                g[i] = 1.0f / 3.0f;
            } else {
                g[i] = live ? row_at<float>(a.gates, b, n, h)[i] : 0.0f;
            }
        }
        if (!BACKWARD) {
            if (!head_in) continue;
            if (a.gates.p != NULL && a.kind != QUERN_NSA_GATE_GIVEN && c < 3) row_at<float>(a.gates, b, n, h)[c] = live ? (c == 0 ? g[0] : c == 1 ? g[1] : g[2]) : 0.0f;
            if (a.o.p == NULL || !in_v) continue;
            chunk o;
#pragma unroll
            for (int e = 0; e < CHUNK; e++) o.x[e] = fmaf(g[2], ob[2].x[e], fmaf(g[1], ob[1].x[e], g[0] * ob[0].x[e]));
            store_chunk(row_at<T>(a.o, b, n, h) + c * CHUNK, o, a.vec);
            continue;
        }
        float dot[3], dlogit[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            dot[i] = 0.0f;
#pragma unroll
            for (int e = 0; e < CHUNK; e++) dot[i] = fmaf(g_o.x[e], ob[i].x[e], dot[i]);
            dot[i] = sum_lanes(dot[i], LPR);
            dlogit[i] = weights ? dot[i] * g[i] * (1.0f - g[i]) : 0.0f;
        }
        if (!head_in) continue;
        if (c < 3) {
            const float r = c == 0 ? dot[0] : c == 1 ? dot[1] : dot[2], gc = c == 0 ? g[0] : c == 1 ? g[1] : g[2];
            if (a.delta[c].p != NULL) a.delta[c].p[b * a.delta[c].s[0] + h * a.delta[c].s[1] + n * a.delta[c].s[2]] = gc * r;
            if (a.d_gates.p != NULL) row_at<float>(a.d_gates, b, n, h)[c] = r;
        }
        if (in_v) {
#pragma unroll
            for (int i = 0; i < 3; i++) {
                if (a.d_ob[i].p == NULL) continue;
                chunk d;
#pragma unroll
                for (int e = 0; e < CHUNK; e++) d.x[e] = g[i] * g_o.x[e];
                store_chunk(row_at<T>(a.d_ob[i], b, n, h) + c * CHUNK, d, a.vec);
            }
        }
        if (a.d_q.p != NULL && in_q) {
            chunk d;
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
                d.x[e] = fmaf(dlogit[2], w[2].x[e], fmaf(dlogit[1], w[1].x[e], dlogit[0] * w[0].x[e]));
            if (a.dq_f32) {
                float *p = row_at<float>(a.d_q, b, n, h) + c * CHUNK;
#pragma unroll
                for (int e = 0; e < CHUNK; e++) p[e] = (a.add_q ? p[e] : 0.0f) + d.x[e];
            } else {
                store_chunk(row_at<T>(a.d_q, b, n, h) + c * CHUNK, d, a.vec);
            }
        }
#pragma unroll
        for (int i = 0; i < 3; i++)
#pragma unroll
            for (int e = 0; e < CHUNK; e++) dw[i].x[e] = fmaf(dlogit[i], q.x[e], dw[i].x[e]);
    }
    if (BACKWARD && a.dw_part != NULL && head_in && in_q)
#pragma unroll
        for (int i = 0; i < 3; i++) {
            float *p = a.dw_part + (((int64_t)blockIdx.x * a.heads + h) * 3 + i) * a.dim + c * CHUNK;
#pragma unroll
            for (int e = 0; e < CHUNK; e++) p[e] = dw[i].x[e];
        }
}

/* dW = the slices' shares: 32 lanes sum interleaved slices, then the lanes in order. */
__global__ void gate_sum_dw(const float *part, int64_t slices, int64_t count, int dim, float *dw, int64_t s0, int64_t s1)
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

static int64_t slices_of(const gate_args *args)
{
    return (args->q.shape[0] * args->q.shape[1] + TOKENS - 1) / TOKENS;
}

static gate_kernel kernel_of(const gate_args *args, void *workspace)
{
    gate_kernel a = {};
    const bool packed = args->seqs.cu_q.data != NULL;
    const quern_tensor &shape = present(args->q) ? args->q : present(args->o) ? args->o : args->d_o;
    a.n = shape.shape[1];
    a.rows = shape.shape[0] * a.n;
    a.heads = (int)shape.shape[2];
    a.cu = packed ? (const int32_t *)args->seqs.cu_q.data : NULL;
    a.valid_index = args->seqs.batch;
    a.kind = args->kind;
    a.dim = present(args->q) ? (int)args->q.shape[3] : 0;
    a.q = view4_of(args->q), a.o = view4_of(args->o), a.d_o = view4_of(args->d_o), a.d_q = view4_of(args->d_q);
    a.gates = view4_of(args->gates), a.d_gates = view4_of(args->d_gates);
    a.vec = (!present(args->q) || rows_aligned16(args->q)) && (!present(args->o) || rows_aligned16(args->o)) &&
            (!present(args->d_o) || rows_aligned16(args->d_o));
    for (int i = 0; i < 3; i++) {
        a.ob[i] = view4_of(args->o_b[i]), a.d_ob[i] = view4_of(args->d_o_b[i]), a.delta[i] = view3_of(args->delta[i]);
        if (present(args->o_b[i])) a.dim_v = (int)args->o_b[i].shape[3], a.vec = a.vec && rows_aligned16(args->o_b[i]);
        if (present(args->d_o_b[i])) a.vec = a.vec && rows_aligned16(args->d_o_b[i]);
    }
    if (present(args->o)) a.dim_v = (int)args->o.shape[3];
    if (present(args->d_o)) a.dim_v = (int)args->d_o.shape[3];
    a.dq_f32 = args->d_q.dtype == QUERN_F32, a.add_q = args->accumulate;
    if (present(args->d_q) && !a.dq_f32) a.vec = a.vec && rows_aligned16(args->d_q);
    a.w = args->w_gate.data, a.w_f32 = args->w_gate.dtype == QUERN_F32;
    a.ws[0] = args->w_gate.strides[0], a.ws[1] = args->w_gate.strides[1];
    if (present(args->d_w_gate)) a.dw_part = (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    return a;
}

template <typename T, bool BACKWARD> static quern_status launch(const gate_kernel &a, cudaStream_t stream)
{
    const int dim = a.dim > a.dim_v ? a.dim : a.dim_v;
    const int lpr = dim <= 64 ? 8 : dim <= 128 ? 16 : 32;
    const dim3 grid((unsigned)((a.rows + TOKENS - 1) / TOKENS), (unsigned)(((int64_t)a.heads * lpr + THREADS - 1) / THREADS));
    if (grid.x == 0 || grid.y == 0) return QUERN_OK;
    if (lpr == 8) gate<T, 8, BACKWARD><<<grid, THREADS, 0, stream>>>(a);
    else if (lpr == 16) gate<T, 16, BACKWARD><<<grid, THREADS, 0, stream>>>(a);
    else gate<T, 32, BACKWARD><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("gate");
}

template <bool BACKWARD> static quern_status by_dtype(const gate_args *args, const gate_kernel &a, cudaStream_t stream)
{
    const quern_tensor &act = present(args->q) ? args->q : present(args->o) ? args->o : args->d_o;
    if (act.dtype == QUERN_F32) return launch<float, BACKWARD>(a, stream);
    if (act.dtype == QUERN_BF16) return launch<bf16, BACKWARD>(a, stream);
    return launch<f16, BACKWARD>(a, stream);
}

bool gate_supports(const quern_exec *, const gate_args *args, char why[STAGE_WHY_BYTES])
{
    if (present(args->q) && args->q.shape[3] > 256) {
        snprintf(why, STAGE_WHY_BYTES, "head dim %lld: the cuda backend takes up to 256", (long long)args->q.shape[3]);
        return false;
    }
    return true;
}

size_t gate_forward_bytes(const quern_exec *, const gate_args *) { return 0; }

size_t gate_backward_bytes(const quern_exec *, const gate_args *args)
{
    if (!present(args->d_w_gate)) return 0;
    return (size_t)slices_of(args) * (size_t)(args->d_w_gate.shape[0] * 3 * args->d_w_gate.shape[2]) * 4 + 15;
}

quern_status gate_forward_run(const quern_exec *exec, const gate_args *args, void *)
{
    return by_dtype<false>(args, kernel_of(args, NULL), (cudaStream_t)exec->stream);
}

quern_status gate_backward_run(const quern_exec *exec, const gate_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const gate_kernel a = kernel_of(args, workspace);
    const quern_status status = by_dtype<true>(args, a, stream);
    if (status != QUERN_OK || !present(args->d_w_gate)) return status;
    const int64_t count = (int64_t)a.heads * 3 * a.dim;
    if (count == 0) return QUERN_OK;
    gate_sum_dw<<<(unsigned)((count + 31) / 32), dim3(32, 8), 0, stream>>>(a.dw_part, slices_of(args), count, a.dim, (float *)args->d_w_gate.data,
                                                                          args->d_w_gate.strides[0], args->d_w_gate.strides[1]);
    return LAUNCHED("gate dW");
}
