/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - attention of a step's few tokens over keys that are values at once (D 512), on Hopper.
 *
 * A query's keys are cut into tiles of 64, raw rows before entries, and its tiles into at most SHARES shares,
 * by their number alone. Each tile has a maximum, a sum and values of its own, from zero; a share's tiles are
 * folded in order, and so are a query's shares. So no bit depends on which block takes what:
 *
 *   whole   a block takes all shares of a query and 64 of its heads. One launch makes the plan before.
 *   paired  the same by two blocks, where rows are of bytes and half of the multiprocessors would be idle: a
 *           cluster of which each block decodes half of a tile's rows, for both, has all scores, and the
 *           values of half of the columns
 *   split   of few queries a block takes one share, plans by itself, and writes its values in f32; combine.cu
 *           folds them. Its kernel is share.cuh's.
 *
 * A block of the whole form has four warpgroups:
 *
 *   feed     plans, gathers Q and keys, decodes rows of bytes; a stage has half of a tile's columns
 *   score    S = Q K^T and the tile's softmax; writes P, rounded, and the factors of the fold
 *   values   twice: a tile's P K in pieces of 64 columns, folded into 256 of the 512 columns, paired 128
 *
 * Shared memory: K 2 x 64 KB, Q 64 KB, P 8 KB, rows of bytes on their way 18 KB, a list that is sorted 4 KB.
 * Registers: O 128 and 32 of a piece, of 168.
 * Limit: a tile's bytes, its products (2048 clocks for 64 heads), or decoding it (700 instructions of each
 * warp of the feed).
 */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_DECODE_SHARED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_DECODE_SHARED_CUH

#include "attend_mqa/plan.cuh"
#include "common/combine.cuh"
#include "hopper/ring.cuh"
#include "hopper/rows.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_mqa_decode
{

enum {
    HEADS = 64,
    KEYS = 64,
    STAGES = 4,
    PANELS = MQA_DIM / 64, /* of 64 columns */
    HALF = PANELS / 2,     /* panels of a stage */
    PANEL_BYTES = 64 * 128,
    SHARES = 32,
    SORTED_MOST = 1024, /* entries of a list that a block sorts by itself */
    THREADS = 512,
    FEED_WARPS = 4,
    ROWS_AT_ONCE = 8,                  /* rows of bytes of a warp: half of those it has of a tile */
    VALUE_FLOATS = MQA_DIM / 2 * HEADS /* of a warpgroup */
};

/* What a stage holds: `keys` rows of an item, zeros after them. */
enum tile_ends {
    ENDS_RAW = 1,   /* the raw keys of an item */
    ENDS_SHARE = 2, /* of a query that has several; the values are folded in the order of the shares */
    ENDS_ITEM = 4,
    LATER_SHARE = 8,
    NO_ITEM = 16 /* nothing is left */
};
struct __align__(16) tile_info
{
    int32_t keys, ends;
    int32_t sequence, row, position, head0;
};

template <typename T> struct shared {
    T k[STAGES][HALF][64][64];
    T q[PANELS][64][64];
    T p[64][64];
    char rows[FEED_WARPS][ROWS_AT_ONCE][MQA_CODES]; /* of bytes, as they come, of each warp of the feed */
    fold_factors tile[HEADS], share[HEADS];
    float factor[HEADS]; /* beside an item's last P */
    tile_info info[STAGES];
    ring<STAGES> keys;
    ring<1> weights;
    ring<1> queries;
    mqa::plan_room room;
    int32_t sorted[SORTED_MOST];
};
enum {
    KEY_FILLERS = 2 * 128, /* copies, and who asked for them; rows of bytes: half as many */
    KEY_USERS = 2 * 128,
    WEIGHT_FILLERS = 128,
    WEIGHT_USERS = 2 * 128,
    QUERY_FILLERS = 2 * 128,
    QUERY_USERS = 128,
    PAIR = 2,
    PAIR_FILLERS = FEED_WARPS,  /* a warp, with the bytes that the other block's warp copies */
    PAIR_USERS = PAIR * (4 + 8) /* warps of both blocks */
};

struct decode_kernel {
    mqa_kernel a;
    mqa_planner plan;
    bool planned, whole, paired;
    bool guess; /* what queries see follows from positions, if lists are clean and no page is missing */
    int32_t heads, groups, shares, items; /* a block's heads; groups of them; shares of a query at most */
    float *values; /* split: [part][SHARE_PIECES][HEADS / 16][32][4]; whole, several shares:
                      [block][2][VALUE_FLOATS] */
    float4 *sums;  /* split: [part][HEADS]: maximum and sum of all keys, of the raw ones */
    int4 *places;  /* split: [rows x groups]: a query's place in o, its position, its shares */
};

/* Into how many tiles a query's keys are cut, and into how many tiles its shares. */
__host__ __device__ __forceinline__ int tiles_of(int raw, int entries)
{
    const int n = (raw + KEYS - 1) / KEYS + (entries + KEYS - 1) / KEYS;
    return n > 0 ? n : 1;
}
__host__ __device__ __forceinline__ int share_of(int tiles)
{
    return (tiles + SHARES - 1) / SHARES;
}

/* A part's values lie as its threads have them: a piece has eight columns, of each 16 rows as 32 lanes. */
enum { SHARE_PIECES = MQA_DIM / 8 };

/* Rotates a pair of channels back. */
__device__ __forceinline__ void rotate_pair(float &x, float &y, float cosine, float sine)
{
    const float held = x;
    x = fmaf(x, cosine, __fmul_rn(y, sine));
    y = fmaf(y, cosine, -__fmul_rn(held, sine));
}

typedef quern_status instance(const stage_exec *exec, const decode_kernel &w);
instance decode_bf16, decode_f16;
quern_status combine_shares(const stage_exec *exec, const decode_kernel &w, quern_dtype dtype);

} // namespace sm90_mqa_decode

#endif
