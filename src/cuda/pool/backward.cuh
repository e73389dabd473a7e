/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.cuh - gradients of projections, biases, norm weights and the block before.
 *
 * As forward, an entry owns the rows that it pools: p = exp(logit - max) / sum, d_value = p d, d_logit = p
 * (value - pooled) d, where d is the entry's gradient taken back through rotation and norm. Up to four rows a
 * series (CSA's r 4) stay in registers from the pooling to their gradients, so each element is read and
 * written once. Longer blocks go twice: pool_statistics writes three floats a channel of each entry,
 * pool_spread reads the rows again, the last ones first, as L2 has these still.
 *
 * Sums over entries: a run of entries, cut by their number alone, keeps its own, of short blocks in shared
 * memory, else in registers; sum_runs() adds the runs in order. Limit: bytes moved over the copy rate, of
 * long blocks 2/3 of that.
 */
#ifndef QUERN_CUDA_POOL_BACKWARD_CUH
#define QUERN_CUDA_POOL_BACKWARD_CUH

#include "pool/rows.cuh"

/* What the gradients of an entry's rows need: exp2(logit log2e + shift) scale is p d. */
struct pool_statistic {
    channels shift, pooled, scale;
};

__device__ __forceinline__ channels load_d_out(const pool_kernel &a, const pool_facts &x, int channel)
{
    const any_floats d = {a.d_out, a.d_out_dtype};
    const int64_t at = x.view_b * a.d_out_b + x.n * a.d_out_row + channel;
    channels v = {};
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        if (channel + i < a.width) v.x[i] = d.at(at + i);
    return v;
}

/* d: the gradient of the entry. The group's threads come together. */
__device__ __forceinline__ pool_statistic statistic_of(const pool_kernel &a, const group &g,
                                                       const pool_facts &x, const channels &norm,
                                                       const entry_factors &angles, const pool_sums &sums,
                                                       channels d, channels &d_norm, float *row)
{
    const float log2_e = 1.44269504089f;
    pool_statistic st;
    channels share = {};
    st.pooled = pooled_of(sums);
    if (entry_has_angles(a.entry, x.position))
        entry_backward(a.entry, g, x.position, norm, angles, st.pooled, d, share, row);
    else d = {}; /* its row is 0 */
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) d_norm.x[i] += x.ghost ? 0.0f : share.x[i];
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        st.shift.x[i] = sums.max[i] * -log2_e;
        st.scale.x[i] = sums.sum[i] != 0.0f ? __fdividef(d.x[i], sums.sum[i]) : 0.0f;
    }
    return st;
}

__device__ __forceinline__ void gradient_of(const pool_statistic &st, int i, float logit, float value,
                                            float &d_value, float &d_logit)
{
    const float log2_e = 1.44269504089f;
    const bool some = __float_as_uint(logit) != NO_LOGIT;
    d_value = some ? exp2_fast(fmaf(logit, log2_e, st.shift.x[i])) * st.scale.x[i] : 0.0f;
    d_logit = some ? d_value * (value - st.pooled.x[i]) : 0.0f;
}

/* Sums of d_logit over entries, a row each: in registers, or in shared memory, where a thread has every
 * blockDim.x-th place. */
template <int N> struct own_sums {
    channels x[N];
    __device__ __forceinline__ void add(int u, const channels &d)
    {
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) x[u].x[i] += d.x[i];
    }
    __device__ __forceinline__ channels get(int u) const
    {
        return x[u];
    }
};
struct shared_sums {
    float4 *x; /* of this thread */
    __device__ __forceinline__ void add(int u, const channels &d) const
    {
        float4 &to = x[u * blockDim.x], old = to;
        to = make_float4(old.x + d.x[0], old.y + d.x[1], old.z + d.x[2], old.w + d.x[3]);
    }
    __device__ __forceinline__ channels get(int u) const
    {
        const float4 v = x[u * blockDim.x];
        return {{v.x, v.y, v.z, v.w}};
    }
};

/* The gradients of a chunk's rows. */
template <typename T, typename B, int N, typename SUMS>
__device__ __forceinline__ void spread_rows(const pool_kernel &a, const pool_facts &x,
                                            const pool_part_of_rows &part, const pool_rows<T, N> &rows,
                                            const pool_biases<B, N> &own, const pool_statistic &st,
                                            int channel, int count, SUMS &bias)
{
    const int64_t first = x.row + part.j - (part.b ? a.ratio : 0);
    T *to =
        (T *)a.d_proj + x.view_b * a.d_proj_b + first * a.d_proj_row + channel + (part.b ? 2 * a.width : 0);
    if (part.b ? !x.before : x.ghost) return;
#pragma unroll
    for (int u = 0; u < N; u++, to += a.d_proj_row) {
        channels d_value, d_logit;
        if (u >= part.rows) continue;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            gradient_of(st, i, rows.logit[u].at(i) + own.row[u].at(i), rows.value[u].at(i), d_value.x[i],
                        d_logit.x[i]);
        bias.add(u, d_logit);
        if (a.d_proj == NULL) continue;
        put_channels<T>(to, d_value, count);
        put_channels<T>(to + a.width, d_logit, count);
    }
}

/* The same of a block before that stands in prev_b: its rows j ... */
template <typename B, int N, typename SUMS>
__device__ __forceinline__ void spread_prev(const pool_kernel &a, int64_t b, const pool_statistic &st,
                                            int first, int channel, int count, SUMS &bias)
{
#pragma unroll
    for (int u = 0; u < N; u++) {
        const int j = first + u;
        if (j >= a.ratio) continue;
        const prev_channels p = load_prev<B>(a, b, j, channel, count);
        channels d_value, d_logit;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            gradient_of(st, i, p.logit.x[i], p.value.x[i], d_value.x[i], d_logit.x[i]);
        bias.add(u, d_logit);
        if (a.d_prev == NULL) continue;
        char *const to =
            (char *)a.d_prev + (b * a.d_prev_b + j * a.d_prev_row) * (a.d_prev_dtype == QUERN_F32 ? 4 : 2);
        put_floats(to, a.d_prev_dtype, channel, d_value, count);
        put_floats(to, a.d_prev_dtype, a.width + channel, d_logit, count);
    }
}

/* Series b of a sequence's last block has no gradient, where no block follows. */
template <typename T>
__device__ __forceinline__ void clear_last(const pool_kernel &a, const pool_facts &x, int channel, int count)
{
    if (a.d_proj == NULL || !a.overlap || !x.live || a.followed || !x.last) return;
    T *p = (T *)a.d_proj + x.view_b * a.d_proj_b + x.row * a.d_proj_row + 2 * a.width + channel;
    for (int j = 0; j < a.ratio; j++, p += a.d_proj_row) {
        put_channels<T>(p, {}, count);
        put_channels<T>(p + a.width, {}, count);
    }
}

__device__ __forceinline__ void store_part(float *part, int channel, int width, const channels &v)
{
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        if (channel + i < width) part[channel + i] = v.x[i];
}

/* Registers of a thread, of short blocks of tokens. */
enum { BACKWARD_REGISTERS = 128 };

/* Entries whose series are one chunk each: all of it. Entries first ... end - 1 of a run. */
template <typename T, typename B, bool WIDE>
__global__ void __maxnreg__(sizeof(T) == 2 ? BACKWARD_REGISTERS : 168)
    pool_gradients(const __grid_constant__ pool_kernel a, int64_t entries, int lanes)
{
    enum { N = HELD_ROWS };
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[PARTS];
    const group g(parts, lanes);
    const int channel = g.lane * GROUP_CHANNELS, count = a.width - channel;
    float *const row = rows_shared + g.index * lanes * GROUP_CHANNELS;
    const int64_t run = (int64_t)blockIdx.x * (blockDim.x / lanes) + g.index;
    if (run >= a.runs) return;
    const int64_t end = entries * (run + 1) / a.runs;
    const pool_part_of_rows part_b = {true, 0, (int)a.ratio}, part_a = {false, 0, (int)a.ratio};
    float4 *const sums_at = (float4 *)(rows_shared + blockDim.x * GROUP_CHANNELS) + threadIdx.x;
    shared_sums sums_b = {sums_at}, sums_a = {sums_at + N * blockDim.x};
    for (int u = 0; u < 2 * N; u++) sums_at[u * blockDim.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const channels norm = norm_weights(a.entry, g);
    channels d_norm = {};
    for (int64_t e = entries * run / a.runs; e < end; e++) {
        const pool_entry x = pool_entry_at(a, e);
        const pool_facts own = pool_facts_of(a, x);
        if (!own.live && !own.ghost) continue;
        const pool_source<T> from = pool_source_of<T>(a, own, channel);
        pool_rows<T, N> rows_b, rows_a;
        pool_biases<B, N> bias;
        if (a.overlap) load_rows<T, N, WIDE>(rows_b, a, from, part_b, count);
        load_rows<T, N, WIDE>(rows_a, a, from, part_a, count);
        const channels d = load_d_out(a, own, channel);
        const entry_factors angles = entry_angles(a.entry, g, own.position);
        pool_sums sums;
        clear_sums(sums);
        if (own.prev) merge_prev<B>(sums, a, x.b, channel, count);
        if (a.overlap) {
            load_biases<B, N, WIDE>(bias, a, part_b, channel, count);
            merge_rows(sums, rows_b, bias);
        }
        load_biases<B, N, WIDE>(bias, a, part_a, channel, count);
        merge_rows(sums, rows_a, bias);
        const pool_statistic st = statistic_of(a, g, own, norm, angles, sums, d, d_norm, row);
        spread_rows<T, B, N>(a, own, part_a, rows_a, bias, st, channel, count, sums_a);
        if (a.overlap) {
            load_biases<B, N, WIDE>(bias, a, part_b, channel, count);
            spread_rows<T, B, N>(a, own, part_b, rows_b, bias, st, channel, count, sums_b);
        }
        if (own.prev) spread_prev<B, N>(a, x.b, st, 0, channel, count, sums_b);
        clear_last<T>(a, own, channel, count);
    }
    const int slots = pool_slots(a);
    float *const part = a.parts + run * slots * a.width;
    for (int u = 0; u < a.ratio; u++) {
        if (a.overlap) store_part(part + u * a.width, channel, a.width, sums_b.get(u));
        store_part(part + (slots - a.ratio + u) * a.width, channel, a.width, sums_a.get(u));
    }
    store_part(a.norm_parts + run * a.width, channel, a.width, d_norm);
}

/* Longer entries: their statistics, and the shares of the norm weight's gradient. */
template <typename T, typename B, int N, bool WIDE>
__global__ void __launch_bounds__(GROUP_MOST, 2)
    pool_statistics(const __grid_constant__ pool_kernel a, int64_t entries, int lanes)
{
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[PARTS];
    const group g(parts, lanes);
    const int channel = g.lane * GROUP_CHANNELS, count = a.width - channel;
    float *const row = rows_shared + g.index * lanes * GROUP_CHANNELS;
    const int64_t run = (int64_t)blockIdx.x * (blockDim.x / lanes) + g.index;
    if (run >= a.norm_runs) return;
    const channels norm = norm_weights(a.entry, g);
    channels d_norm = {};
    pool_walk<T, B, N, false, WIDE>(
        a, g, run, a.norm_runs, entries,
        [&](const pool_entry &own, const pool_facts &x, const entry_factors &angles, const pool_sums &sums) {
            if (!x.live && !x.ghost) return;
            const channels d = load_d_out(a, x, channel);
            const pool_statistic st = statistic_of(a, g, x, norm, angles, sums, d, d_norm, row);
            float *const to = a.statistics + own.e * 3 * a.width;
            store_part(to, channel, a.width, st.shift);
            store_part(to + a.width, channel, a.width, st.pooled);
            store_part(to + 2 * a.width, channel, a.width, st.scale);
            clear_last<T>(a, x, channel, count);
        });
    store_part(a.norm_parts + run * a.width, channel, a.width, d_norm);
}

__device__ __forceinline__ channels load_part(const float *part, int channel, int width)
{
    channels v = {};
    if (width % GROUP_CHANNELS == 0 && channel < width)
        *(float4 *)&v = __ldg((const float4 *)(part + channel));
    else
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            if (channel + i < width) v.x[i] = __ldg(part + channel + i);
    return v;
}

/* Rows of chunk blockIdx.x of every runs-th entry, the last one first. */
template <typename T, typename B, int N, bool WIDE>
__global__ void __maxnreg__(168)
    pool_spread(const __grid_constant__ pool_kernel a, int64_t entries, int lanes)
{
    const group g(NULL, lanes);
    const int channel = g.lane * GROUP_CHANNELS, count = a.width - channel;
    const int64_t run = (int64_t)blockIdx.y * (blockDim.x / lanes) + g.index;
    const pool_part_of_rows part = part_at<N>(a, (int)blockIdx.x);
    if (run >= a.runs) return;
    own_sums<N> bias = {};
    pool_biases<B, N> own_bias;
    load_biases<B, N, WIDE>(own_bias, a, part, channel, count);
    pool_rows<T, N> next;
    pool_statistic st_next;
    pool_entry x;
    auto load = [&](int64_t e) {
        x = pool_entry_at(a, e);
        const pool_source<T> from = pool_source_of<T>(a, pool_facts_of(a, x), channel);
        load_rows<T, N, WIDE>(next, a, from, part, count);
        const float *const at = a.statistics + e * 3 * a.width;
        st_next.shift = load_part(at, channel, a.width);
        st_next.pooled = load_part(at + a.width, channel, a.width);
        st_next.scale = load_part(at + 2 * a.width, channel, a.width);
    };
    int64_t e = entries - 1 - run;
    if (e >= 0) load(e);
    for (; e >= 0; e -= a.runs) {
        const pool_rows<T, N> now = next;
        const pool_statistic st = st_next;
        const pool_facts own = pool_facts_of(a, x);
        const int64_t b = x.b;
        if (e >= a.runs) load(e - a.runs);
        if (!own.live && !own.ghost) continue;
        spread_rows<T, B, N>(a, own, part, now, own_bias, st, channel, count, bias);
        if (own.prev && part.b) spread_prev<B, N>(a, b, st, part.j, channel, count, bias);
    }
    const int slots = pool_slots(a), first = part.j + (a.overlap && !part.b ? (int)a.ratio : 0);
    float *const to = a.parts + (run * slots + first) * a.width;
#pragma unroll
    for (int u = 0; u < N; u++)
        if (u < part.rows) store_part(to + u * a.width, channel, a.width, bias.get(u));
}

template <typename T, typename B, int N, bool WIDE>
static quern_status pool_backward_long(const pool_kernel &a, int64_t entries, cudaStream_t stream)
{
    const int lanes = group_lanes(a.width), groups = groups_of_block(a.width), threads = groups * lanes;
    const size_t bytes = (size_t)(threads * GROUP_CHANNELS) * sizeof(float);
    const int chunks = (int)((a.ratio + N - 1) / N) * (a.overlap ? 2 : 1);
    pool_statistics<T, B, HELD_ROWS, WIDE>
        <<<blocks_for(a.norm_runs, groups), threads, bytes, stream>>>(a, entries, lanes);
    pool_spread<T, B, N, WIDE>
        <<<dim3((unsigned)chunks, blocks_for(a.runs, groups)), threads, 0, stream>>>(a, entries, lanes);
    return LAUNCHED("pool's gradients of long blocks");
}

template <typename T, typename B>
static quern_status pool_backward_of(const pool_kernel &a, int64_t entries, cudaStream_t stream)
{
    const int lanes = group_lanes(a.width), groups = groups_of_block(a.width), threads = groups * lanes;
    const size_t bytes = (size_t)((1 + 2 * HELD_ROWS) * threads * GROUP_CHANNELS) * sizeof(float);
    if (a.statistics != NULL)
        return a.wide ? pool_backward_long<T, B, long_rows<T>(), true>(a, entries, stream)
                      : pool_backward_long<T, B, HELD_ROWS, false>(a, entries, stream);
    const unsigned grid = blocks_for(a.runs, groups);
    if (a.wide) pool_gradients<T, B, true><<<grid, threads, bytes, stream>>>(a, entries, lanes);
    else pool_gradients<T, B, false><<<grid, threads, bytes, stream>>>(a, entries, lanes);
    return LAUNCHED("pool's gradients");
}

#endif
