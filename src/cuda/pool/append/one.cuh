/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * one.cuh - pool_append of CSA's blocks of 4 tokens at V4's widths, for the usual step: a sequence has one
 * token and nothing is wrong. Every other sequence takes the way of kernel.cuh, by a call.
 *
 * Each instruction runs once or twice in a block's life, so their number and how they come count: an instance
 * has one dtype and one format for each compressor, in straight code. Each series has threads of its own: 128
 * and 128 of the main compressor, 32 and 32 of the indexer's, four channels a thread. Of a full ring a row
 * leaves for the sums; where that ends its block, b's sums become a's. Where the token ends a block, the
 * threads of series a merge the ring's other rows and the token into a copy and finish the entry. Nothing is
 * written before the block knows that the sequence is a usual one and its entries are accepted. Merges are
 * those of kernel.cuh in its order.
 *
 * Limit: latency, of the step's numbers and of what they lead to; 128 sequences move 7 MB, 1.7 us.
 */
#ifndef QUERN_CUDA_POOL_APPEND_ONE_CUH
#define QUERN_CUDA_POOL_APPEND_ONE_CUH

#include "pool/append/kernel.cuh"

enum {
    ONE_RATIO = 4,
    ONE_RING = 3, /* at most, so that no block both ends in the sums and becomes an entry */
    ONE_WIDTH = 512,
    ONE_INDEX_WIDTH = 128,
    ONE_ROTATED = 64,
    ONE_LANES = ONE_WIDTH / GROUP_CHANNELS,
    ONE_INDEX_LANES = ONE_INDEX_WIDTH / GROUP_CHANNELS,
    ONE_THREADS = 2 * (ONE_LANES + ONE_INDEX_LANES),
    ONE_BOUND = 448 /* threads whose registers there are: a block leaves room for a product's beside it */
};
static_assert(ONE_THREADS <= APPEND_WARPS * 32, "append_sequence() takes the block");

/* The token of a sequence: its position, that of the row which leaves a full ring, and the place of both
 * there; rows between them follow it. row: of proj. whole: the token ends a block. */
struct one_token {
    uint32_t first, leaves, at;
    int64_t slot, row;
    bool whole;
};

/* A thread's channels of a row of one series. */
struct one_row {
    float4 value, logit, bias;
};

/* What a thread writes: sums, the number of rows in them, the token's row of its series, and of series a's
 * threads where the token ends a block the entry. */
struct one_result {
    uint32_t merged;
    pool_sums sums;
    float *sums_at, *row_at;
    float4 value, logit;
    channels entry;
    char *to, *scales;
};

__device__ __forceinline__ void one_merge(pool_sums &s, const one_row &r)
{
    merge_row(s, 0, r.logit.x + r.bias.x, r.value.x);
    merge_row(s, 1, r.logit.y + r.bias.y, r.value.y);
    merge_row(s, 2, r.logit.z + r.bias.z, r.value.z);
    merge_row(s, 3, r.logit.w + r.bias.w, r.value.w);
}

template <typename T> __device__ __forceinline__ float4 one_floats(const T *p)
{
    if constexpr (sizeof(T) == 4) {
        return *(const float4 *)p;
    } else {
        const uint2 x = *(const uint2 *)p;
        const float2 low = unpack2<T>(x.x), high = unpack2<T>(x.y);
        return make_float4(low.x, low.y, high.x, high.y);
    }
}

template <int WIDTH>
__device__ __forceinline__ one_row one_ring_row(const float *ring, uint32_t at, const float *bias)
{
    const float *const row = ring + at * (4 * WIDTH);
    return {*(const float4 *)row, *(const float4 *)(row + WIDTH), *(const float4 *)bias};
}

template <int WIDTH> __device__ __forceinline__ pool_sums one_sums(const float *at)
{
    const float4 max = *(const float4 *)at, sum = *(const float4 *)(at + WIDTH),
                 weighted = *(const float4 *)(at + 2 * WIDTH);
    return {{fmaxf(max.x, -FLT_MAX), fmaxf(max.y, -FLT_MAX), fmaxf(max.z, -FLT_MAX), fmaxf(max.w, -FLT_MAX)},
            {sum.x, sum.y, sum.z, sum.w},
            {weighted.x, weighted.y, weighted.z, weighted.w}};
}

/* As append_store_sums() writes it. */
__device__ __forceinline__ float one_max(float x)
{
    return x == -FLT_MAX ? -INFINITY : x;
}

/* The compressor's entries with what is known of them here. */
template <int WIDTH> __device__ __forceinline__ entry_kernel one_entry(const append_part &p)
{
    entry_kernel e = p.entry;
    e.width = WIDTH;
    e.rotated = ONE_ROTATED;
    e.hadamard = WIDTH == ONE_INDEX_WIDTH && e.hadamard;
    return e;
}

/* Weights of the norm and angles, as norm_weights() and entry_angles() have them. */
template <typename W, int WIDTH>
__device__ __forceinline__ append_ahead one_ahead(const append_part &p, int channel, int64_t position)
{
    constexpr int START = WIDTH - ONE_ROTATED;
    const float4 w = one_floats((const W *)p.entry.norm.p + channel);
    append_ahead ahead = {{{w.x, w.y, w.z, w.w}}, {{1.0f, 1.0f}, {0.0f, 0.0f}}};
    if (channel < START) return ahead;
    const float *const angles = (const float *)p.entry.angles.p +
                                (position + p.entry.offset) * p.entry.angle_row + (channel - START) / 2;
    const float2 cosine = *(const float2 *)angles, sine = *(const float2 *)(angles + ONE_ROTATED / 2);
    ahead.angles = {{cosine.x, cosine.y}, {sine.x, sine.y}};
    return ahead;
}

/* Where an entry of bytes goes; false: its page is none of the pool's. */
__device__ __forceinline__ bool one_place(const append_part &p, int b, uint32_t entry, one_result &r)
{
    const uint32_t column = quotient(entry, p.page_by), at = entry - column * p.page;
    if (column >= p.columns) return false;
    const uint32_t page = (uint32_t)p.table[b * p.table_row + column * p.table_column];
    char *const base = p.out + page * p.page_bytes;
    r.to = base + at * p.slot_bytes;
    r.scales = base + p.scales + at * p.scale_bytes;
    return page < p.pages;
}

/* The threads of a compressor's series a. True: the sequence is no usual one. */
template <typename T, typename W, int WIDTH, entry_format FORMAT>
__device__ __forceinline__ bool one_series_a(const append_kernel &a, const append_part &p, float *parts,
                                             int b, const one_token &n, one_result &r)
{
    const group g(parts, WIDTH / GROUP_CHANNELS);
    const int channel = g.lane * GROUP_CHANNELS;
    const uint32_t j = n.leaves % ONE_RATIO, block = n.first / ONE_RATIO;
    const int64_t step = p.bias_row[0];
    float *const state = p.state + n.slot * p.state_row + channel, *const ring = state + 6 * WIDTH;
    const T *const token = (const T *)p.proj + n.row * p.proj_row + channel;
    const float *const bias = (const float *)p.bias[0] + channel;
    const entry_kernel e = one_entry<WIDTH>(p);
    const bool whole = n.whole && entry_has_angles(e, (int64_t)block * ONE_RATIO);
    const uint32_t merged = (uint32_t)p.merged[n.slot * p.merged_row];
    bool bad = merged < n.leaves || merged > n.first || n.whole != whole;
    one_row rows[ONE_RING] = {one_ring_row<WIDTH>(ring, n.at, bias + j * step)};
    append_ahead ahead;
    r.sums = one_sums<WIDTH>(state);
    r.value = one_floats(token);
    r.logit = one_floats(token + WIDTH);
    r.row_at = ring + n.at * (4 * WIDTH);
    r.sums_at = state;
    if (whole) {
#pragma unroll
        for (uint32_t u = 1; u < ONE_RING; u++)
            if (u < a.ring)
                rows[u] = one_ring_row<WIDTH>(ring, n.at + u < a.ring ? n.at + u : n.at + u - a.ring,
                                              bias + (j + u) * step);
        ahead = one_ahead<W, WIDTH>(p, channel, (int64_t)block * ONE_RATIO);
        if (FORMAT != ENTRY_ROWS) bad |= !one_place(p, b, block, r);
    }
    const bool leaving = merged == n.leaves;
    r.merged = leaving ? merged + 1 : merged;
    if (leaving) one_merge(r.sums, rows[0]);
    if (whole) {
        pool_sums sums = r.sums;
#pragma unroll
        for (uint32_t u = 1; u < ONE_RING; u++)
            if (u < a.ring && n.leaves + u >= merged) one_merge(sums, rows[u]);
        one_merge(sums, {r.value, r.logit, *(const float4 *)(bias + (ONE_RATIO - 1) * step)});
        r.entry = pooled_of(sums);
        entry_finish(e, g, (int64_t)block * ONE_RATIO, ahead.norm, ahead.angles, r.entry, NULL);
        if (FORMAT != ENTRY_ROWS)
#pragma unroll
            for (int i = 0; i < GROUP_CHANNELS; i++) bad |= !isfinite(r.entry.x[i]);
    } else if (leaving && j == ONE_RATIO - 1) { /* what b's block has so far: nothing */
        clear_sums(r.sums);
        r.sums_at = state + 3 * WIDTH;
    }
    return bad;
}

/* The threads of series b, which counts in the block after the row's. */
template <typename T, int WIDTH>
__device__ __forceinline__ void one_series_b(const append_part &p, int lane, const one_token &n,
                                             one_result &r)
{
    const int channel = lane * GROUP_CHANNELS;
    const uint32_t j = n.leaves % ONE_RATIO;
    float *const state = p.state + n.slot * p.state_row + channel, *const ring = state + 8 * WIDTH;
    const T *const token = (const T *)p.proj + n.row * p.proj_row + 2 * WIDTH + channel;
    const one_row row =
        one_ring_row<WIDTH>(ring, n.at, (const float *)p.bias[1] + j * p.bias_row[1] + channel);
    r.sums = one_sums<WIDTH>(state + 3 * WIDTH);
    r.value = one_floats(token);
    r.logit = one_floats(token + WIDTH);
    r.row_at = ring + n.at * (4 * WIDTH);
    const bool leaving = p.merged[n.slot * p.merged_row] == (int32_t)n.leaves;
    r.sums_at = leaving && j == ONE_RATIO - 1 ? state : state + 3 * WIDTH;
    if (leaving) one_merge(r.sums, row);
}

/* What a block adds up of the step where entries are rows: entries of the sequences before, and of all. */
struct one_shared {
    float parts[PARTS];
    uint32_t before[APPEND_WARPS], total[APPEND_WARPS];
};

__device__ __forceinline__ uint32_t one_sum(const uint32_t (&parts)[APPEND_WARPS])
{
    uint32_t sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += parts[w];
    return sum;
}

/* Whether an earlier sequence has tokens and the slot. COUNTS: the entries, too. `other`: of the sequence
 * that has the thread's number. */
template <bool COUNTS>
__device__ __forceinline__ bool one_scan(const append_kernel &a, one_shared &m, int b, int64_t slot,
                                         append_numbers other)
{
    bool taken = false;
    uint32_t before = 0, total = 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < (COUNTS ? a.batch : b);) {
        const uint32_t made = other.end / ONE_RATIO - other.first / ONE_RATIO;
        taken = taken || (i < b && other.slot == slot && other.count() > 0);
        total += made;
        if (i < b) before += made;
        if ((i += (int)blockDim.x) < a.batch) other = append_numbers_at(a, i);
    }
    if (!COUNTS) return taken;
    before = __reduce_add_sync(~0u, before);
    total = __reduce_add_sync(~0u, total);
    if (threadIdx.x % 32 == 0) {
        m.before[threadIdx.x / 32] = before;
        m.total[threadIdx.x / 32] = total;
    }
    return taken;
}

/* What entry_quantise() stores of a finite row, all of it by 32 bits: the scale of ROW584's tiles is a power
 * of two, whose inverse is exact. */
template <entry_format FORMAT>
__device__ __forceinline__ void one_encode(const group &g, const channels &v, uint32_t *codes,
                                           uint8_t *scales)
{
    static_assert(FORMAT == ENTRY_ROW584 || FORMAT == ENTRY_FP8, "an instance a format");
    const int first = g.lane * GROUP_CHANNELS;
    if (FORMAT == ENTRY_FP8) {
        const float scale = __fdiv_rn(fmaxf(g.max(largest_of(v)), 1e-4f), 448.0f);
        codes[g.lane] = (uint32_t)two_e4m3(__fdiv_rn(v.x[0], scale), __fdiv_rn(v.x[1], scale)) |
                        (uint32_t)two_e4m3(__fdiv_rn(v.x[2], scale), __fdiv_rn(v.x[3], scale)) << 16;
        if (g.lane == 0) *(float *)scales = scale;
        return;
    }
    const float most = largest_of_lanes(v, ROW584_TILE / GROUP_CHANNELS),
                scale = power_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f)),
                inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
    const bool plain = first >= ROW584_CODES;
    if (plain) {
        uint32_t *const to = codes + ROW584_CODES / 4 + (first - ROW584_CODES) / 2;
        to[0] = bf16_pair(v.x[0], v.x[1]);
        to[1] = bf16_pair(v.x[2], v.x[3]);
    } else {
        codes[g.lane] = (uint32_t)two_e4m3(v.x[0] * inverse, v.x[1] * inverse) |
                        (uint32_t)two_e4m3(v.x[2] * inverse, v.x[3] * inverse) << 16;
    }
    if (first % ROW584_TILE == 0)
        scales[first / ROW584_TILE] = plain ? 0 : (uint8_t)(__float_as_uint(scale) >> 23);
}

template <entry_format FORMAT, int WIDTH>
__device__ __forceinline__ void one_store_entry(const append_kernel &a, const append_part &p, one_shared &m,
                                                int b, bool whole, const one_result &r)
{
    const group g(m.parts, WIDTH / GROUP_CHANNELS);
    if constexpr (FORMAT == ENTRY_ROWS) {
        const int64_t n = one_sum(m.before);
        const int channel = g.lane * GROUP_CHANNELS;
        if (whole && n < p.rows)
            put_channels((float *)(p.out + n * p.out_row) + channel, r.entry, GROUP_CHANNELS);
        for (int64_t i = (int64_t)one_sum(m.total) + b; i < p.rows; i += a.batch)
            put_channels((float *)(p.out + i * p.out_row) + channel, {}, GROUP_CHANNELS);
    } else if (whole) {
        one_encode<FORMAT>(g, r.entry, (uint32_t *)r.to, (uint8_t *)r.scales);
    }
}

static __device__ __noinline__ void one_other(const append_kernel &a)
{
    append_sequence(a);
}

/* T: of the projections; W: of the norms' weights. Biases and angles are f32. */
template <typename T, typename W, entry_format MAIN, entry_format INDEX>
__global__ void __launch_bounds__(ONE_BOUND) append_one(const __grid_constant__ append_kernel a)
{
    __shared__ one_shared m;
    constexpr bool COUNTS = MAIN == ENTRY_ROWS || INDEX == ENTRY_ROWS;
    const int thread = (int)threadIdx.x, b = (int)blockIdx.x;
    const append_numbers own = append_numbers_at(a, b),
                         other = append_numbers_at(a, thread < a.batch ? thread : b);
    const uint32_t leaves = own.first - a.ring;
    const one_token n = {own.first,
                         leaves,
                         leaves - quotient(leaves, a.ring_by) * a.ring,
                         own.slot,
                         own.row,
                         own.first % ONE_RATIO == ONE_RATIO - 1};
    one_result r;
    /* Also where the offsets or the position are wrong: no count is 1 or the position 0 then. */
    bool bad = own.slot < 0 || own.slot >= a.states || own.count() != 1 || own.first < ONE_RATIO ||
               own.end > INT32_MAX;
    if (!bad) {
        if (thread < ONE_LANES) bad = one_series_a<T, W, ONE_WIDTH, MAIN>(a, a.part[0], m.parts, b, n, r);
        else if (thread < 2 * ONE_LANES) one_series_b<T, ONE_WIDTH>(a.part[0], thread - ONE_LANES, n, r);
        else if (thread < 2 * ONE_LANES + ONE_INDEX_LANES)
            bad = one_series_a<T, W, ONE_INDEX_WIDTH, INDEX>(a, a.part[1], m.parts, b, n, r);
        else one_series_b<T, ONE_INDEX_WIDTH>(a.part[1], thread % ONE_INDEX_LANES, n, r);
        bad |= a.fault != NULL && a.fault[own.slot * a.fault_row] != 0;
    }
    bad |= one_scan<COUNTS>(a, m, b, own.slot, other);
    if (__syncthreads_or(bad)) {
        one_other(a);
        return;
    }
    const int width = thread < 2 * ONE_LANES ? ONE_WIDTH : ONE_INDEX_WIDTH;
    *(float4 *)r.sums_at =
        make_float4(one_max(r.sums.max[0]), one_max(r.sums.max[1]), one_max(r.sums.max[2]),
                    one_max(r.sums.max[3]));
    *(float4 *)(r.sums_at + width) = make_float4(r.sums.sum[0], r.sums.sum[1], r.sums.sum[2], r.sums.sum[3]);
    *(float4 *)(r.sums_at + 2 * width) =
        make_float4(r.sums.weighted[0], r.sums.weighted[1], r.sums.weighted[2], r.sums.weighted[3]);
    *(float4 *)r.row_at = r.value;
    *(float4 *)(r.row_at + width) = r.logit;
    if (thread < ONE_LANES) one_store_entry<MAIN, ONE_WIDTH>(a, a.part[0], m, b, n.whole, r);
    else if (thread >= 2 * ONE_LANES && thread < 2 * ONE_LANES + ONE_INDEX_LANES)
        one_store_entry<INDEX, ONE_INDEX_WIDTH>(a, a.part[1], m, b, n.whole, r);
    if (thread == 0) a.part[0].merged[n.slot * a.part[0].merged_row] = (int32_t)r.merged;
    if (thread == 2 * ONE_LANES) a.part[1].merged[n.slot * a.part[1].merged_row] = (int32_t)r.merged;
}

/* An instance, in a file of its own. */
template <typename T, typename W, entry_format MAIN, entry_format INDEX>
quern_status launch_one(const append_kernel &a, cudaStream_t stream);

template <typename T, typename W, entry_format MAIN, entry_format INDEX>
static quern_status launch_one_kernel(const append_kernel &a, cudaStream_t stream)
{
    const int threads = a.parts > 1 ? ONE_THREADS : 2 * ONE_LANES;
    const size_t bytes = (size_t)(threads * GROUP_CHANNELS) * sizeof(float); /* of append_sequence() */
    append_one<T, W, MAIN, INDEX><<<(unsigned)a.batch, threads, bytes, stream>>>(a);
    return LAUNCHED("pool_append of a token a sequence");
}

#endif
