/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * swizzle.cu - scales between row-major order and the order of tensor cores: tiles of 128 rows and 4 columns,
 * of which row r stands at byte (r % 32) * 16 + (r / 32) * 4. A thread moves the 4 bytes of a row in a tile;
 * it counts these in the order of what is written. With experts, whose rows begin at tiles of their own, each
 * block of threads first adds up where each one's rows begin. Limit: bytes read and written once.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum {
    THREADS = 256,
    TILE_ROWS = 128,
    TILE_COLUMNS = 4,
    TILE_BYTES = TILE_ROWS * TILE_COLUMNS,
    MOST_EXPERTS = 4096
};

struct swizzle_params {
    uint8_t *linear, *swizzled;
    int64_t rows, columns, tiles; /* of a matrix; tiles across */
    int64_t down, matrices;       /* rows of tiles of a matrix */
    int64_t linear_s[2], swizzled_s;
    bool transposed;
    const int32_t *tokens;
    int32_t experts, *pad_row_offsets, *status;
};

/* Where each expert's rows begin among the padded ones, and among all; experts + 1 each. */
struct expert_list {
    int32_t *padded, *row;
};

/* All threads of a block call. */
__device__ __forceinline__ expert_list list_experts(const swizzle_params &a, int32_t *room)
{
    const expert_list list = {room, room + a.experts + 1};
    const int lane = threadIdx.x;
    int32_t row = 0, padded = 0;
    for (int32_t e = 0; a.tokens != NULL && lane < 32 && e <= a.experts; e += 32) {
        const int32_t left = (int32_t)a.rows - row, given = e + lane < a.experts ? a.tokens[e + lane] : 0,
                      n = given < 0      ? 0
                          : given < left ? given
                                         : left,
                      own = (n + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        int32_t ends = n, pads = own;
        if (n != given && blockIdx.x == 0) raise_status(a.status, QUERN_STATUS_BAD_OFFSETS);
        for (int step = 1; step < 32; step *= 2) {
            const int32_t x = __shfl_up_sync(~0u, ends, step), y = __shfl_up_sync(~0u, pads, step);
            if (lane >= step) ends += x, pads += y;
        }
        if (e + lane <= a.experts) {
            list.padded[e + lane] = padded + pads - own;
            list.row[e + lane] = min(row + ends - n, (int32_t)a.rows);
            if (a.pad_row_offsets != NULL && blockIdx.x == 0)
                a.pad_row_offsets[e + lane] = padded + pads - own;
        }
        row = min(row + __shfl_sync(~0u, ends, 31), (int32_t)a.rows);
        padded += __shfl_sync(~0u, pads, 31);
    }
    __syncthreads();
    return list;
}

/* The last entry of first[0 .. experts] that is at most x. */
__device__ __forceinline__ int32_t entry_of(const int32_t *first, int32_t experts, int64_t x)
{
    int32_t low = 0, high = experts;
    while (low < high) {
        const int32_t middle = (low + high + 1) / 2;
        if (first[middle] <= x) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* The row behind a padded one; -1: none. */
__device__ __forceinline__ int64_t row_behind(const swizzle_params &a, const expert_list &list,
                                              int64_t padded)
{
    if (a.tokens == NULL) return padded < a.rows ? padded : -1;
    const int32_t e = entry_of(list.padded, a.experts, padded);
    if (e == a.experts) return -1;
    const int64_t row = list.row[e] + padded - list.padded[e];
    return row < list.row[e + 1] ? row : -1;
}

__device__ __forceinline__ uint8_t *linear_at(const swizzle_params &a, int64_t matrix, int64_t row,
                                              int64_t column)
{
    return a.transposed ? a.linear + matrix * a.linear_s[0] + column * a.linear_s[1] + row
                        : a.linear + row * a.linear_s[0] + column;
}

__global__ void __launch_bounds__(THREADS) to_tiles(const __grid_constant__ swizzle_params a)
{
    extern __shared__ int32_t room[];
    const expert_list list = list_experts(a, room);
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, words = a.down * a.tiles * TILE_ROWS;
    if (i >= a.matrices * words) return;
    const int64_t matrix = i / words, w = i - matrix * words, tile = w / TILE_ROWS, in = w % TILE_ROWS;
    const int64_t padded = tile / a.tiles * TILE_ROWS + in % 4 * 32 + in / 4,
                  c = tile % a.tiles * TILE_COLUMNS;
    const int64_t row = row_behind(a, list, padded);
    uint8_t *to = a.swizzled + matrix * a.swizzled_s + w * TILE_COLUMNS;
#pragma unroll
    for (int b = 0; b < TILE_COLUMNS; b++)
        to[b] = row >= 0 && c + b < a.columns ? *linear_at(a, matrix, row, c + b) : 0;
}

__global__ void __launch_bounds__(THREADS) from_tiles(const __grid_constant__ swizzle_params a)
{
    extern __shared__ int32_t room[];
    const expert_list list = list_experts(a, room);
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, words = a.rows * a.tiles;
    if (i >= a.matrices * words) return;
    const int64_t matrix = i / words, w = i - matrix * words;
    const int64_t row = a.transposed ? w % a.rows : w / a.tiles,
                  tile = a.transposed ? w / a.rows : w % a.tiles;
    int64_t padded = row;
    if (a.tokens != NULL) {
        const int32_t e = entry_of(list.row, a.experts, row);
        padded = e < a.experts ? list.padded[e] + row - list.row[e] : -1;
        if (padded >= a.down * TILE_ROWS) padded = -1;
    }
    const uint8_t *from = a.swizzled + matrix * a.swizzled_s +
                          (padded / TILE_ROWS * a.tiles + tile) * TILE_BYTES + padded % 32 * 16 +
                          padded % TILE_ROWS / 32 * 4;
    for (int64_t c = tile * TILE_COLUMNS, b = 0; b < TILE_COLUMNS && c + b < a.columns; b++)
        *linear_at(a, matrix, row, c + b) = padded >= 0 ? from[b] : 0;
}

static bool swizzle_any_supports(const stage_exec *, const swizzle_args *args, char why[STAGE_WHY_BYTES])
{
    if (!present(args->tokens) || args->tokens.shape[0] <= MOST_EXPERTS) return true;
    snprintf(why, STAGE_WHY_BYTES, "%lld experts: the cuda backend takes up to %d",
             (long long)args->tokens.shape[0], (int)MOST_EXPERTS);
    return false;
}

static swizzle_params params_of(const swizzle_args *args)
{
    const quern_tensor &linear = args->linear, &swizzled = args->swizzled;
    swizzle_params a = {};
    a.linear = (uint8_t *)linear.data;
    a.swizzled = (uint8_t *)swizzled.data;
    a.transposed = args->transposed;
    a.matrices = args->transposed ? linear.shape[0] : 1;
    a.columns = linear.shape[1];
    a.rows = a.columns > 0 ? linear.shape[args->transposed ? 2 : 0] : 0;
    a.tiles = (a.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    a.down = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int i = 0; i + 1 < linear.ndim; i++) a.linear_s[i] = linear.strides[i];
    a.swizzled_s = swizzled.ndim > 1 ? swizzled.strides[0] : 0;
    if (!present(args->tokens)) return a;
    a.tokens = (const int32_t *)args->tokens.data;
    a.experts = (int32_t)args->tokens.shape[0];
    a.pad_row_offsets = present(args->pad_row_offsets) ? (int32_t *)args->pad_row_offsets.data : NULL;
    a.down = a.tiles > 0 ? swizzled.shape[0] / (a.tiles * TILE_BYTES) : 0;
    return a;
}

static quern_status swizzle_any_run(const stage_exec *exec, const swizzle_args *args, void *)
{
    swizzle_params a = params_of(args);
    a.status = exec->status;
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t n = a.matrices * (args->inverse ? a.rows : a.down * TILE_ROWS) * a.tiles;
    /* A call without scales has offsets to write all the same. */
    const unsigned grid = n > 0 ? blocks_for(n, THREADS) : a.pad_row_offsets != NULL ? 1 : 0;
    const size_t bytes = a.tokens != NULL ? (size_t)(2 * a.experts + 2) * sizeof(int32_t) : 0;
    if (grid > 0 && args->inverse) from_tiles<<<grid, THREADS, bytes, stream>>>(a);
    else if (grid > 0) to_tiles<<<grid, THREADS, bytes, stream>>>(a);
    const int64_t tail =
        args->inverse || !present(args->tokens) ? 0 : args->swizzled.shape[0] - n * TILE_COLUMNS;
    if (tail > 0) {
        const cudaError_t code = cudaMemsetAsync(a.swizzled + n * TILE_COLUMNS, 0, (size_t)tail, stream);
        if (code != cudaSuccess) return cuda_report(code, "swizzle, clearing");
    }
    return LAUNCHED("swizzle");
}

extern const variant<swizzle_args> swizzle_any = {"swizzle_any", swizzle_any_supports, NULL, swizzle_any_run};
