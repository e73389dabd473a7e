/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * short.cuh - entries of CSA's blocks of four rows, in floats: a warp makes an entry.
 *
 * A lane has QUADS times four channels, those of lane l at 128 k + 4 l, so that sums over a row are those of
 * group.cuh, to the bit. What an entry needs beside its merges (its place, the norm, the rotation) is then
 * shared by up to 16 channels a lane, and no warp waits for another. Rows of up to two quads, 64 registers
 * at 16 bits, are read at once and merged while other warps wait for theirs; biases and the norm's weights
 * are in shared memory. 16 warps an SM hold 128 KB of rows on their way. Limit: bytes moved over the copy
 * rate; merges take 0.6 of that time at C 512.
 */
#ifndef QUERN_CUDA_POOL_SHORT_CUH
#define QUERN_CUDA_POOL_SHORT_CUH

#include "pool/rows.cuh"

enum { SHORT_ROWS = 4, SHORT_WARPS = 4, SHORT_BLOCKS = 4, SHORT_QUAD = 32 * GROUP_CHANNELS };

template <int QUADS> struct short_shared {
    float4 bias[2][SHORT_ROWS][QUADS * 32], norm[QUADS * 32];
};

template <typename B, int QUADS>
__device__ __forceinline__ void short_fill(short_shared<QUADS> &m, const pool_kernel &a)
{
    const group g(NULL, QUADS * 32);
    for (int i = (int)threadIdx.x; i < QUADS * 32; i += SHORT_WARPS * 32) {
        group own = g;
        own.lane = i;
        const channels w = norm_weights(a.entry, own);
        m.norm[i] = make_float4(w.x[0], w.x[1], w.x[2], w.x[3]);
        for (int s = 0; s < 2; s++)
            for (int j = 0; j < SHORT_ROWS; j++) {
                const raw_channels<B> x =
                    load_wide<B, false>((const B *)(s == 0 ? a.bias_b : a.bias_a) +
                                        j * (s == 0 ? a.bias_b_row : a.bias_a_row) + i * GROUP_CHANNELS);
                m.bias[s][j][i] = make_float4(x.at(0), x.at(1), x.at(2), x.at(3));
            }
    }
    __syncthreads();
}

/* The rows of a series of some quads: series b of the block before, or series a of its own. */
template <typename T, int STEP> struct short_rows {
    raw_channels<T> value[SHORT_ROWS][STEP], logit[SHORT_ROWS][STEP];
};

template <typename T, int STEP, int WIDTH>
__device__ __forceinline__ void short_load(short_rows<T, STEP> &to, const T *p)
{
#pragma unroll
    for (int u = 0; u < SHORT_ROWS; u++)
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            to.value[u][k] = load_wide<T, true>(p + u * 4 * WIDTH + k * SHORT_QUAD);
            to.logit[u][k] = load_wide<T, true>(p + u * 4 * WIDTH + WIDTH + k * SHORT_QUAD);
        }
}

template <typename T, int STEP, int QUADS>
__device__ __forceinline__ void short_merge(pool_sums (&sums)[STEP], const short_rows<T, STEP> &rows,
                                            const float4 (&bias)[SHORT_ROWS][QUADS * 32], int first)
{
#pragma unroll
    for (int u = 0; u < SHORT_ROWS; u++)
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            const float4 b = bias[u][first + 32 * k];
            const float own[] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < GROUP_CHANNELS; i++)
                merge_row(sums[k], i, rows.logit[u][k].at(i) + own[i], rows.value[u][k].at(i));
        }
}

/* The norm, as entry_finish() has it. */
template <int QUADS>
__device__ __forceinline__ void short_norm(const pool_kernel &a, const short_shared<QUADS> &m,
                                           channels (&v)[QUADS], int lane)
{
    float all = 0.0f;
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) squares = fmaf(v[k].x[i], v[k].x[i], squares);
#pragma unroll
        for (int by = 16; by > 0; by /= 2) squares += __shfl_xor_sync(~0u, squares, by);
        all += squares;
    }
    const float scale = rsqrtf(all / (float)a.width + a.entry.eps);
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        const float4 w = m.norm[32 * k + lane];
        v[k].x[0] = v[k].x[0] * scale * w.x;
        v[k].x[1] = v[k].x[1] * scale * w.y;
        v[k].x[2] = v[k].x[2] * scale * w.z;
        v[k].x[3] = v[k].x[3] * scale * w.w;
    }
}

/* As entry_rotate() has it where no pair's channels are of two threads. */
__device__ __forceinline__ void short_rotate(const pool_kernel &a, int64_t position, int thread, channels &v)
{
    group g(NULL, SHORT_QUAD);
    g.lane = thread;
    const entry_factors f = entry_angles(a.entry, g, position);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float x = v.x[2 * i], y = v.x[2 * i + 1];
        if (thread * GROUP_CHANNELS + 2 * i < a.width - a.entry.rotated) continue;
        v.x[2 * i] = x * f.cosine[i] - y * f.sine[i];
        v.x[2 * i + 1] = x * f.sine[i] + y * f.cosine[i];
    }
}

/* Stores what entry e of a live block gives; of others 0. Its place is found again, which is cheaper than
 * registers for it during the merges. */
template <int QUADS>
__device__ __forceinline__ void short_emit(const pool_kernel &a, const short_shared<QUADS> &m, int64_t e,
                                           channels (&v)[QUADS], int lane)
{
    const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
    const bool live = x.live && entry_has_angles(a.entry, x.position);
    if (x.live && !live && lane == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    if (!live)
#pragma unroll
        for (int k = 0; k < QUADS; k++) v[k] = {};
    if (a.pooled != NULL)
#pragma unroll
        for (int k = 0; k < QUADS; k++)
            put_channels(a.pooled + x.view_b * a.pooled_b + x.n * a.pooled_row + k * SHORT_QUAD +
                             lane * GROUP_CHANNELS,
                         v[k], GROUP_CHANNELS);
    if (a.out == NULL) return;
    if (live) {
#pragma unroll
        for (int k = 0; k < QUADS; k++) entry_round(a.entry, v[k]);
        if (a.entry.norm.p != NULL) short_norm<QUADS>(a, m, v, lane);
#pragma unroll
        for (int k = 0; k < QUADS; k++)
            if ((k + 1) * SHORT_QUAD > a.width - a.entry.rotated)
                short_rotate(a, x.position, 32 * k + lane, v[k]);
    }
    void *const to =
        (char *)a.out + (x.view_b * a.out_b + x.n * a.out_row) * (a.out_dtype == QUERN_F32 ? 4 : 2);
#pragma unroll
    for (int k = 0; k < QUADS; k++)
        put_floats(to, a.out_dtype, k * SHORT_QUAD + lane * GROUP_CHANNELS, v[k], GROUP_CHANNELS);
}

template <typename T, typename B, int QUADS>
__global__ void __launch_bounds__(SHORT_WARPS * 32, SHORT_BLOCKS)
    pool_short(const __grid_constant__ pool_kernel a, int64_t entries)
{
    constexpr int WIDTH = QUADS * SHORT_QUAD, STEP = QUADS > 1 ? 2 : 1;
    __shared__ short_shared<QUADS> m;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    short_fill<B, QUADS>(m, a);
    for (int64_t e = (int64_t)blockIdx.x * SHORT_WARPS + warp; e < entries;
         e += (int64_t)gridDim.x * SHORT_WARPS) {
        const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
        const bool live = x.live, before = x.live && x.before;
        const T *const own =
            (const T *)a.proj + x.view_b * a.proj_b + x.row * 4 * WIDTH + lane * GROUP_CHANNELS;
        channels v[QUADS];
#pragma unroll
        for (int k0 = 0; k0 < QUADS; k0 += STEP) {
            short_rows<T, STEP> b, self;
            pool_sums sums[STEP];
            if (before)
                short_load<T, STEP, WIDTH>(b, own + k0 * SHORT_QUAD - SHORT_ROWS * 4 * WIDTH + 2 * WIDTH);
            if (live) short_load<T, STEP, WIDTH>(self, own + k0 * SHORT_QUAD);
#pragma unroll
            for (int k = 0; k < STEP; k++) clear_sums(sums[k]);
            if (before) short_merge<T, STEP, QUADS>(sums, b, m.bias[0], 32 * k0 + lane);
            if (live) short_merge<T, STEP, QUADS>(sums, self, m.bias[1], 32 * k0 + lane);
#pragma unroll
            for (int k = 0; k < STEP; k++) v[k0 + k] = pooled_of(sums[k]);
        }
        short_emit<QUADS>(a, m, e, v, lane);
    }
}

/* The calls that it takes. */
static inline bool pool_is_short(const pool_kernel &a)
{
    const bool width = a.width == SHORT_QUAD || a.width == 2 * SHORT_QUAD || a.width == 4 * SHORT_QUAD;
    return width && a.wide && a.overlap && a.ratio == SHORT_ROWS && a.prev == NULL &&
           a.proj_row == 4 * (int64_t)a.width && a.entry.format == ENTRY_ROWS && !a.entry.hadamard &&
           (a.width - a.entry.rotated) % 2 == 0;
}

template <typename T, typename B>
static quern_status pool_short_run(const pool_kernel &a, int64_t entries, int multiprocessors,
                                   cudaStream_t stream)
{
    const int64_t blocks = (entries + SHORT_WARPS - 1) / SHORT_WARPS,
                  most = (int64_t)multiprocessors * SHORT_BLOCKS;
    const unsigned grid = (unsigned)(blocks < most ? blocks : most);
    if (a.width == SHORT_QUAD) pool_short<T, B, 1><<<grid, SHORT_WARPS * 32, 0, stream>>>(a, entries);
    else if (a.width == 2 * SHORT_QUAD)
        pool_short<T, B, 2><<<grid, SHORT_WARPS * 32, 0, stream>>>(a, entries);
    else pool_short<T, B, 4><<<grid, SHORT_WARPS * 32, 0, stream>>>(a, entries);
    return LAUNCHED("pool of short blocks");
}

#endif
