/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the grouped product of e4m3 operands on Hopper, weights in registers: the plan of a block.
 * It has not run on a GPU yet.
 *
 * As grouped_gemm/sm90: persistent blocks walk tiles of 64, 128 or 256 tokens of an expert by 128 columns of
 * B. A step is 128 of K.
 *
 *   feed      one thread copies tokens' bytes and scales, and repacked units; of weights in the caller's
 *             layout, or out of line, all four warps load the units
 *   multiply  two warpgroups of 64 columns each decode a step's weights into registers, the products' first
 *             operand, and multiply up to 128 tokens at a time by them. They take turns: one decodes and adds
 *             while the other's products run
 *
 * Weights. Of e4m3(code scale 2^-e) there are eight magnitudes a block of 16: a table in shared memory holds
 * their bytes for each scale byte and each e, 19 KB. A lane has what its fragments hold, blocks of two
 * columns: two entries, by which a byte permutation decodes four codes whose selectors are shifts and masks
 * of a word: 16 instructions for 8 codes. Tokens have K in the order that comes of it (fp8.cuh).
 *
 * Sums leave the tensor cores each 128 of K, whose products are truncated to 14 bits: 64 fused multiply-adds
 * a thread and 128 tokens by the tokens' scales. A row's bits do not depend on the tile.
 *
 * Registers of a multiplying thread: 128 accumulators, 64 of the 128 of K, 16 of weights. Limit: a step of
 * 256 tokens takes 1024 clocks of products; of shared memory 512 for them and 800 for copies, scales and
 * tables; 640 of decoding's logic, shifts and permutations.
 */
#ifndef QUERN_CUDA_SM90_FP8_REGISTERS_GROUPED_GEMM_SHARED_CUH
#define QUERN_CUDA_SM90_FP8_REGISTERS_GROUPED_GEMM_SHARED_CUH

#include "grouped_gemm/fp8.cuh"
#include "grouped_gemm/sm90/kernel.cuh"

namespace sm90_fp8_registers
{

enum {
    GROUPS = 2,  /* panels of a tile: warpgroups that multiply */
    UNITS = 2,   /* of a step */
    POWERS = 19, /* of two: 2^-15 for the least scale to 2^3 for the largest */
    SCALES = 128,
    THREADS = 128 * (1 + GROUPS),
    TURN = 1 /* the first of two named barriers */
};

/* How tiles of so many tokens are run. */
template <int TOKENS> struct form {
    enum {
        PART = TOKENS < 128 ? TOKENS : 128, /* tokens of a product */
        PARTS = TOKENS / PART,
        STAGES = TOKENS == 256 ? 4 : 6,
        FEED_REGISTERS = TOKENS == 256 ? 24 : 64,
        MULTIPLY_REGISTERS = TOKENS == 256 ? 240 : 216
    };
};

template <int TOKENS> struct shared {
    typedef form<TOKENS> f;
    char a[f::STAGES][TOKENS * 128]; /* first: tiles are aligned to 1024 bytes, and so is the table */
    uint2 weights[POWERS][SCALES];   /* the bytes of magnitudes 0 to 7, for each scale byte */
    char units[f::STAGES][GROUPS][UNITS][UNIT_BYTES];
    float scale[f::STAGES][TOKENS];
    char out[GROUPS * 4][sm90_gemm::STORE_BYTES];
    ring<f::STAGES> stages;
    tile_list tiles;
};

} // namespace sm90_fp8_registers_registers

#endif
