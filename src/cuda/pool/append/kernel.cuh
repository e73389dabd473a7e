/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - a step's tokens into states, as cpu/pool/stage_pool_append.c has it.
 *
 * A block has a sequence, its groups a compressor each: 128 + 32 threads at widths 512 and 128, four
 * channels a thread. Everything that the numbers of the step lead to is read at once: the sums, up to four
 * rows (a step's usual rows: those that leave the ring, and where a block becomes whole those that are in
 * it), the newest row, angles and weights of the norm. How many rows the sums hold is foreseen (a full ring)
 * and looked at when these have come. Sums before the ring's rows stay in registers; states are written
 * last, once every entry of both compressors is known to be accepted.
 *
 * Merges are those of rows.cuh in the order of the tokens, so entries have the bits of the pool stage.
 * Limit: latency, of three reads that depend on each other and a launch; 128 sequences move 7 MB, 1.7 us.
 */
#ifndef QUERN_CUDA_POOL_APPEND_KERNEL_CUH
#define QUERN_CUDA_POOL_APPEND_KERNEL_CUH

#include "pool/append/params.cuh"
#include "pool/rows.cuh"

enum { APPEND_ROWS = 4, APPEND_THREADS = 256, APPEND_WARPS = 10 };

/* ---- the step's numbers ---- */

/* Sequence b: rows [row, row + count) of the call stand at positions first ... end - 1. */
struct append_numbers {
    int64_t slot, row;
    uint32_t first, end;
    bool bad_offsets, bad_position;
    __device__ __forceinline__ uint32_t count() const { return end - first; }
};

__device__ __forceinline__ append_numbers append_numbers_at(const append_kernel &a, int b)
{
    const int32_t *const rows = a.rows + b * a.rows_row;
    const int32_t from = rows[0], to = rows[a.rows_next], position = a.positions[b * a.positions_row];
    append_numbers n;
    n.slot = a.slots_i64 ? ((const int64_t *)a.slots)[b * a.slots_row]
                         : ((const int32_t *)a.slots)[b * a.slots_row];
    n.bad_offsets =
        from < 0 || to < from || to > a.tokens || (b == 0 && a.rows_row == a.rows_next && from != 0);
    n.bad_position = position < 0;
    n.row = n.bad_offsets ? 0 : from;
    n.first = position < 0 ? 0u : (uint32_t)position;
    n.end = n.first + (n.bad_offsets ? 0u : (uint32_t)(to - from));
    return n;
}

/* What the whole step says of sequence b. */
struct append_scan {
    uint32_t before, total; /* entries of the sequences before, and of all */
    bool taken;             /* an earlier one has tokens and the slot */
};

/* A thread's share of it. */
__device__ __forceinline__ append_scan append_scan_share(const append_kernel &a, int b, int64_t slot)
{
    append_scan s = {0, 0, false};
    for (int i = (int)threadIdx.x; i < a.batch; i += (int)blockDim.x) {
        const append_numbers n = append_numbers_at(a, i);
        const uint32_t made = n.end / a.ratio - n.first / a.ratio;
        s.total += made;
        if (i >= b) continue;
        s.before += made;
        s.taken = s.taken || (slot >= 0 && n.slot == slot && n.count() > 0);
    }
    return s;
}

/* ---- rows ---- */

/* Four channels as they stand in memory: words of f32, or the first two words of 16 bits. */
__device__ __forceinline__ uint4 append_load(const char *p, int size, int count, bool wide)
{
    uint4 x = make_uint4(0, 0, 0, 0);
    if (wide && count > 0) {
        if (size == 4) x = *(const uint4 *)p;
        else *(uint2 *)&x = *(const uint2 *)p;
    } else if (!wide) {
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            if (i >= count) continue;
            if (size == 4) (&x.x)[i] = ((const uint32_t *)p)[i];
            else (&x.x)[i / 2] |= (uint32_t)((const uint16_t *)p)[i] << 16 * (i % 2);
        }
    }
    return x;
}

__device__ __forceinline__ channels append_floats(const uint4 &x, quern_dtype dtype)
{
    channels v;
    if (dtype == QUERN_F32) {
        v = {{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)}};
    } else {
        const float2 low = dtype == QUERN_BF16 ? unpack2<bf16>(x.x) : unpack2<__half>(x.x),
                     high = dtype == QUERN_BF16 ? unpack2<bf16>(x.y) : unpack2<__half>(x.y);
        v = {{low.x, low.y, high.x, high.y}};
    }
    return v;
}

__device__ __forceinline__ void append_store(float *to, const channels &v, int count, bool wide)
{
    if (wide && count > 0) *(float4 *)to = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    else if (!wide)
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            if (i < count) to[i] = v.x[i];
}

/* A thread of a sequence's group. */
struct append_thread {
    const append_part &p;
    group g;
    int channel, count;
    float *state;   /* of the sequence */
    uint32_t first; /* rows before stand in the ring */
    int64_t row;    /* of proj, of position 0 */
};

/* Some rows of a block, both series. */
struct append_rows {
    uint4 value[2][APPEND_ROWS], logit[2][APPEND_ROWS], bias[2][APPEND_ROWS];
};

/* Row q: its first channel of this thread, and the bytes of an element. */
__device__ __forceinline__ const char *append_row(const append_kernel &a, const append_thread &t, uint32_t q,
                                                  int &size)
{
    const bool old = q < t.first;
    const int64_t columns = 2 * a.series * t.p.width;
    size = old ? 4 : t.p.size;
    return old ? (const char *)(t.state + 3 * a.series * t.p.width + q % a.ring * columns + t.channel)
               : t.p.proj + ((t.row + q) * t.p.proj_row + t.channel) * t.p.size;
}

__device__ __forceinline__ void append_load_rows(append_rows &to, const append_kernel &a,
                                                 const append_thread &t, uint32_t q, int rows)
{
    const int64_t j = q % a.ratio;
#pragma unroll
    for (int u = 0; u < APPEND_ROWS; u++) {
        if (u >= rows) continue;
        int size;
        const char *const at = append_row(a, t, q + u, size);
        const int64_t step = (int64_t)t.p.width * size;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            if (s >= a.series) continue;
            const int own = t.p.bias_dtype[s] == QUERN_F32 ? 4 : 2;
            to.value[s][u] = append_load(at + 2 * s * step, size, t.count, t.p.wide);
            to.logit[s][u] = append_load(at + (2 * s + 1) * step, size, t.count, t.p.wide);
            to.bias[s][u] = append_load(t.p.bias[s] + ((j + u) * t.p.bias_row[s] + t.channel) * own, own,
                                        t.count, t.p.wide);
        }
    }
}

/* Both accumulators; b: of series b of the open block. */
struct append_sums {
    pool_sums a, b;
};

__device__ __forceinline__ void append_merge(pool_sums &sums, const append_rows &rows, int s, int u,
                                             quern_dtype dtype, quern_dtype bias_dtype)
{
    const channels value = append_floats(rows.value[s][u], dtype),
                   logit = append_floats(rows.logit[s][u], dtype),
                   bias = append_floats(rows.bias[s][u], bias_dtype);
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) merge_row(sums, i, logit.x[i] + bias.x[i], value.x[i]);
}

/* Merges the rows from q on; `kept` gets the sums before row `left`. Series b is not needed where `last`. */
__device__ __forceinline__ void append_merge_rows(append_sums &sums, append_sums &kept,
                                                  const append_kernel &a, const append_thread &t,
                                                  const append_rows &rows, uint32_t q, int count,
                                                  uint32_t left, bool last)
{
#pragma unroll
    for (int u = 0; u < APPEND_ROWS; u++) {
        if (u >= count) continue;
        const quern_dtype dtype = q + u < t.first ? QUERN_F32 : t.p.dtype;
        if (q + u == left) kept = sums;
        append_merge(sums.a, rows, 0, u, dtype, t.p.bias_dtype[0]);
        if (a.series == 2 && (!last || q + u < left))
            append_merge(sums.b, rows, 1, u, dtype, t.p.bias_dtype[1]);
    }
}

/* ---- sums ---- */

__device__ __forceinline__ void append_load_sums(pool_sums &s, const append_thread &t, int series)
{
    const float *const at = t.state + 3 * series * t.p.width + t.channel;
    float *const to[] = {s.max, s.sum, s.weighted};
#pragma unroll
    for (int k = 0; k < 3; k++) {
        const channels v =
            append_floats(append_load((const char *)(at + k * t.p.width), 4, t.count, t.p.wide), QUERN_F32);
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) to[k][i] = k == 0 ? fmaxf(v.x[i], -FLT_MAX) : v.x[i];
    }
}

/* As the CPU has them: nothing yet is -inf. */
__device__ __forceinline__ void append_store_sums(const pool_sums &s, const append_thread &t, int series)
{
    float *const at = t.state + 3 * series * t.p.width + t.channel;
    channels max, sum, weighted;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        max.x[i] = s.max[i] == -FLT_MAX ? -INFINITY : s.max[i];
        sum.x[i] = s.sum[i];
        weighted.x[i] = s.weighted[i];
    }
    append_store(at, max, t.count, t.p.wide);
    append_store(at + t.p.width, sum, t.count, t.p.wide);
    append_store(at + 2 * t.p.width, weighted, t.count, t.p.wide);
}

/* ---- entries ---- */

/* What an entry needs beside its sums, of the first one read ahead. */
struct append_ahead {
    channels norm;
    entry_factors angles;
};

/* Row n of the outputs that are rows becomes 0. */
__device__ __forceinline__ void append_clear(const append_thread &t, int64_t n)
{
    if (n >= t.p.rows) return;
    if (t.p.pooled != NULL) put_channels(t.p.pooled + n * t.p.pooled_row + t.channel, {}, t.count);
    if (t.p.table == NULL) entry_clear(t.p.entry, t.g, t.p.out + n * t.p.out_row, t.p.out_dtype);
}

/* Stores entry e of sequence b, row n of rows. True: it is one that the format refuses. */
__device__ __forceinline__ bool append_emit(const append_kernel &a, const append_thread &t, int b, uint32_t e,
                                            int64_t n, const pool_sums &sums, const append_ahead &ahead,
                                            float *row)
{
    channels v = pooled_of(sums);
    bool bad = false;
    if (t.p.pooled != NULL && n < t.p.rows)
        put_channels(t.p.pooled + n * t.p.pooled_row + t.channel, v, t.count);
    entry_finish(t.p.entry, t.g, (int64_t)e * a.ratio, ahead.norm, ahead.angles, v, row);
    if (t.p.entry.format != ENTRY_ROWS)
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) bad = bad || !isfinite(v.x[i]);
    if (t.p.table == NULL) {
        if (n < t.p.rows) entry_store(t.p.entry, t.g, v, t.p.out + n * t.p.out_row, t.p.out_dtype, a.status);
        return bad;
    }
    const uint32_t at = e % t.p.page;
    const int64_t page = t.p.table[b * t.p.table_row + e / t.p.page * t.p.table_column];
    char *const base = t.p.out + page * t.p.page_bytes, *const to = base + at * t.p.slot_bytes;
    if (t.p.scale_bytes == 0) entry_store(t.p.entry, t.g, v, to, t.p.out_dtype, a.status);
    else
        entry_quantise(t.p.entry, t.g, v, (uint8_t *)to, (uint8_t *)base + t.p.scales + at * t.p.scale_bytes,
                       a.status);
    return bad;
}

/* ---- faults ---- */

/* The bits of a sequence with tokens, of what this thread's group has. */
__device__ __forceinline__ int32_t append_faults(const append_kernel &a, const append_thread &t, int b,
                                                 const append_numbers &n, int32_t merged)
{
    const uint32_t whole = n.end / a.ratio, before = n.first / a.ratio;
    int32_t bad = n.bad_offsets ? QUERN_STATUS_BAD_OFFSETS : 0;
    if (n.bad_position || n.end > INT32_MAX ||
        (whole > before && !entry_has_angles(t.p.entry, (int64_t)(whole - 1) * a.ratio)) ||
        (n.first > 0 && (merged < 0 || n.first < (uint32_t)merged || n.first - (uint32_t)merged > a.ring)))
        bad |= QUERN_STATUS_BAD_POSITION;
    if (t.p.table == NULL || whole == before) return bad;
    for (uint32_t c = before / t.p.page + (uint32_t)t.g.lane; c <= (whole - 1) / t.p.page;
         c += (uint32_t)t.g.lanes)
        if (c >= t.p.columns || (uint32_t)t.p.table[b * t.p.table_row + c * t.p.table_column] >= t.p.pages)
            bad |= QUERN_STATUS_BAD_PAGE;
    return bad;
}

/* What the threads have found, over the block. */
struct append_shared {
    uint32_t before[APPEND_WARPS], total[APPEND_WARPS], bad[APPEND_WARPS], taken[APPEND_WARPS];
};

__device__ __forceinline__ append_scan append_gather(append_shared &m, const append_scan &share, int32_t &bad)
{
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    const uint32_t before = __reduce_add_sync(~0u, share.before), total = __reduce_add_sync(~0u, share.total),
                   bits = __reduce_or_sync(~0u, (uint32_t)bad),
                   taken = __reduce_or_sync(~0u, share.taken ? 1u : 0u);
    if (threadIdx.x % 32 == 0) {
        m.before[warp] = before;
        m.total[warp] = total;
        m.bad[warp] = bits;
        m.taken[warp] = taken;
    }
    __syncthreads();
    append_scan s = {0, 0, false};
    bad = 0;
    for (int w = 0; w < warps; w++) {
        s.before += m.before[w];
        s.total += m.total[w];
        s.taken = s.taken || m.taken[w] != 0;
        bad |= (int32_t)m.bad[w];
    }
    return s;
}

/* Whether a sequence goes on. The block's threads come together. */
struct append_verdict {
    append_scan scan;
    int32_t bad; /* bits that its slot's word gets */
    bool live;
};

__device__ __forceinline__ append_verdict append_judge(const append_kernel &a, const append_thread &t,
                                                       append_shared &m, const append_scan &share, int b,
                                                       const append_numbers &n, bool mine, int32_t merged)
{
    const bool some = n.slot >= 0 && n.slot < a.states && n.count() > 0;
    const int32_t word = some && n.first > 0 && a.fault != NULL ? a.fault[n.slot * a.fault_row] : 0;
    append_verdict v = {{}, some && mine && word == 0 ? append_faults(a, t, b, n, merged) : 0, false};
    v.scan = append_gather(m, share, v.bad);
    v.live = some && word == 0 && v.bad == 0 && !v.scan.taken;
    if (v.scan.taken) v.bad = 0; /* the word is the slot's own sequence's */
    return v;
}

/* ---- a block's work ---- */

/* The first entry of a sequence that needs none of the rows before the call. */
__device__ __forceinline__ uint32_t append_far(const append_kernel &a, const append_numbers &n)
{
    return (n.first + a.ratio - 1) / a.ratio + (uint32_t)a.series - 1;
}

/* Where the rows of a sequence that are merged end: sums are kept at `left`, entries need rows up to
 * `until`. Entries from `far` on are made elsewhere. Once those before are made, from row `near` on, sums
 * may begin anew at row `anew`. */
struct append_ends {
    uint32_t left, until, far, near, anew;
};

__device__ __forceinline__ append_ends append_ends_of(const append_kernel &a, const append_numbers &n,
                                                      uint32_t merged)
{
    const bool parted = a.refused != NULL;
    const uint32_t r = a.ratio, whole = n.end / r, before = (uint32_t)a.series - 1,
                   behind = n.end > a.ring ? n.end - a.ring : 0, left = behind > merged ? behind : merged,
                   far = parted ? append_far(a, n) : whole, made = far < whole ? far : whole,
                   near = made > n.first / r ? made * r : 0, block = left / r;
    return {left, near > left ? near : left, far, near, parted && block > before ? (block - before) * r : 0};
}

/* Rows from q on that are read at once: of a block, up to `until`. */
__device__ __forceinline__ int append_some(const append_kernel &a, uint32_t q, uint32_t until)
{
    const uint32_t block = a.ratio - q % a.ratio, left = until > q ? until - q : 0,
                   some = left < block ? left : block;
    return some < APPEND_ROWS ? (int)some : APPEND_ROWS;
}

/* Writes the sums and the rows of the ring, of which the newest was read ahead. */
__device__ __forceinline__ void append_commit(const append_kernel &a, const append_thread &t,
                                              const append_numbers &n, const append_sums &kept, uint32_t left,
                                              const uint4 (&newest)[4])
{
    append_store_sums(kept.a, t, 0);
    if (a.series == 2) append_store_sums(kept.b, t, 1);
    for (uint32_t q = left > n.first ? left : n.first; q < n.end; q++) {
        const int64_t columns = 2 * a.series * t.p.width, step = (int64_t)t.p.width * t.p.size;
        float *const to = t.state + 3 * a.series * t.p.width + q % a.ring * columns + t.channel;
        const char *const from = t.p.proj + ((t.row + q) * t.p.proj_row + t.channel) * t.p.size;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k >= 2 * a.series) continue;
            const uint4 x =
                q + 1 == n.end ? newest[k] : append_load(from + k * step, t.p.size, t.count, t.p.wide);
            append_store(to + k * t.p.width, append_floats(x, t.p.dtype), t.count, t.p.wide);
        }
    }
}

/* A block's sequence. */
__device__ __forceinline__ void append_sequence(const append_kernel &a)
{
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[POOL_PARTS][PARTS];
    __shared__ append_shared shared;
    const int which = a.parts > 1 && (int)threadIdx.x >= a.part[1].first ? 1 : 0, b = (int)blockIdx.x;
    const append_part &p = a.part[which];
    const append_numbers n = append_numbers_at(a, b);
    const append_scan share = append_scan_share(a, b, n.slot);
    const bool mine = (int)threadIdx.x < p.first + p.lanes, /* else no group has the thread */
        some = n.slot >= 0 && n.slot < a.states && n.count() > 0;
    const uint32_t whole = n.end / a.ratio, old = n.first / a.ratio;
    append_thread t = {p, group(parts[which], p.lanes), 0, 0, NULL, n.first, n.row - (int64_t)n.first};
    t.channel = t.g.lane * GROUP_CHANNELS;
    t.count = p.width - t.channel;
    t.state = p.state + (some ? n.slot : 0) * p.state_row;
    float *const row = rows_shared + p.first * GROUP_CHANNELS;
    /* All reads, before any is waited for. */
    const uint32_t guess = n.first > a.ring ? n.first - a.ring : 0;
    append_sums sums, kept;
    append_rows rows;
    append_ahead ahead = {};
    uint4 newest[4];
    int32_t merged = 0;
    int ready = 0;
    if (some && mine) {
        ready = append_some(a, guess, append_ends_of(a, n, guess).until);
        append_load_rows(rows, a, t, guess, ready);
        if (n.first > 0) {
            append_load_sums(sums.a, t, 0);
            if (a.series == 2) append_load_sums(sums.b, t, 1);
            merged = p.merged[n.slot * p.merged_row];
        }
        int size;
        const char *const at = append_row(a, t, n.end - 1, size);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < 2 * a.series)
                newest[k] = append_load(at + (int64_t)k * p.width * size, size, t.count, p.wide);
        if (whole > old) {
            ahead.norm = norm_weights(p.entry, t.g);
            ahead.angles = entry_angles(p.entry, t.g, (int64_t)old * a.ratio);
        }
    }
    const append_verdict verdict = append_judge(a, t, shared, share, b, n, mine, merged);
    const append_scan &scan = verdict.scan;
    const bool live = verdict.live;
    const int64_t entry = scan.before;
    int32_t bad = verdict.bad;
    if (threadIdx.x == 0 && (n.slot < -1 || n.slot >= a.states || (some && scan.taken)))
        raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    const append_ends ends = append_ends_of(a, n, (uint32_t)merged);
    bool refused = false;
    if (live && mine) {
        if (n.first == 0) {
            clear_sums(sums.a);
            clear_sums(sums.b);
        }
        uint32_t q = (uint32_t)merged;
        if (q != guess) ready = 0;
        for (; q < ends.until; ready = 0) {
            if (q >= ends.near && q < ends.anew) {
                clear_sums(sums.a);
                clear_sums(sums.b);
                q = ends.anew;
                ready = 0;
                if (q >= ends.until) break;
            }
            if (ready == 0) append_load_rows(rows, a, t, q, ready = append_some(a, q, ends.until));
            append_merge_rows(sums, kept, a, t, rows, q, ready, ends.left,
                              q / a.ratio * a.ratio + a.ratio >= ends.until && ends.until > ends.left);
            q += (uint32_t)ready;
            if (q % a.ratio != 0) continue;
            const uint32_t e = q / a.ratio - 1;
            if (e >= old && e < ends.far) {
                if (e > old) ahead.angles = entry_angles(p.entry, t.g, (int64_t)e * a.ratio);
                refused |= append_emit(a, t, b, e, entry + (e - old), sums.a, ahead, row);
            }
            sums.a = sums.b;
            clear_sums(a.series == 2 ? sums.b : sums.a);
        }
        if (ends.left == ends.until) kept = sums;
    }
    if (a.refused != NULL) refused = refused || a.refused[b] != 0;
    if (live && a.careful && __syncthreads_or(refused)) bad = QUERN_STATUS_NOT_FINITE;
    if (live && mine && bad == 0) {
        append_commit(a, t, n, kept, ends.left, newest);
        if (t.g.lane == 0) p.merged[n.slot * p.merged_row] = (int32_t)ends.left;
    }
    if (threadIdx.x == 0 && bad != 0) raise_status(a.status, bad);
    if (threadIdx.x == 0 && a.fault != NULL && (bad != 0 || live)) {
        int32_t &fault = a.fault[n.slot * a.fault_row];
        fault = bad != 0 ? fault | bad : 0;
    }
    if (!a.counts || !mine) return;
    for (uint32_t i = 0; i < whole - old && (!live || bad != 0); i++) append_clear(t, entry + i);
    for (int64_t i = (int64_t)scan.total + b; i < p.rows; i += a.batch) append_clear(t, i);
}

/* The sums of entry e, whose rows all stand in the call. */
__device__ __forceinline__ void append_pool(pool_sums &sums, const append_kernel &a, const append_thread &t,
                                            uint32_t e)
{
    const uint32_t end = (e + 1) * a.ratio;
    append_rows rows;
    clear_sums(sums);
    for (uint32_t q = end - (uint32_t)a.series * a.ratio; q < end;) {
        const int some = append_some(a, q, end);
        const bool own = q / a.ratio == e;
        append_load_rows(rows, a, t, q, some);
#pragma unroll
        for (int u = 0; u < APPEND_ROWS; u++) {
            if (u >= some) continue;
            if (own) append_merge(sums, rows, 0, u, t.p.dtype, t.p.bias_dtype[0]);
            else append_merge(sums, rows, 1, u, t.p.dtype, t.p.bias_dtype[1]);
        }
        q += (uint32_t)some;
    }
}

/* Entries whose rows all stand in the call, of calls of many tokens: block y makes every gridDim.y-th of a
 * sequence. append_sequence(), in the launch that follows, clears the rows of those that stop. */
__device__ __forceinline__ void append_entries(const append_kernel &a)
{
    extern __shared__ __align__(16) float rows_shared[];
    __shared__ float parts[POOL_PARTS][PARTS];
    __shared__ append_shared shared;
    const int which = a.parts > 1 && (int)threadIdx.x >= a.part[1].first ? 1 : 0, b = (int)blockIdx.x;
    const append_part &p = a.part[which];
    const append_numbers n = append_numbers_at(a, b);
    const bool mine = (int)threadIdx.x < p.first + p.lanes, some = n.slot >= 0 && n.slot < a.states;
    append_thread t = {p, group(parts[which], p.lanes), 0, 0, NULL, n.first, n.row - (int64_t)n.first};
    t.channel = t.g.lane * GROUP_CHANNELS;
    t.count = p.width - t.channel;
    const append_verdict verdict = append_judge(a, t, shared, append_scan_share(a, b, n.slot), b, n, mine,
                                                some ? p.merged[n.slot * p.merged_row] : 0);
    if (!verdict.live || !mine) return;
    const uint32_t whole = n.end / a.ratio, old = n.first / a.ratio;
    append_ahead ahead = {norm_weights(p.entry, t.g), {}};
    for (uint32_t e = append_far(a, n) + blockIdx.y; e < whole; e += gridDim.y) {
        pool_sums sums;
        ahead.angles = entry_angles(p.entry, t.g, (int64_t)e * a.ratio);
        append_pool(sums, a, t, e);
        if (append_emit(a, t, b, e, (int64_t)verdict.scan.before + (e - old), sums, ahead,
                        rows_shared + p.first * GROUP_CHANNELS))
            atomicOr(&a.refused[b], 1);
    }
}

#endif
