/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the quantisers' kernels.
 *
 * Activations: a thread has a block of 16 values of a row, two 16-byte loads in 16 bits, and stores 8 bytes
 * of codes and a scale; where blocks follow one another, the next ones are loaded meanwhile. Weights, whose
 * blocks lie along K: a thread has 16 rows of one or two columns.
 *
 * A global of a tensor or an expert is known after a pass of its own, which finds the largest magnitude: as
 * integers the bits of magnitudes have a maximum that no order changes. Of a tensor that pass writes a number
 * a block of threads; each block of the second takes the largest of them, and begins with the values that the
 * first saw last, which L2 still holds. A row's global takes no such pass: a warp or a block of threads holds
 * the row.
 *
 * A value that is not finite counts as 0, a given global that is none makes its blocks zeros; both set their
 * bit.
 *
 * Limit: x read once (twice where a tensor's or an expert's global is computed), 9/16 byte a value written.
 * The instructions are 10 a value of bf16, of which memory's rate allows 24.
 */
#ifndef QUERN_CUDA_QUANTISE_KERNEL_CUH
#define QUERN_CUDA_QUANTISE_KERNEL_CUH

#include "common/fp4_bf16.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"

struct quantise_params {
    rows_view x, codes, scales, given, global;
    int64_t rows, columns, blocks; /* rows of codes; blocks of a row */
    int64_t x_rows;
    divider by_blocks;
    const int32_t *slots;
    int32_t slots_a_row;
    expert_ends ends;
    int64_t expert_rows; /* of a stack without offsets */
    quantise_global per;
    quantise_profile profile;
    bool reciprocal, wide, wide_codes, flat; /* flat: one global, no padding, no strides */
    const float *globals; /* where `given` or the results stand */
    uint32_t *largest;    /* of each global, or of each block of threads: workspace */
    int32_t parts;        /* how many of these a tensor has; 0: its global is not computed here */
    int32_t *status;
    int64_t global_count;
    /* Weights [E, K, N]: strides of a matrix and of a row. */
    int64_t k, x_s[2], codes_s[2], scales_s[2];
};

enum { QUANTISE_THREADS = 256, QUANTISE_PARTS = 1024, QUANTISE_HELD = 2 /* blocks of a row, of a thread */ };

/* The row of x behind a row of codes; -1 where no expert has it, or its slot is none of x. */
__device__ __forceinline__ int64_t source_row(const quantise_params &a, int64_t row)
{
    if (a.slots == NULL) return row;
    const int64_t from = __ldg(a.slots + row) / a.slots_a_row;
    return from >= 0 && from < a.x_rows ? from : -1;
}

__device__ __forceinline__ int64_t expert_of_row(const quantise_params &a, int64_t row)
{
    return a.ends.end != NULL                ? a.ends.expert_of(row)
           : a.per == QUANTISE_GLOBAL_EXPERT ? row / a.expert_rows
                                             : 0;
}

__device__ __forceinline__ float global_of_row(const quantise_params &a, const rows_view &g, int64_t row,
                                               int64_t expert)
{
    return *g.row<const float>(a.per == QUANTISE_GLOBAL_ROW      ? row
                               : a.per == QUANTISE_GLOBAL_EXPERT ? expert
                                                                 : 0);
}

/* Where the codes and the scales of a row stand. */
struct coded_row {
    uint8_t *codes, *scales;

    __device__ __forceinline__ coded_row(const quantise_params &a, int64_t row)
        : codes(a.codes.row<uint8_t>(row)), scales(a.scales.row<uint8_t>(row))
    {
    }
    __device__ __forceinline__ void store(const quantise_params &a, int64_t block, const fp4_block &b) const
    {
        uint8_t *to = codes + 8 * block;
        if (a.wide_codes) {
            __stcs((uint2 *)to, make_uint2(b.codes[0], b.codes[1]));
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) to[i] = (uint8_t)(b.codes[i / 4] >> i % 4 * 8);
        }
        scales[block] = (uint8_t)b.scale;
    }
};

struct bf16_pairs {
    uint32_t pair[8];

    __device__ __forceinline__ explicit bf16_pairs(const raw_block<bf16> &raw)
        : pair{raw.words[0].x, raw.words[0].y, raw.words[0].z, raw.words[0].w,
               raw.words[1].x, raw.words[1].y, raw.words[1].z, raw.words[1].w}
    {
    }
};

/* The bits of the largest magnitude of a block; what is not finite counts as 0. */
template <typename T> __device__ __forceinline__ uint32_t largest_in(const raw_block<T> &raw)
{
    if constexpr (__is_same(T, bf16)) {
        const uint32_t most = largest_bf16(bf16_pairs(raw).pair);
        if (most < INFINITE_BITS) return most;
    }
    float x[FP4_BLOCK];
    bool bad;
    raw.values(x);
    return __float_as_uint(largest_finite(x, &bad));
}

/* Quantises a block, faults included. */
template <fp4_kind KIND, bool TINY>
__device__ __forceinline__ fp4_block checked_block(const quantise_params &a, float global,
                                                   float (&x)[FP4_BLOCK])
{
    bool bad;
    const float largest = largest_finite(x, &bad);
    if (bad) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
    if (is_global(global)) return quantise_block<KIND, TINY>(global, a.reciprocal, x, largest);
    raise_status(a.status, QUERN_STATUS_BAD_GLOBAL);
    return {{0, 0}, 0};
}

/* The same from memory. Where few blocks take it, a call keeps its registers from all of them. */
template <fp4_kind KIND, typename T>
__device__ __noinline__ fp4_block block_alone(const quantise_params &a, float global, raw_block<T> raw)
{
    float x[FP4_BLOCK];
    raw.values(x);
    return checked_block<KIND, sizeof(T) == 4>(a, global, x);
}

/* The same; of bf16 by the rule of its global, if that has one. */
template <fp4_kind KIND, typename T>
__device__ __forceinline__ fp4_block ruled_block(const quantise_params &a, const bf16_rule &rule,
                                                 const raw_block<T> &raw)
{
    if constexpr (has_bf16_rule<T, KIND>()) {
        fp4_block b;
        bf16_pairs x(raw);
        if (bf16_block<KIND>(b, rule, x.pair)) return b;
        return block_alone<KIND, T>(a, rule.global, raw);
    }
    float x[FP4_BLOCK];
    raw.values(x);
    return checked_block<KIND, sizeof(T) == 4>(a, rule.global, x);
}

/* The rule of a global; all lanes of a warp call. */
template <fp4_kind KIND, typename T> __device__ __forceinline__ bf16_rule rule_of(float global)
{
    if constexpr (has_bf16_rule<T, KIND>()) return bf16_rule_of<KIND>(global);
    return {global, 0.0f, 0, -1, false};
}

/* The largest of a group of threads' numbers; all of them get it. A group is a warp or the block. */
template <int GROUP> __device__ __forceinline__ uint32_t group_largest(uint32_t x)
{
    __shared__ uint32_t warps[32];
    x = __reduce_max_sync(~0u, x);
    if constexpr (GROUP == 32) return x;
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    return __reduce_max_sync(~0u, threadIdx.x % 32 < GROUP / 32 ? warps[threadIdx.x % 32] : 0);
}

/* The global of a tensor from what find_largest left. */
__device__ __forceinline__ float global_of_parts(const quantise_params &a)
{
    uint32_t most = 0;
    for (int i = threadIdx.x; i < a.parts; i += QUANTISE_THREADS) most = max(most, a.largest[i]);
    const float g = global_from_largest(a.profile, __uint_as_float(group_largest<QUANTISE_THREADS>(most)));
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.global.row<float>(0) = g;
    return g;
}

/* Item i of a grid's, the last first where a pass over x came before. */
__device__ __forceinline__ int64_t item_of(const quantise_params &a, int64_t i, int64_t all)
{
    return a.parts > 0 ? all - 1 - i : i;
}

template <typename T, fp4_kind KIND>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_rows(const __grid_constant__ quantise_params a)
{
    const int64_t all = a.rows * a.blocks, step = (int64_t)gridDim.x * QUANTISE_THREADS;
    a.ends.check(a.status);
    float g = 0.0f;
    if (a.parts > 0) {
        wait_for_before();
        g = global_of_parts(a);
    }
    for (int64_t i = (int64_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x; i < all; i += step) {
        const int64_t item = item_of(a, i, all), row = a.by_blocks.of(item), block = item - row * a.blocks,
                      expert = expert_of_row(a, row);
        const bool used = a.ends.end == NULL || expert < a.ends.experts;
        const int64_t from = used ? source_row(a, row) : -1;
        fp4_block b = {{0, 0}, 0};
        if (from >= 0) {
            raw_block<T> raw;
            float x[FP4_BLOCK];
            raw.load(a.x.row<const T>(from), block * FP4_BLOCK, a.columns, a.wide);
            raw.values(x);
            if (a.parts == 0) g = global_of_row(a, a.given.p != NULL ? a.given : a.global, row, expert);
            b = checked_block<KIND, sizeof(T) == 4>(a, g, x);
        } else if (used && block == 0) {
            raise_status(a.status, QUERN_STATUS_BAD_ID);
        }
        coded_row(a, row).store(a, block, b);
    }
}

/* Blocks of a thread that are under way, and blocks of threads on a multiprocessor. */
template <typename T, fp4_kind KIND> constexpr int flat_ahead()
{
    return has_bf16_rule<T, KIND>() ? 3 : 1;
}
template <typename T, fp4_kind KIND> constexpr int flat_residents()
{
    return has_bf16_rule<T, KIND>() ? 3 : 4;
}

/* One global, and tensors whose blocks follow one another in memory: block i of each. */
template <typename T, fp4_kind KIND>
__global__ void __launch_bounds__(QUANTISE_THREADS, flat_residents<T, KIND>())
    quantise_flat(const __grid_constant__ quantise_params a)
{
    enum { AHEAD = flat_ahead<T, KIND>() };
    const int64_t all = a.rows * a.blocks, step = (int64_t)gridDim.x * QUANTISE_THREADS,
                  first = (int64_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x,
                  turn = a.parts > 0 ? -step : step, item = item_of(a, first, all);
    const T *x = (const T *)a.x.p + item * FP4_BLOCK;
    uint2 *codes = (uint2 *)a.codes.p + item;
    uint8_t *scales = (uint8_t *)a.scales.p + item;
    raw_block<T> ahead[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; n++, x += turn * FP4_BLOCK)
        if (first + n * step < all) ahead[n].load(x, 0, FP4_BLOCK, true);
    if (a.parts > 0) wait_for_before();
    const bf16_rule rule = rule_of<KIND, T>(a.parts > 0 ? global_of_parts(a) : *(const float *)a.given.p);
    for (int32_t left = first < all ? (int32_t)((all - 1 - first) / step) + 1 : 0; left > 0; left -= AHEAD) {
#pragma unroll
        for (int n = 0; n < AHEAD; n++, x += turn * FP4_BLOCK, codes += turn, scales += turn) {
            if (n >= left) break;
            const raw_block<T> raw = ahead[n];
            if (AHEAD == 1 && n + AHEAD < left) ahead[n].load(x, 0, FP4_BLOCK, true);
            const fp4_block b = ruled_block<KIND, T>(a, rule, raw);
            if (AHEAD > 1 && n + AHEAD < left) ahead[n].load(x, 0, FP4_BLOCK, true);
            __stcs(codes, make_uint2(b.codes[0], b.codes[1]));
            *scales = (uint8_t)b.scale;
        }
    }
}

/* A global a row, computed: a warp or a block of threads a row, QUANTISE_HELD blocks of which a thread holds;
 * of longer rows, which the largest group has, it reads the others again. */
template <typename T, fp4_kind KIND, int GROUP>
__global__ void __launch_bounds__(QUANTISE_THREADS, GROUP == QUANTISE_THREADS ? 3 : 0)
    quantise_whole_rows(const __grid_constant__ quantise_params a)
{
    const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / GROUP;
    const int lane = threadIdx.x % GROUP;
    const int64_t held_blocks = QUANTISE_HELD * GROUP,
                  last = GROUP == QUANTISE_THREADS ? a.blocks : held_blocks;
    a.ends.check(a.status);
    if (row >= a.rows) return;
    const int64_t from = source_row(a, row);
    const bool used = from >= 0 && (a.ends.end == NULL || row < a.ends.end_of(a.ends.experts - 1));
    const T *values = a.x.row<const T>(used ? from : 0);
    raw_block<T> held[QUANTISE_HELD];
    uint32_t most = 0;
#pragma unroll
    for (int h = 0; h < QUANTISE_HELD; h++)
        if (used && lane + h * GROUP < a.blocks)
            held[h].load(values, (int64_t)(lane + h * GROUP) * FP4_BLOCK, a.columns, a.wide);
#pragma unroll
    for (int h = 0; h < QUANTISE_HELD; h++) {
        if (!used || lane + h * GROUP >= a.blocks) break;
        most = max(most, largest_in(held[h]));
    }
    for (int64_t block = lane + held_blocks; used && block < last; block += GROUP) {
        raw_block<T> raw;
        raw.load(values, block * FP4_BLOCK, a.columns, a.wide);
        most = max(most, largest_in(raw));
    }
    const coded_row to(a, row);
    const float g = global_from_largest(a.profile, __uint_as_float(group_largest<GROUP>(most)));
    const bf16_rule rule = rule_of<KIND, T>(g);
    if (lane == 0 && used) *a.global.row<float>(row) = g;
#pragma unroll
    for (int h = 0; h < QUANTISE_HELD; h++) {
        fp4_block b = {{0, 0}, 0};
        if (lane + h * GROUP >= a.blocks) break;
        if (used) b = ruled_block<KIND, T>(a, rule, held[h]);
        to.store(a, lane + h * GROUP, b);
    }
    for (int64_t block = lane + held_blocks; block < last; block += GROUP) {
        fp4_block b = {{0, 0}, 0};
        if (used) {
            raw_block<T> raw;
            raw.load(values, block * FP4_BLOCK, a.columns, a.wide);
            b = ruled_block<KIND, T>(a, rule, raw);
        }
        to.store(a, block, b);
    }
}

/* The largest magnitude of each expert's rows of x, or what a block of threads saw. Each thread has four
 * blocks of values under way. */
template <typename T>
__global__ void __launch_bounds__(QUANTISE_THREADS) find_largest(const __grid_constant__ quantise_params a)
{
    enum { AHEAD = 4 };
    const int64_t all = a.x_rows * a.blocks, step = (int64_t)gridDim.x * QUANTISE_THREADS;
    const bool by_expert = a.per == QUANTISE_GLOBAL_EXPERT, bounded = a.ends.end != NULL;
    uint32_t most = 0;
    let_next_start();
    for (int64_t first = (int64_t)blockIdx.x * QUANTISE_THREADS; first < all; first += AHEAD * step) {
        raw_block<T> raw[AHEAD];
        int64_t row[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int64_t i = first + n * step + threadIdx.x;
            row[n] = i >= all ? -1 : a.flat ? 0 : a.by_blocks.of(i);
            if (i < all)
                raw[n].load(a.x.row<const T>(row[n]), (i - row[n] * a.blocks) * FP4_BLOCK,
                            a.flat ? INT64_MAX : a.columns, a.wide);
        }
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int64_t expert = row[n] >= 0 && (by_expert || bounded) ? expert_of_row(a, row[n]) : -1;
            const bool counts = row[n] >= 0 && (!bounded || expert < a.ends.experts);
            uint32_t bits = counts ? largest_in(raw[n]) : 0;
            most = max(most, bits);
            if (!by_expert) continue;
            int same;
            __match_all_sync(~0u, counts ? (int)expert : -1, &same);
            if (same) bits = __reduce_max_sync(~0u, bits);
            if (counts && bits > 0 && (!same || threadIdx.x % 32 == 0)) atomicMax(a.largest + expert, bits);
        }
    }
    if (by_expert) return;
    most = group_largest<QUANTISE_THREADS>(most);
    if (threadIdx.x == 0) a.largest[blockIdx.x] = most;
}

/* V columns of 16 rows of a weight: one block each. */
template <typename T, int V>
__device__ __forceinline__ void load_columns(float (&x)[V][FP4_BLOCK], const T *p, int64_t stride)
{
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) {
        T raw[V];
        if constexpr (V == 2 && sizeof(T) == 2) *(uint32_t *)raw = __ldcs((const uint32_t *)(p + i * stride));
        else if constexpr (V == 2) *(float2 *)raw = __ldcs((const float2 *)(p + i * stride));
        else raw[0] = p[i * stride];
#pragma unroll
        for (int v = 0; v < V; v++) x[v][i] = to_float<T>(raw[v]);
    }
}

/* Where a thread of a weight's kernels stands: matrix e, block `block` of K, column n. */
struct column_place {
    int64_t e, block, n;
};
template <int V> __device__ __forceinline__ column_place column_at(const quantise_params &a, int64_t i)
{
    const int64_t across = (a.columns + V - 1) / V, row = i / across, blocks = a.k / FP4_BLOCK;
    return {row / blocks, row % blocks, (i - row * across) * V};
}

template <typename T, fp4_kind KIND, int V>
__global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_columns(const __grid_constant__ quantise_params a)
{
    const int64_t i = (int64_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x;
    if (i >= a.rows * ((a.columns + V - 1) / V)) return;
    const column_place at = column_at<V>(a, i);
    float x[V][FP4_BLOCK];
    load_columns<T, V>(x, (const T *)a.x.p + at.e * a.x_s[0] + at.block * FP4_BLOCK * a.x_s[1] + at.n,
                       a.x_s[1]);
    const rows_view &from = a.given.p != NULL ? a.given : a.global;
    const float g = global_of_row(a, from, 0, at.e);
    fp4_block b[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        b[v] = checked_block<KIND, sizeof(T) == 4>(a, g, x[v]);
    }
    uint8_t *codes = (uint8_t *)a.codes.p + at.e * a.codes_s[0] + at.block * 8 * a.codes_s[1] + at.n,
            *scales = (uint8_t *)a.scales.p + at.e * a.scales_s[0] + at.block * a.scales_s[1] + at.n;
#pragma unroll
    for (int v = 0; v < V; v++) {
#pragma unroll
        for (int p = 0; p < 8; p++) codes[p * a.codes_s[1] + v] = (uint8_t)(b[v].codes[p / 4] >> p % 4 * 8);
        scales[v] = (uint8_t)b[v].scale;
    }
}

template <typename T, int V>
__global__ void __launch_bounds__(QUANTISE_THREADS)
    find_largest_columns(const __grid_constant__ quantise_params a)
{
    const int64_t all = a.rows * ((a.columns + V - 1) / V), step = (int64_t)gridDim.x * QUANTISE_THREADS;
    uint32_t most = 0;
    for (int64_t i = (int64_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x; i < all; i += step) {
        const column_place at = column_at<V>(a, i);
        float x[V][FP4_BLOCK];
        load_columns<T, V>(x, (const T *)a.x.p + at.e * a.x_s[0] + at.block * FP4_BLOCK * a.x_s[1] + at.n,
                           a.x_s[1]);
        uint32_t here = 0;
#pragma unroll
        for (int v = 0; v < V; v++) {
            bool bad;
            here = max(here, __float_as_uint(largest_finite(x[v], &bad)));
        }
        if (a.per == QUANTISE_GLOBAL_EXPERT) {
            if (here > 0) atomicMax(a.largest + at.e, here);
        } else {
            most = max(most, here);
        }
    }
    if (a.per == QUANTISE_GLOBAL_EXPERT) return;
    most = group_largest<QUANTISE_THREADS>(most);
    if (threadIdx.x == 0) atomicMax(a.largest, most);
}

/* One function a dtype: all that a call launches. */
quern_status quantise_f32(quantise_params a, fp4_kind kind, bool columns, bool computed, int sms,
                          cudaStream_t stream);
quern_status quantise_bf16(quantise_params a, fp4_kind kind, bool columns, bool computed, int sms,
                           cudaStream_t stream);
quern_status quantise_f16(quantise_params a, fp4_kind kind, bool columns, bool computed, int sms,
                          cudaStream_t stream);
/* Writes the globals, as given or from the largest magnitudes. */
quern_status write_globals(const quantise_params &a, cudaStream_t stream);
/* Sets the largest magnitudes to 0. */
quern_status clear_largest(const quantise_params &a, cudaStream_t stream);

#define FP4_KINDS(F)                                                                                         \
    F(FP4_RNE) F(FP4_HALF_STEPS) F(FP4_FOUR_OVER_SIX) F(FP4_SEARCH) F(FP4_MODELOPT) F(FP4_COMPRESSED)

/* The pass that finds the largest magnitudes, and what makes globals of them. */
template <typename T>
static quern_status find_globals(quantise_params &a, bool columns, bool pairs, int64_t all, int sms,
                                 cudaStream_t stream)
{
    enum { AHEAD = 4 };
    if (!columns && a.per == QUANTISE_GLOBAL_TENSOR) {
        const int64_t seen = a.x_rows * a.blocks, most = QUANTISE_PARTS;
        a.parts =
            (int32_t)(seen < most * QUANTISE_THREADS * AHEAD ? blocks_for(seen, QUANTISE_THREADS * AHEAD)
                                                             : most);
        if (a.parts == 0) a.parts = 1;
        find_largest<T><<<(unsigned)a.parts, QUANTISE_THREADS, 0, stream>>>(a);
        return LAUNCHED("quantise, largest");
    }
    const int64_t seen = columns ? all : a.x_rows * a.blocks;
    const unsigned most = (unsigned)sms * 8,
                   grid = seen / QUANTISE_THREADS < most ? blocks_for(seen, QUANTISE_THREADS) : most;
    quern_status status = clear_largest(a, stream);
    if (status == QUERN_OK && seen > 0) {
        if (pairs) find_largest_columns<T, 2><<<grid, QUANTISE_THREADS, 0, stream>>>(a);
        else if (columns) find_largest_columns<T, 1><<<grid, QUANTISE_THREADS, 0, stream>>>(a);
        else find_largest<T><<<grid, QUANTISE_THREADS, 0, stream>>>(a);
        status = LAUNCHED("quantise, largest");
    }
    return status == QUERN_OK ? write_globals(a, stream) : status;
}

template <typename T, fp4_kind KIND>
static void launch_kind(const quantise_params &a, bool columns, bool pairs, bool whole, int64_t all, int sms,
                        cudaStream_t stream)
{
    enum { THREADS = QUANTISE_THREADS, EACH = 8 /* blocks of a thread of a flat call */ };
    if (whole && a.rows > 0) {
        if (a.blocks <= 32 * QUANTISE_HELD)
            quantise_whole_rows<T, KIND, 32><<<blocks_for(a.rows, THREADS / 32), THREADS, 0, stream>>>(a);
        else if (a.blocks <= 128 * QUANTISE_HELD)
            quantise_whole_rows<T, KIND, 128><<<(unsigned)a.rows, 128, 0, stream>>>(a);
        else quantise_whole_rows<T, KIND, THREADS><<<(unsigned)a.rows, THREADS, 0, stream>>>(a);
    } else if (pairs && all > 0) {
        quantise_columns<T, KIND, 2><<<blocks_for(all, THREADS), THREADS, 0, stream>>>(a);
    } else if (columns && all > 0) {
        quantise_columns<T, KIND, 1><<<blocks_for(all, THREADS), THREADS, 0, stream>>>(a);
    } else if (all > 0 || a.parts > 0) {
        const int64_t most = (int64_t)sms * (a.flat ? flat_residents<T, KIND>() : 5),
                      need = (all + THREADS - 1) / THREADS;
        const int64_t turns = a.flat ? (need + EACH - 1) / EACH : need,
                      given = need < most ? need : turns < most ? most : turns,
                      grid = a.parts == 0 ? given : need < 1 ? 1 : need < most ? need : most;
        const auto kernel = a.flat ? quantise_flat<T, KIND> : quantise_rows<T, KIND>;
        if (a.parts > 0) launch_behind(stream, kernel, dim3((unsigned)grid), THREADS, 0, "quantise", a);
        else kernel<<<(unsigned)grid, THREADS, 0, stream>>>(a);
    }
}

template <typename T>
static quern_status quantise_as(quantise_params a, fp4_kind kind, bool columns, bool computed, int sms,
                                cudaStream_t stream)
{
    const bool pairs = columns && a.wide;
    const int64_t all = columns ? a.rows * (pairs ? a.columns / 2 : a.columns) : a.rows * a.blocks;
    const bool whole = computed && a.per == QUANTISE_GLOBAL_ROW;
    if (computed && !whole) {
        const quern_status status = find_globals<T>(a, columns, pairs, all, sms, stream);
        if (status != QUERN_OK) return status;
    }
#define LAUNCH(KIND)                                                                                         \
    if (kind == KIND) launch_kind<T, KIND>(a, columns, pairs, whole, all, sms, stream);
    FP4_KINDS(LAUNCH)
#undef LAUNCH
    return LAUNCHED("quantise");
}

#endif
