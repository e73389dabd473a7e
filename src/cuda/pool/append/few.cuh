/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * few.cuh - pool_append for steps of few tokens whose rows can be read four channels at a time, in few
 * instructions: each runs once or twice in a block's life, so what counts beside the reads is how long
 * instructions take to come. The rows go to shared memory by cp.async, each thread's channels to places of
 * its own, and one loop merges them; the code that reads a chunk of rows stands once. Merges, order and
 * results are kernel.cuh's, to the bit.
 */
#ifndef QUERN_CUDA_POOL_APPEND_FEW_CUH
#define QUERN_CUDA_POOL_APPEND_FEW_CUH

#include "pool/append/kernel.cuh"

enum { FEW_PLACES = 6 }; /* of a row: value and logit of both series, then both biases */

/* 16 or 8 bytes; none where there are none: zeros. */
__device__ __forceinline__ void few_copy(uint4 *to, const char *from, int size, bool here)
{
    const uint32_t at = smem_address(to);
    if (size == 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(here ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(here ? 8 : 0)
                     : "memory");
}

/* Begins to read rows q ... q + rows - 1 of a block. */
__device__ __forceinline__ void few_read(uint4 *places, const append_kernel &a, const append_thread &t,
                                         uint32_t q, int rows)
{
    const int64_t j = q % a.ratio;
    const bool here = t.count > 0;
    const int step = (int)blockDim.x;
#pragma unroll 1
    for (int u = 0; u < rows; u++) {
        int size;
        const char *const at = append_row(a, t, q + (uint32_t)u, size);
        uint4 *const to = places + u * FEW_PLACES * step;
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < 2 * a.series) few_copy(to + k * step, at + (int64_t)k * t.p.width * size, size, here);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const int own = t.p.bias_dtype[s] == QUERN_F32 ? 4 : 2;
            if (s < a.series)
                few_copy(to + (4 + s) * step, t.p.bias[s] + ((j + u) * t.p.bias_row[s] + t.channel) * own,
                         own, here);
        }
    }
}

__device__ __forceinline__ void few_merge(pool_sums &sums, const uint4 *places, int s, quern_dtype dtype,
                                          quern_dtype bias_dtype)
{
    const int step = (int)blockDim.x;
    const channels value = append_floats(places[2 * s * step], dtype),
                   logit = append_floats(places[(2 * s + 1) * step], dtype),
                   bias = append_floats(places[(4 + s) * step], bias_dtype);
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) merge_row(sums, i, logit.x[i] + bias.x[i], value.x[i]);
}

/* append_merge_rows() of what few_read() has read. */
__device__ __forceinline__ void few_merge_rows(append_sums &sums, append_sums &kept, const append_kernel &a,
                                               const append_thread &t, const uint4 *places, uint32_t q,
                                               int count, uint32_t left, bool last)
{
#pragma unroll 1
    for (int u = 0; u < count; u++, q++, places += FEW_PLACES * (int)blockDim.x) {
        const quern_dtype dtype = q < t.first ? QUERN_F32 : t.p.dtype;
        if (q == left) kept = sums;
        few_merge(sums.a, places, 0, dtype, t.p.bias_dtype[0]);
        if (a.series == 2 && (!last || q < left)) few_merge(sums.b, places, 1, dtype, t.p.bias_dtype[1]);
    }
}

/* Rows that the ring gets. */
__device__ __forceinline__ void few_commit(const append_kernel &a, const append_thread &t,
                                           const append_numbers &n, const append_sums &kept, uint32_t left)
{
    const int64_t columns = 2 * a.series * t.p.width, step = (int64_t)t.p.width * t.p.size;
    append_store_sums(kept.a, t, 0);
    if (a.series == 2) append_store_sums(kept.b, t, 1);
#pragma unroll 1
    for (uint32_t q = left > n.first ? left : n.first; q < n.end; q++) {
        float *const to = t.state + 3 * a.series * t.p.width + q % a.ring * columns + t.channel;
        const char *const from = t.p.proj + ((t.row + q) * t.p.proj_row + t.channel) * t.p.size;
        uint4 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < 2 * a.series) x[k] = append_load(from + k * step, t.p.size, t.count, true);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < 2 * a.series)
                append_store(to + k * t.p.width, append_floats(x[k], t.p.dtype), t.count, true);
    }
}

__global__ void __launch_bounds__(APPEND_THREADS, 1) append_few(const __grid_constant__ append_kernel a)
{
    extern __shared__ __align__(16) float rows_shared[]; /* a float a channel, then places */
    __shared__ float parts[POOL_PARTS][PARTS];
    __shared__ append_shared shared;
    const int which = a.parts > 1 && (int)threadIdx.x >= a.part[1].first ? 1 : 0, b = (int)blockIdx.x;
    const append_part &p = a.part[which];
    const append_numbers n = append_numbers_at(a, b);
    const bool mine = (int)threadIdx.x < p.first + p.lanes, /* else no group has the thread */
        some = n.slot >= 0 && n.slot < a.states && n.count() > 0;
    const uint32_t whole = n.end / a.ratio, old = n.first / a.ratio;
    append_thread t = {p, group(parts[which], p.lanes), 0, 0, NULL, n.first, n.row - (int64_t)n.first};
    t.channel = t.g.lane * GROUP_CHANNELS;
    t.count = p.width - t.channel;
    t.state = p.state + (some ? n.slot : 0) * p.state_row;
    float *const row = rows_shared + p.first * GROUP_CHANNELS;
    uint4 *const places = (uint4 *)(rows_shared + blockDim.x * GROUP_CHANNELS) + threadIdx.x;
    /* As if the ring were full; looked at once the number of merged rows has come. */
    uint32_t q = n.first > a.ring ? n.first - a.ring : 0;
    int ready = some && mine ? append_some(a, q, append_ends_of(a, n, q).until) : 0;
    append_sums sums, kept;
    append_ahead ahead = {};
    append_ends ends = {};
    append_verdict verdict = {};
    bool begun = false, refused = false;
#pragma unroll 1
    for (;;) {
        few_read(places, a, t, q, ready);
        if (!begun) {
            int32_t merged = 0;
            begun = true;
            if (some && mine && n.first > 0) {
                append_load_sums(sums.a, t, 0);
                if (a.series == 2) append_load_sums(sums.b, t, 1);
                merged = p.merged[n.slot * p.merged_row];
            } else {
                clear_sums(sums.a);
                clear_sums(sums.b);
            }
            if (some && mine && whole > old) {
                ahead.norm = norm_weights(p.entry, t.g);
                ahead.angles = entry_angles(p.entry, t.g, (int64_t)old * a.ratio);
            }
            verdict = append_judge(a, t, shared, append_scan_share(a, b, n.slot), b, n, mine, merged);
            ends = append_ends_of(a, n, (uint32_t)merged);
            if (!verdict.live || !mine) break;
            if (q != (uint32_t)merged) {
                q = (uint32_t)merged;
                ready = append_some(a, q, ends.until);
                asm volatile("cp.async.wait_all;" ::: "memory");
                continue;
            }
        }
        if (ready == 0) break;
        asm volatile("cp.async.wait_all;" ::: "memory");
        few_merge_rows(sums, kept, a, t, places, q, ready, ends.left,
                       q / a.ratio * a.ratio + a.ratio >= ends.until && ends.until > ends.left);
        q += (uint32_t)ready;
        ready = append_some(a, q, ends.until);
        if (q % a.ratio != 0) continue;
        const uint32_t e = q / a.ratio - 1;
        if (e >= old) {
            if (e > old) ahead.angles = entry_angles(p.entry, t.g, (int64_t)e * a.ratio);
            refused |= append_emit(a, t, b, e, (int64_t)verdict.scan.before + (e - old), sums.a, ahead, row);
        }
        sums.a = sums.b;
        clear_sums(a.series == 2 ? sums.b : sums.a);
    }
    const bool live = verdict.live;
    int32_t bad = verdict.bad;
    if (ends.left == ends.until) kept = sums;
    if (threadIdx.x == 0 && (n.slot < -1 || n.slot >= a.states || (some && verdict.scan.taken)))
        raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    if (live && a.careful && __syncthreads_or(refused)) bad = QUERN_STATUS_NOT_FINITE;
    if (live && mine && bad == 0) {
        few_commit(a, t, n, kept, ends.left);
        if (t.g.lane == 0) p.merged[n.slot * p.merged_row] = (int32_t)ends.left;
    }
    if (threadIdx.x == 0 && bad != 0) raise_status(a.status, bad);
    if (threadIdx.x == 0 && a.fault != NULL && (bad != 0 || live)) {
        int32_t &fault = a.fault[n.slot * a.fault_row];
        fault = bad != 0 ? fault | bad : 0;
    }
    if (!a.counts || !mine) return;
    for (uint32_t i = 0; i < whole - old && (!live || bad != 0); i++)
        append_clear(t, (int64_t)verdict.scan.before + i);
    for (int64_t i = (int64_t)verdict.scan.total + b; i < p.rows; i += a.batch) append_clear(t, i);
}

#endif
