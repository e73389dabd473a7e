/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the backward of pairs on Hopper, for D 512.
 *
 * A persistent block of three warpgroups walks items of one token and 64 of its heads. One gathers Q and dO,
 * then the keys, 64 at a time. The two others, of a tile of keys:
 *
 *   scores   the first makes S = Q K^T, the second dP = dO K^T. They exchange halves by keys, and each makes
 *            P and dS of 32 keys and puts them, rounded, into shared memory
 *   dQ       += dS K, each for 256 of the 512 columns, kept in registers for the whole item
 *   partials = P^T dO + dS^T Q, each for its 256 columns, 128 at a time, which go from registers to memory
 *
 * So five products are what the mathematics asks for, and every key is gathered once. K has one tile of room:
 * the next one is fetched while the partials are multiplied.
 *
 * Shared memory: Q 64 KB, dO 64 KB, K 64 KB, P and dS 16 KB, the exchange 16 KB. Registers: dQ 128 and S 32
 * or partials 64, of 232. Limit: 10 H D flops a pair over the tensor cores' rate, 5120 clocks for 64 heads
 * and 64 keys; shared memory, of which the products read 544 KB, 4350 clocks; and what a tile's partials take
 * to memory, 64 KB.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_BACKWARD_SHARED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_BACKWARD_SHARED_CUH

#include "attend_mqa/backward/backward.cuh"
#include "hopper/ring.cuh"
#include "hopper/rows.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_mqa_backward
{

enum {
    HEADS = 64,
    KEYS = 64,
    PANELS = MQA_DIM / 64,
    HALF = PANELS / 2, /* panels of a stage of the keys' ring */
    HALVES = 2,
    PANEL_BYTES = 64 * 128,
    THREADS = 384,
    COMPUTERS = 256,
    FEED_REGISTERS = 40,
    COMPUTE_REGISTERS = 232
};

/* Of a tile of keys. */
struct tile_info {
    int32_t partial[KEYS]; /* rows of partials, or -1 */
    int32_t keys, last;    /* keys in the tile; 0 with `last`: the query sees none */
};

template <typename T> struct shared {
    T q[PANELS][HEADS][64], d_o[PANELS][HEADS][64];
    T k[HALVES][HALF][KEYS][64];
    T p[HEADS][KEYS], ds[HEADS][KEYS];
    float4 exchange[2][4][128]; /* of each warpgroup for the other one: a thread's 16 values of its rows */
    mqa_head heads[HEADS];
    tile_info info[2]; /* of a tile and the one before it */
    ring<HALVES> keys;
    stage_barriers<1> heads_full, heads_free;
    stage_barriers<1> rotated, exchanged, weights_made; /* of both computing warpgroups */
};

typedef mqa_pairs instance;
instance pairs_bf16, pairs_f16;

} // namespace sm90_mqa_backward

#endif
