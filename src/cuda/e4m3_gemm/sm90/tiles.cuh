/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * tiles.cuh - what Hopper's products with e4m3 weights share: tiles of 128 rows of W, two warpgroups of 64,
 * by TOKENS rows of a; the walk of a block over them, and the store. A run is 128 of K.
 *
 * TMA copies rows of W and of a as they stand, in rows of 128 bytes whose chunks of 16 are permuted
 * (common/mma.cuh), and fills columns past the last one with 0.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_TILES_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_TILES_CUH

#include "e4m3_gemm/params.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_e4m3
{

enum { WG_ROWS = 64, GROUPS = 2, TILE_ROWS = WG_ROWS * GROUPS, RUN = 128, THREADS = 128 + GROUPS * 128 };

struct product_params {
    e4m3_params p;
    int64_t panels, token_tiles; /* of a group: tiles along W's rows */
    int32_t runs;                /* of a group */
    int32_t shares;              /* blocks that share a tile's runs */
    int32_t tall;                /* of one row's product: panels of a block */
    bool wide;                   /* rows of c take stores of 16 bytes */
    const float *row_scale;      /* of codes: [groups runs][scale_row] */
    int64_t scale_row;
};

struct tile_place {
    int64_t group, column, token; /* column: of the group */
};

__device__ __forceinline__ int64_t tiles_of(const product_params &q)
{
    return q.panels * q.p.groups * q.token_tiles;
}

/* Tiles of the same rows of W follow one another. */
__device__ __forceinline__ tile_place tile_at(const product_params &q, int64_t tile, int tokens)
{
    const int64_t panel = tile / q.token_tiles, group = panel / q.panels;
    return {group, (panel - group * q.panels) * TILE_ROWS, (tile - panel * q.token_tiles) * tokens};
}

/* The scales of a thread's two rows of W in a run. */
struct row_scales {
    float low, high;
};

/* Rows of W, counted from the group's first, that a thread's sums belong to. */
__device__ __forceinline__ int64_t low_row(int warpgroup)
{
    return warpgroup * WG_ROWS + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ row_scales scales_at(const product_params &q, const tile_place &t, int warpgroup,
                                                int run)
{
    const int64_t first = t.column + low_row(warpgroup), last = q.p.out - 1, row0 = t.group * q.p.out;
    return {q.p.scales.at(row0 + min(first, last), (int64_t)run * RUN, q.p.status),
            q.p.scales.at(row0 + min(first + 8, last), (int64_t)run * RUN, q.p.status)};
}

/* Stores a warpgroup's 64 columns of c, which `staged` transposes: a row of 128 bytes a token. */
template <typename T, int TOKENS>
__device__ __forceinline__ void store_tile(const float (&c)[TOKENS / 8][4], const product_params &q,
                                           const tile_place &t, int warpgroup, char *staged)
{
    enum { ROW = WG_ROWS * 2 };
    const int lane = threadIdx.x % 32, column = (int)low_row(0);
    const int64_t first = t.column + warpgroup * WG_ROWS, at = t.group * q.p.out;
    float bias[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; i++)
        if (q.p.bias.p != NULL && first + column + i * 8 < q.p.out)
            bias[i] = q.p.bias.at(at + first + column + i * 8);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int token = n * 8 + lane % 4 * 2 + e % 2, to = column + e / 2 * 8;
            *(T *)(staged + staged_at<ROW>(token, to)) = from_float<T>(c[n][e] + bias[e / 2]);
        }
    named_sync(1 + warpgroup, 128);
    store_staged<T, ROW, TOKENS>(staged, (T *)q.p.c + at + first, q.p.c_row, t.token, q.p.tokens,
                                 q.p.out - first, q.wide);
    named_sync(1 + warpgroup, 128);
}

/* a's rows as TMA's descriptor has them. */
static inline quern_tensor rows_of_a(const e4m3_gemm_args *args)
{
    quern_tensor t = args->a;
    t.ndim = 4;
    t.shape[3] = t.shape[1];
    t.shape[1] = t.shape[0];
    t.shape[0] = t.shape[2] = 1;
    t.strides[1] = args->a.strides[0];
    t.strides[0] = t.strides[2] = 8;
    t.strides[3] = 1;
    return t;
}

/* Whether TMA can read W and rows of a, and a run has one scale a row. */
static inline bool tiles_take(const e4m3_gemm_args *args)
{
    const quern_tensor &w = args->codes;
    char why[STAGE_WHY_BYTES];
    const bool one = args->scales.shape[0] * args->scales.shape[1] == 1;
    return !args->rows && e4m3_takes(args, why) && (one || args->block_columns == RUN) && w.shape[1] > 0 &&
           w.shape[0] > 0 && w.shape[0] <= INT32_MAX && w.shape[1] <= INT32_MAX && rows_aligned(w, 16) &&
           w.strides[0] > 0 && w.strides[0] < (int64_t)1 << 39 &&
           (args->a.dtype == QUERN_BF16 || args->a.dtype == QUERN_F16) && args->c.dtype == args->a.dtype;
}

/* Whether the copy engine can read a's rows of each group. A stride counts though there is one row, so that
 * a row alone is multiplied as it is among others. */
static inline bool tiles_take_rows(const e4m3_gemm_args *args)
{
    return (args->groups == 1 || args->codes.shape[1] % RUN == 0) &&
           (args->a.shape[0] == 0 || (args->a.strides[0] % 8 == 0 && tma_can(rows_of_a(args))));
}

static inline product_params product_of(const stage_exec *exec, const e4m3_gemm_args *args, int tokens)
{
    product_params q = {};
    q.p = e4m3_params_of(exec, args);
    q.runs = (int32_t)((q.p.in + RUN - 1) / RUN);
    q.panels = (q.p.out + TILE_ROWS - 1) / TILE_ROWS;
    q.token_tiles = (q.p.tokens + tokens - 1) / tokens;
    q.shares = 1;
    q.wide = rows_aligned(args->c, 16) && q.p.out % 8 == 0;
    return q;
}

/* Rows of bytes, in boxes of `rows` by 128. */
static inline quern_status describe_bytes(CUtensorMap *map, const void *data, int64_t rows, int64_t bytes,
                                          int64_t stride, int box)
{
    const tma_tensor t = {
        (void *)data,     CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, {bytes, 1, rows, 1}, {16, stride, 16},
        {RUN, 1, box, 1}, CU_TENSOR_MAP_SWIZZLE_128B};
    return tma_describe(map, t);
}

} // namespace sm90_e4m3

#endif
