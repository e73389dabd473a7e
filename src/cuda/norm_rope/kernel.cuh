/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - RMS norm of rows and rotation of their last channels, and the gradients of both.
 *
 * A warp has a row of up to 1024 channels, a block of 256 threads a longer one; a thread has chunks of eight
 * channels, in registers from the read to the write. Rows of a run follow one another; a run's share of the
 * weight's gradient stays in registers. The forward pass may start while the kernel before it still runs, and
 * lets the next one: in a chain of a step's small kernels a start takes as long as the work. Limit: bytes
 * moved over the copy rate.
 */
#ifndef QUERN_CUDA_NORM_ROPE_KERNEL_CUH
#define QUERN_CUDA_NORM_ROPE_KERNEL_CUH

#include "norm_rope/params.cuh"

enum { NORM_THREADS = 256 };

/* Channels of a row: chunk j has those from (j lanes + lane) CHUNK on. */
template <int CHUNKS> struct row_chunks {
    chunk c[CHUNKS];
};

struct row_place {
    int64_t b, n, h;
    int64_t position; /* -1: the row counts as absent */
};

__device__ __forceinline__ row_place place_at(const norm_rope_kernel &a, int64_t row)
{
    const int64_t token = row / a.heads, b = token / a.tokens, n = token - b * a.tokens;
    const int64_t position = a.positions != NULL ? a.positions[n * a.position_row] : n;
    const bool some = a.rotated == 0 || (position >= 0 && position < a.angle_rows);
    if (!some) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    return {b, n, row - token * a.heads, some ? position : -1};
}

template <typename T> __device__ __forceinline__ chunk load_part(const T *p, int count, bool wide)
{
    if (count >= CHUNK) return load_chunk<T, true>(p, wide);
    chunk c = {};
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        if (i < count) c.x[i] = to_float<T>(p[i]);
    return c;
}

template <typename T> __device__ __forceinline__ void store_part(T *p, const chunk &c, int count, bool wide)
{
    if (count >= CHUNK) store_chunk<T>(p, c, wide);
    else
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            if (i < count) p[i] = from_float<T>(c.x[i]);
}

__device__ __forceinline__ int64_t offset_of(const view4 &v, const row_place &p)
{
    return p.b * v.s[0] + p.n * v.s[1] + p.h * v.s[2];
}

template <int CHUNKS>
__device__ __forceinline__ row_chunks<CHUNKS> load_row(const norm_rope_kernel &a, const row_view &view,
                                                       const row_place &p, int lane)
{
    row_chunks<CHUNKS> r;
    const void *const from = view.v.p;
    const int64_t at = offset_of(view.v, p);
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        const int c = (j * a.lanes + lane) * CHUNK, count = a.width - c;
        r.c[j] = {};
        if (count <= 0) continue;
        if (view.dtype == QUERN_F32) r.c[j] = load_part((const float *)from + at + c, count, view.wide);
        else if (view.dtype == QUERN_BF16) r.c[j] = load_part((const bf16 *)from + at + c, count, view.wide);
        else r.c[j] = load_part((const f16 *)from + at + c, count, view.wide);
    }
    return r;
}

template <int CHUNKS>
__device__ __forceinline__ void store_row(const norm_rope_kernel &a, const row_view &view, const row_place &p,
                                          int lane, const row_chunks<CHUNKS> &r)
{
    void *const to = view.v.p;
    const int64_t at = offset_of(view.v, p);
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        const int c = (j * a.lanes + lane) * CHUNK, count = a.width - c;
        if (count <= 0) continue;
        if (view.dtype == QUERN_F32) store_part((float *)to + at + c, r.c[j], count, view.wide);
        else if (view.dtype == QUERN_BF16) store_part((bf16 *)to + at + c, r.c[j], count, view.wide);
        else store_part((f16 *)to + at + c, r.c[j], count, view.wide);
    }
}

/* `row`: shared, a float a channel; needed where a pair's channels are of two threads. */
template <int CHUNKS>
__device__ __forceinline__ void rotate(const norm_rope_kernel &a, const group &g, int64_t position,
                                       bool inverse, row_chunks<CHUNKS> &r, float *row)
{
    const int start = a.width - a.rotated, half = a.rotated / 2;
    const bool split = start % 2 != 0;
    if (a.rotated == 0) return;
    if (split) {
        g.sync();
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const int c = (j * a.lanes + g.lane) * CHUNK + i;
                if (c < a.width) row[c] = r.c[j].x[i];
            }
        g.sync();
    }
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int c = (j * a.lanes + g.lane) * CHUNK + i, m = (c - start) / 2;
            if (c < start || c >= a.width || (!split && i % 2 != 0)) continue;
            const float cosine = a.angles.at(position * a.angle_row + m),
                        s = a.angles.at(position * a.angle_row + half + m), sine = inverse ? -s : s;
            float *const x = r.c[j].x;
            if (!split) {
                const float first = x[i], second = x[(i + 1) % CHUNK];
                x[i] = first * cosine - second * sine;
                x[(i + 1) % CHUNK] = first * sine + second * cosine;
            } else {
                x[i] = (c - start) % 2 == 0 ? row[c] * cosine - row[c + 1] * sine
                                            : row[c - 1] * sine + row[c] * cosine;
            }
        }
}

template <int CHUNKS>
__device__ __forceinline__ float weighted_sum(const group &g, const row_chunks<CHUNKS> &x,
                                              const row_chunks<CHUNKS> &y)
{
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum = fmaf(x.c[j].x[i], y.c[j].x[i], sum);
    return g.sum(sum);
}

template <int CHUNKS>
__device__ __forceinline__ row_chunks<CHUNKS> load_weight(const norm_rope_kernel &a, int lane)
{
    row_chunks<CHUNKS> w;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int c = (j * a.lanes + lane) * CHUNK + i;
            w.c[j].x[i] = c >= a.width ? 0.0f : a.weight.p != NULL ? a.weight.at(c) : 1.0f;
        }
    return w;
}

template <int CHUNKS>
__global__ void __launch_bounds__(NORM_THREADS) norm_rope_forward(const __grid_constant__ norm_rope_kernel a)
{
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[PARTS];
    const group g(parts, a.lanes);
    float *const shared_row = rows_shared + g.index * a.width;
    const int64_t first = ((int64_t)blockIdx.x * (NORM_THREADS / a.lanes) + g.index) * a.run_rows,
                  end = first + a.run_rows < a.rows ? first + a.run_rows : a.rows;
    let_next_start();
    wait_for_before();
    if (first >= a.rows) return;
    const row_chunks<CHUNKS> w = load_weight<CHUNKS>(a, g.lane);
    for (int64_t row = first; row < end; row++) {
        const row_place p = place_at(a, row);
        row_chunks<CHUNKS> x = load_row<CHUNKS>(a, a.x, p, g.lane);
        const float scale = a.norm ? 1.0f / sqrtf(weighted_sum(g, x, x) / (float)a.width + a.eps) : 1.0f;
        if (a.norm)
#pragma unroll
            for (int j = 0; j < CHUNKS; j++)
#pragma unroll
                for (int i = 0; i < CHUNK; i++) x.c[j].x[i] = x.c[j].x[i] * scale * w.c[j].x[i];
        if (p.position >= 0) rotate(a, g, p.position, a.inverse, x, shared_row);
        else x = {};
        store_row(a, a.out, p, g.lane, x);
    }
}

template <int CHUNKS>
__global__ void __launch_bounds__(NORM_THREADS) norm_rope_backward(const __grid_constant__ norm_rope_kernel a)
{
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[PARTS];
    const group g(parts, a.lanes);
    float *const shared_row = rows_shared + g.index * a.width;
    const int64_t run = (int64_t)blockIdx.x * (NORM_THREADS / a.lanes) + g.index, first = run * a.run_rows,
                  end = first + a.run_rows < a.rows ? first + a.run_rows : a.rows;
    if (first >= a.rows) return;
    const row_chunks<CHUNKS> w = load_weight<CHUNKS>(a, g.lane);
    row_chunks<CHUNKS> d_weight = {};
    for (int64_t row = first; row < end; row++) {
        const row_place p = place_at(a, row);
        row_chunks<CHUNKS> d = load_row<CHUNKS>(a, a.d_out, p, g.lane);
        if (p.position >= 0) rotate(a, g, p.position, !a.inverse, d, shared_row);
        else d = {};
        if (a.norm) {
            const row_chunks<CHUNKS> x = load_row<CHUNKS>(a, a.x, p, g.lane);
            row_chunks<CHUNKS> dx;
            const float scale = 1.0f / sqrtf(weighted_sum(g, x, x) / (float)a.width + a.eps);
#pragma unroll
            for (int j = 0; j < CHUNKS; j++)
#pragma unroll
                for (int i = 0; i < CHUNK; i++) dx.c[j].x[i] = d.c[j].x[i] * x.c[j].x[i];
            const float mean = weighted_sum(g, dx, w) / (float)a.width * scale * scale;
#pragma unroll
            for (int j = 0; j < CHUNKS; j++)
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    d_weight.c[j].x[i] = fmaf(dx.c[j].x[i], scale, d_weight.c[j].x[i]);
                    d.c[j].x[i] = (d.c[j].x[i] * w.c[j].x[i] - x.c[j].x[i] * mean) * scale;
                }
        }
        store_row(a, a.d_x, p, g.lane, d);
    }
    if (a.parts == NULL) return;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int c = (j * a.lanes + g.lane) * CHUNK + i;
            if (c < a.width) a.parts[run * a.width + c] = d_weight.c[j].x[i];
        }
}

#endif
