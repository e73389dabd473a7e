/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the grouped product of e4m3 operands on Hopper: the plan of a block.
 *
 * As grouped_gemm/sm90: persistent blocks walk tiles of 256 tokens of an expert by 128 columns of B, or, of
 * few tokens and of weights that bulk copies cannot read, of 128 by 128. A step is 128 of K. Of many tokens
 * two blocks of a cluster have the same columns and the tokens that follow one another: each decodes half of
 * the weights, and copies them to the other's shared memory.
 *
 *   feed      one thread copies tokens' bytes and scales, and repacked units; of weights in the caller's
 *             layout, or out of line, all four warps load the units
 *   decode    a warpgroup, or two of 64 columns each, turns units into rows of e4m3 in shared memory
 *   multiply  two warpgroups of half the tokens each, 64 of them at a time: tokens are the products' rows,
 *             and both operands come from shared memory
 *
 * Weights. Of e4m3(code scale 2^-e) there are eight magnitudes a block of 16. A thread has blocks of two
 * columns: it rounds the eight of each by 8 multiplications and 4 conversions, and a byte permutation decodes
 * four codes whose selectors are shifts and masks of a word: 90 instructions for 32 codes. Tokens have K in
 * the order of the decoded codes (fp8.cuh).
 *
 * The tensor core keeps 14 bits of a sum of e4m3 products, so each 128 of K are summed from zero and added in
 * f32 times the tokens' scales, two a thread: 64 fused multiply-adds a thread and 64 tokens. A row's bits do
 * not depend on the tile.
 *
 * Registers of a multiplying thread: 128 accumulators and 64 of the 128 of K. Limit: a step of 256 tokens
 * takes 1024 clocks of products and 1300 of shared memory; instructions, 1000 a scheduler where a block
 * decodes all of the weights, 780 where two share them.
 */
#ifndef QUERN_CUDA_SM90_FP8_GROUPED_GEMM_SHARED_CUH
#define QUERN_CUDA_SM90_FP8_GROUPED_GEMM_SHARED_CUH

#include "grouped_gemm/fp8.cuh"
#include "grouped_gemm/sm90/kernel.cuh"
#include "grouped_gemm/sm90/store_rows.cuh"

namespace sm90_fp8
{

enum {
    PART = 128, /* tokens of a product */
    GROUPS = 2, /* panels of a tile: warpgroups that multiply */
    UNITS = 2,  /* of a step */
    EIGHTS = GROUPS * UNIT / 8
};

/* How tiles of PARTS times 128 tokens are run. SHARE: the blocks of a cluster, which share the weights of two
 * panels. */
template <int PARTS, int SHARE> struct form {
    enum {
        TOKENS = PARTS * PART,
        PANELS = GROUPS / SHARE,       /* that a block decodes */
        DECODERS = PARTS == 1 ? 2 : 1, /* warpgroups that decode */
        THREADS = 128 * (1 + DECODERS + GROUPS),
        STAGES = PARTS == 1 ? 4 : 3, /* of tokens, and of decoded weights */
        UNIT_STAGES = 4,             /* of weights as they are packed */
        FEED_REGISTERS = PARTS == 1   ? 64
                         : SHARE == 1 ? 24
                                      : 40,
        DECODE_REGISTERS = SHARE == 1 ? 56 : 40,
        MULTIPLY_REGISTERS = PARTS == 1 ? 152 : 216
    };
};

template <int PARTS, int SHARE> struct shared {
    typedef form<PARTS, SHARE> f;
    char a[f::STAGES][f::TOKENS * 128]; /* first, and then b: tiles are aligned to 1024 bytes */
    char b[f::STAGES][GROUPS][UNIT * 128];
    char units[f::UNIT_STAGES][f::PANELS][UNITS][UNIT_BYTES];
    float scale[f::STAGES][f::TOKENS];
    sm90_gemm::column_table<EIGHTS> columns[2];
    char out[GROUPS * 4][2][sm90_gemm::STORE_BYTES];
    ring<f::STAGES> tokens, decoded;
    ring<f::UNIT_STAGES> packed;
    ring<2> table; /* of columns */
    tile_list tiles;
};

} // namespace sm90_fp8

#endif
