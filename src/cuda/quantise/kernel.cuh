/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the quantisers' kernels.
 *
 * Activations: a thread has a block of 16 values of a row, two 16-byte loads in 16 bits, and stores 8 bytes
 * of codes and a scale. Weights, whose blocks lie along K: a thread has 16 rows of one or two columns.
 *
 * A global of a tensor or an expert is known after a pass of its own, which finds the largest magnitude: as
 * integers the bits of magnitudes have a maximum that no order changes. A row's global takes no such pass: a
 * block of threads finds it and quantises the row, which L2 still holds.
 *
 * A value that is not finite counts as 0, a given global that is none makes its blocks zeros; both set their
 * bit.
 *
 * Limit: x read once (twice where the global is computed), 9/16 byte a value written.
 */
#ifndef QUERN_CUDA_QUANTISE_KERNEL_CUH
#define QUERN_CUDA_QUANTISE_KERNEL_CUH

#include "common/fp4.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"

struct quantise_params {
    rows_view x, codes, scales, given, global;
    int64_t rows, columns, blocks; /* rows of codes; blocks of a row */
    int64_t x_rows;
    const int32_t *slots;
    int32_t slots_a_row;
    expert_ends ends;
    int64_t expert_rows; /* of a stack without offsets */
    quantise_global per;
    quantise_profile profile;
    bool reciprocal, wide, wide_codes;
    const float *globals; /* where `given` or the results stand */
    uint32_t *largest;    /* [globals], workspace */
    int32_t *status;
    int64_t global_count;
    /* Weights [E, K, N]: strides of a matrix and of a row. */
    int64_t k, x_s[2], codes_s[2], scales_s[2];
};

enum { QUANTISE_THREADS = 256 };

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

__device__ __forceinline__ void store_block(const quantise_params &a, int64_t row, int64_t block,
                                            const fp4_block &b)
{
    uint8_t *codes = a.codes.row<uint8_t>(row) + 8 * block;
    if (a.wide_codes) {
        __stcs((uint2 *)codes, make_uint2(b.codes[0], b.codes[1]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) codes[i] = (uint8_t)(b.codes[i / 4] >> i % 4 * 8);
    }
    a.scales.row<uint8_t>(row)[block] = (uint8_t)b.scale;
}

/* Quantises a block, faults included. */
template <fp4_kind KIND>
__device__ __forceinline__ fp4_block checked_block(const quantise_params &a, float global,
                                                   float (&x)[FP4_BLOCK])
{
    bool bad;
    const float largest = largest_finite(x, &bad);
    if (bad) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
    if (is_global(global)) return quantise_block<KIND>(global, a.reciprocal, x, largest);
    raise_status(a.status, QUERN_STATUS_BAD_GLOBAL);
    return {{0, 0}, 0};
}

template <typename T, fp4_kind KIND>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_rows(const __grid_constant__ quantise_params a)
{
    const int64_t i = (int64_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x;
    a.ends.check(a.status);
    if (i >= a.rows * a.blocks) return;
    const int64_t row = a.blocks <= INT32_MAX && i <= UINT32_MAX ? (uint32_t)i / (uint32_t)a.blocks
                                                                 : i / a.blocks,
                  block = i - row * a.blocks;
    const int64_t expert = expert_of_row(a, row), from = source_row(a, row);
    fp4_block b = {{0, 0}, 0};
    if (expert < a.ends.experts || a.ends.end == NULL) {
        float x[FP4_BLOCK];
        if (from >= 0) {
            load_block(x, a.x.row<const T>(from), block * FP4_BLOCK, a.columns, a.wide);
            const rows_view &g = a.given.p != NULL ? a.given : a.global;
            b = checked_block<KIND>(a, global_of_row(a, g, row, expert), x);
        } else if (block == 0) {
            raise_status(a.status, QUERN_STATUS_BAD_ID);
        }
    }
    store_block(a, row, block, b);
}

/* The largest of a block of threads' numbers; all threads get it. */
__device__ __forceinline__ uint32_t block_largest(uint32_t x)
{
    __shared__ uint32_t warps[32];
    x = __reduce_max_sync(~0u, x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    return __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0);
}

/* A global a row, computed: a block of threads a row. */
template <typename T, fp4_kind KIND>
__global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_whole_rows(const __grid_constant__ quantise_params a)
{
    const int64_t row = blockIdx.x, from = source_row(a, row);
    a.ends.check(a.status);
    const bool used = from >= 0 && (a.ends.end == NULL || row < a.ends.end_of(a.ends.experts - 1));
    uint32_t most = 0;
    for (int64_t block = threadIdx.x; used && block < a.blocks; block += QUANTISE_THREADS) {
        float x[FP4_BLOCK];
        load_block(x, a.x.row<const T>(from), block * FP4_BLOCK, a.columns, a.wide);
        bool bad;
        most = max(most, __float_as_uint(largest_finite(x, &bad)));
    }
    const float g = global_from_largest(a.profile, __uint_as_float(block_largest(most)));
    if (threadIdx.x == 0 && used) *a.global.row<float>(row) = g;
    for (int64_t block = threadIdx.x; block < a.blocks; block += QUANTISE_THREADS) {
        fp4_block b = {{0, 0}, 0};
        if (used) {
            float x[FP4_BLOCK];
            load_block(x, a.x.row<const T>(from), block * FP4_BLOCK, a.columns, a.wide);
            b = checked_block<KIND>(a, g, x);
        }
        store_block(a, row, block, b);
    }
}

/* The largest magnitude of each expert's rows of x, or of all. */
template <typename T>
__global__ void __launch_bounds__(QUANTISE_THREADS) find_largest(const __grid_constant__ quantise_params a)
{
    const int64_t all = a.x_rows * a.blocks, step = (int64_t)gridDim.x * QUANTISE_THREADS;
    uint32_t most = 0;
    for (int64_t first = (int64_t)blockIdx.x * QUANTISE_THREADS; first < all; first += step) {
        const int64_t i = first + threadIdx.x, row = i / a.blocks;
        const int64_t expert = i < all ? expert_of_row(a, row) : 0;
        uint32_t bits = 0;
        if (i < all && (a.ends.end == NULL || expert < a.ends.experts)) {
            float x[FP4_BLOCK];
            load_block(x, a.x.row<const T>(row), (i - row * a.blocks) * FP4_BLOCK, a.columns, a.wide);
            bool bad;
            bits = __float_as_uint(largest_finite(x, &bad));
        }
        if (a.per == QUANTISE_GLOBAL_EXPERT) {
            if (bits > 0) atomicMax(a.largest + expert, bits);
        } else {
            most = max(most, bits);
        }
    }
    if (a.per == QUANTISE_GLOBAL_EXPERT) return;
    most = block_largest(most);
    if (threadIdx.x == 0) atomicMax(a.largest, most);
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
        b[v] = checked_block<KIND>(a, g, x[v]);
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
    most = block_largest(most);
    if (threadIdx.x == 0) atomicMax(a.largest, most);
}

/* One function a dtype: all that a call launches. */
quern_status quantise_f32(const quantise_params &a, fp4_kind kind, bool columns, bool computed, int sms,
                          cudaStream_t stream);
quern_status quantise_bf16(const quantise_params &a, fp4_kind kind, bool columns, bool computed, int sms,
                           cudaStream_t stream);
quern_status quantise_f16(const quantise_params &a, fp4_kind kind, bool columns, bool computed, int sms,
                          cudaStream_t stream);
/* Writes the globals, as given or from the largest magnitudes. */
quern_status write_globals(const quantise_params &a, cudaStream_t stream);

#define FP4_KINDS(F)                                                                                         \
    F(FP4_RNE) F(FP4_HALF_STEPS) F(FP4_FOUR_OVER_SIX) F(FP4_SEARCH) F(FP4_MODELOPT) F(FP4_COMPRESSED)

template <typename T>
static quern_status quantise_as(const quantise_params &a, fp4_kind kind, bool columns, bool computed, int sms,
                                cudaStream_t stream)
{
    const bool pairs = columns && a.wide;
    const int64_t all = columns ? a.rows * (pairs ? a.columns / 2 : a.columns) : a.rows * a.blocks;
    const bool whole = computed && a.per == QUANTISE_GLOBAL_ROW;
    if (computed && !whole) {
        const int64_t seen = columns ? all : a.x_rows * a.blocks;
        const unsigned most = (unsigned)sms * 8,
                       grid = seen / QUANTISE_THREADS < most ? blocks_for(seen, QUANTISE_THREADS) : most;
        if (seen > 0) {
            if (pairs) find_largest_columns<T, 2><<<grid, QUANTISE_THREADS, 0, stream>>>(a);
            else if (columns) find_largest_columns<T, 1><<<grid, QUANTISE_THREADS, 0, stream>>>(a);
            else find_largest<T><<<grid, QUANTISE_THREADS, 0, stream>>>(a);
        }
        const quern_status status = write_globals(a, stream);
        if (status != QUERN_OK) return status;
    }
#define LAUNCH(KIND)                                                                                         \
    if (kind == KIND) {                                                                                      \
        if (whole && a.rows > 0)                                                                             \
            quantise_whole_rows<T, KIND><<<(unsigned)a.rows, QUANTISE_THREADS, 0, stream>>>(a);              \
        else if (pairs && all > 0)                                                                           \
            quantise_columns<T, KIND, 2>                                                                     \
                <<<blocks_for(all, QUANTISE_THREADS), QUANTISE_THREADS, 0, stream>>>(a);                     \
        else if (columns && all > 0)                                                                         \
            quantise_columns<T, KIND, 1>                                                                     \
                <<<blocks_for(all, QUANTISE_THREADS), QUANTISE_THREADS, 0, stream>>>(a);                     \
        else if (all > 0)                                                                                    \
            quantise_rows<T, KIND><<<blocks_for(all, QUANTISE_THREADS), QUANTISE_THREADS, 0, stream>>>(a);   \
    }
    FP4_KINDS(LAUNCH)
#undef LAUNCH
    return LAUNCHED("quantise");
}

#endif
