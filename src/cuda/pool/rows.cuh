/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * rows.cuh - softmax pooling along rows, channel by channel: rows as they are read, and the accumulator into
 * which they are merged in order, as on the CPU (cpu/pool/pool_rows.h): one exp2 a row, as either the sums
 * shrink or the new weight is below 1. Token by token gives the same bits.
 */
#ifndef QUERN_CUDA_POOL_ROWS_CUH
#define QUERN_CUDA_POOL_ROWS_CUH

#include "pool/params.cuh"
#include "common/mma.cuh"

#include <float.h>

template <typename T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

/* Four channels as they stand in memory, as words. */
template <typename T> struct raw_channels {
    uint32_t w[sizeof(T)];
    __device__ __forceinline__ float at(int i) const
    {
        const float2 pair = unpack2<T>(w[i / 2]);
        return i % 2 == 0 ? pair.x : pair.y;
    }
};
template <> struct raw_channels<float> {
    uint32_t w[4];
    __device__ __forceinline__ float at(int i) const { return __uint_as_float(w[i]); }
};

__device__ __forceinline__ uint2 load_once(const uint2 *p)
{
    uint2 x;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}
__device__ __forceinline__ uint4 load_once(const uint4 *p)
{
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(p));
    return x;
}

/* All four channels at once. ONCE: no other thread reads them, so they need not stay in L1. */
template <typename T, bool ONCE> __device__ __forceinline__ raw_channels<T> load_wide(const T *p)
{
    raw_channels<T> c;
    if constexpr (sizeof(T) == 2) {
        const uint2 x = ONCE ? load_once((const uint2 *)p) : __ldg((const uint2 *)p);
        c.w[0] = x.x;
        c.w[1] = x.y;
    } else {
        const uint4 x = ONCE ? load_once((const uint4 *)p) : __ldg((const uint4 *)p);
        c.w[0] = x.x;
        c.w[1] = x.y;
        c.w[2] = x.z;
        c.w[3] = x.w;
    }
    return c;
}

/* The first `count` of them. */
template <typename T> __device__ __forceinline__ raw_channels<T> load_some(const T *p, int count)
{
    raw_channels<T> c = {};
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        if (i >= count) continue;
        if constexpr (sizeof(T) == 2) c.w[i / 2] |= (uint32_t)((const uint16_t *)p)[i] << 16 * (i % 2);
        else c.w[i] = ((const uint32_t *)p)[i];
    }
    return c;
}

/* The sums of a softmax so far: the largest logit (-FLT_MAX: nothing yet), the weights' sum, that of the
 * weighted values. */
struct pool_sums {
    float max[GROUP_CHANNELS], sum[GROUP_CHANNELS], weighted[GROUP_CHANNELS];
};

__device__ __forceinline__ void clear_sums(pool_sums &s)
{
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        s.max[i] = -FLT_MAX;
        s.sum[i] = s.weighted[i] = 0.0f;
    }
}

enum : uint32_t { NO_LOGIT = 0xff800000 }; /* -inf: of no weight, whatever the value */

__device__ __forceinline__ void merge_row(pool_sums &s, int i, float logit, float value)
{
    const float log2_e = 1.44269504089f;
    const bool up = logit > s.max[i];
    const float e = exp2_fast(-fabsf(logit - s.max[i]) * log2_e), weight = up ? 1.0f : e,
                shrink = up ? e : 1.0f, v = __float_as_uint(logit) == NO_LOGIT ? 0.0f : value;
    s.sum[i] = fmaf(s.sum[i], shrink, weight);
    s.weighted[i] = fmaf(s.weighted[i], shrink, weight * v);
    s.max[i] = up ? logit : s.max[i];
}

/* An infinite maximum makes NaN, as inf - inf does. */
__device__ __forceinline__ channels pooled_of(const pool_sums &s)
{
    channels v;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        v.x[i] = s.sum[i] != 0.0f ? __fdividef(s.weighted[i], s.sum[i]) : 0.0f;
        if (s.max[i] == INFINITY) v.x[i] = NAN;
    }
    return v;
}

/* N rows of one series as they are read; rows that are not there have logits of -inf, which merging and
 * gradients leave out. */
template <typename T, int N> struct pool_rows {
    raw_channels<T> value[N], logit[N];
};
template <typename B, int N> struct pool_biases {
    raw_channels<B> row[N];
};

template <typename T> __device__ __forceinline__ raw_channels<T> no_logits()
{
    raw_channels<T> c;
    constexpr uint32_t word = sizeof(T) == 4 ? NO_LOGIT : is_bf16<T> ? 0xff80ff80 : 0xfc00fc00;
#pragma unroll
    for (unsigned i = 0; i < sizeof(c.w) / 4; i++) c.w[i] = word;
    return c;
}

/* The rows of an entry: of this thread's channels the first row of either series. */
template <typename T> struct pool_source {
    const T *b, *a;
    bool has_b, has_a;
};

template <typename T>
__device__ __forceinline__ pool_source<T> pool_source_of(const pool_kernel &a, const pool_facts &f,
                                                         int channel)
{
    const T *const own = (const T *)a.proj + f.view_b * a.proj_b + f.row * a.proj_row + channel;
    const bool some = (f.live || f.ghost) && channel < a.width;
    return {own - a.ratio * a.proj_row + 2 * a.width, own, some && f.before, some};
}

/* Chunks of N rows of each series: b's come first. */
__device__ __forceinline__ int chunks_of(const pool_kernel &a, int rows)
{
    return (int)((a.ratio + rows - 1) / rows);
}

/* Chunk k of an entry: which series, its first row, how many rows there are. */
struct pool_part_of_rows {
    bool b;
    int j, rows;
};
template <int N> __device__ __forceinline__ pool_part_of_rows part_at(const pool_kernel &a, int k)
{
    const int series = chunks_of(a, N);
    const bool b = a.overlap && k < series;
    const int j = (a.overlap && !b ? k - series : k) * N, left = (int)a.ratio - j;
    return {b, j, left < N ? left : N};
}

template <typename T, int N, bool WIDE>
__device__ __forceinline__ void load_rows(pool_rows<T, N> &to, const pool_kernel &a, const pool_source<T> &x,
                                          const pool_part_of_rows &part, int count)
{
    const T *p = (part.b ? x.b : x.a) + part.j * a.proj_row;
    const int rows = (part.b ? x.has_b : x.has_a) ? part.rows : 0;
#pragma unroll
    for (int u = 0; u < N; u++, p += a.proj_row) {
        to.value[u] = {};
        to.logit[u] = no_logits<T>();
        if (u >= rows) continue;
        to.value[u] = WIDE ? load_wide<T, true>(p) : load_some(p, count);
        to.logit[u] = WIDE ? load_wide<T, true>(p + a.width) : load_some(p + a.width, count);
    }
}

template <typename B, int N, bool WIDE>
__device__ __forceinline__ void load_biases(pool_biases<B, N> &to, const pool_kernel &a,
                                            const pool_part_of_rows &part, int channel, int count)
{
    const int64_t step = part.b ? a.bias_b_row : a.bias_a_row;
    const B *p = (const B *)(part.b ? a.bias_b : a.bias_a) + part.j * step + channel;
#pragma unroll
    for (int u = 0; u < N; u++, p += step) {
        to.row[u] = {};
        if (u >= part.rows || count <= 0) continue;
        to.row[u] = WIDE ? load_wide<B, false>(p) : load_some(p, count);
    }
}

template <typename T, typename B, int N>
__device__ __forceinline__ void merge_rows(pool_sums &sums, const pool_rows<T, N> &rows,
                                           const pool_biases<B, N> &bias)
{
#pragma unroll
    for (int u = 0; u < N; u++)
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            merge_row(sums, i, rows.logit[u].at(i) + bias.row[u].at(i), rows.value[u].at(i));
}

/* Row j of the block before, from prev_b. */
struct prev_channels {
    channels value, logit;
};

template <typename B>
__device__ __forceinline__ prev_channels load_prev(const pool_kernel &a, int64_t b, int j, int channel,
                                                   int count)
{
    const any_floats prev = {a.prev, a.prev_dtype};
    const int64_t at = b * a.prev_b + j * a.prev_row + channel;
    prev_channels p = {};
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        if (i >= count) continue;
        p.value.x[i] = prev.at(at + i);
        p.logit.x[i] =
            prev.at(at + a.width + i) + to_float<B>(((const B *)a.bias_b)[j * a.bias_b_row + channel + i]);
    }
    return p;
}

template <typename B>
__device__ __forceinline__ void merge_prev(pool_sums &s, const pool_kernel &a, int64_t b, int channel,
                                           int count)
{
    for (int j = 0; j < a.ratio; j++) {
        const prev_channels p = load_prev<B>(a, b, j, channel, count);
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) merge_row(s, i, p.logit.x[i], p.value.x[i]);
    }
}

/*
 * Pools every step-th entry from `first` on and gives each to `emit`, which the group's threads call
 * together. HOLD: a series is one chunk; both series of an entry are read at once, while other blocks merge
 * theirs. Else the next chunk of rows, of the same entry or of the next, is read before this one is merged.
 */
template <typename T, typename B, int N, bool HOLD, bool WIDE, typename EMIT>
__device__ __forceinline__ void pool_walk(const pool_kernel &a, const group &g, int64_t first, int64_t step,
                                          int64_t entries, const EMIT &emit)
{
    const int channel = g.lane * GROUP_CHANNELS, count = a.width - channel,
              chunks = chunks_of(a, N) * (a.overlap ? 2 : 1);
    const pool_part_of_rows part_b = {true, 0, (int)a.ratio}, part_a = {false, 0, (int)a.ratio};
    if (first >= entries) return;
    pool_biases<B, N> bias;
    pool_entry x = pool_entry_at(a, first);
    pool_source<T> from = pool_source_of<T>(a, pool_facts_of(a, x), channel);
    pool_rows<T, N> now, next;
    if (!HOLD) load_rows<T, N, WIDE>(next, a, from, part_at<N>(a, 0), count);
    for (int64_t e = first; e < entries; e += step) {
        const pool_entry own = x;
        const pool_facts facts = pool_facts_of(a, own);
        const entry_factors angles = entry_angles(a.entry, g, facts.position);
        pool_sums sums;
        if (HOLD) {
            if (a.overlap) load_rows<T, N, WIDE>(now, a, from, part_b, count);
            load_rows<T, N, WIDE>(next, a, from, part_a, count);
        }
        clear_sums(sums);
        if (facts.prev) merge_prev<B>(sums, a, own.b, channel, count);
        if (HOLD) {
            if (a.overlap) {
                load_biases<B, N, WIDE>(bias, a, part_b, channel, count);
                merge_rows(sums, now, bias);
            }
            load_biases<B, N, WIDE>(bias, a, part_a, channel, count);
            merge_rows(sums, next, bias);
            if (e + step < entries) {
                x = pool_entry_at(a, e + step);
                from = pool_source_of<T>(a, pool_facts_of(a, x), channel);
            }
        }
        for (int k = 0; k < chunks && !HOLD; k++) {
            now = next;
            load_biases<B, N, WIDE>(bias, a, part_at<N>(a, k), channel, count);
            if (k + 1 < chunks) {
                load_rows<T, N, WIDE>(next, a, from, part_at<N>(a, k + 1), count);
            } else if (e + step < entries) {
                x = pool_entry_at(a, e + step);
                from = pool_source_of<T>(a, pool_facts_of(a, x), channel);
                load_rows<T, N, WIDE>(next, a, from, part_at<N>(a, 0), count);
            }
            merge_rows(sums, now, bias);
        }
        emit(own, facts, angles, sums);
    }
}

/* Rows of a chunk of short blocks, and of long ones. */
enum { HELD_ROWS = 4 };
template <typename T> static constexpr int long_rows()
{
    return sizeof(T) == 2 ? 8 : 4;
}

#endif
