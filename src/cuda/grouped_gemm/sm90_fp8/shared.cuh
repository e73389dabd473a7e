/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the grouped product of e4m3 operands on Hopper: the plan of a block.
 *
 * As grouped_gemm/sm90: persistent blocks walk tiles of 128 tokens of an expert by 128 columns of B. A step
 * is 128 of K.
 *
 *   feed      one thread copies tokens' bytes and scales, and repacked units; of weights in the caller's
 *             layout, or out of line, all four warps load the units
 *   decode    two warpgroups of 64 columns each turn units into rows of e4m3 in shared memory
 *   multiply  two warpgroups of 64 columns each: both operands from shared memory
 *
 * Weights. Of e4m3(code scale 2^-e) there are eight magnitudes a block of 16: a table in shared memory holds
 * their bytes for each scale byte and each e, 19 KB. A thread has blocks of two columns: two entries, by
 * which a byte permutation decodes four codes whose selectors are shifts and masks of a word: 100
 * instructions for 32 codes. Tokens have K in the order that comes of it (fp8.cuh).
 *
 * Sums leave the tensor cores each 128 of K, whose products are truncated to 14 bits: 64 fused multiply-adds
 * a thread by the tokens' scales, while the other warpgroup's products run.
 *
 * Registers of a multiplying thread: 64 accumulators and 64 of the 128 of K. Limit: decoding. Its logic,
 * shifts and permutations issue at half the rate of FMA, 900 clocks for a step, whose products take 512.
 */
#ifndef QUERN_CUDA_SM90_FP8_GROUPED_GEMM_SHARED_CUH
#define QUERN_CUDA_SM90_FP8_GROUPED_GEMM_SHARED_CUH

#include "grouped_gemm/fp8.cuh"
#include "grouped_gemm/sm90/kernel.cuh"

namespace sm90_fp8
{

enum {
    TOKENS = FP8_TILE,
    GROUPS = 2, /* panels of a tile: warpgroups that decode, and that multiply */
    UNITS = 2,  /* of a step */
    THREADS = 128 + 2 * GROUPS * 128,
    TOKEN_STAGES = 5,
    UNIT_STAGES = 4,
    WEIGHT_STAGES = 4,
    FEED_REGISTERS = 64,
    DECODE_REGISTERS = 56,
    MULTIPLY_REGISTERS = 152,
    POWERS = 19, /* of two: 2^-15 for the least scale to 2^3 for the largest */
    SCALES = 128
};

struct shared {
    char a[TOKEN_STAGES][TOKENS * 128]; /* first, and then b: tiles are aligned to 1024 bytes */
    char b[WEIGHT_STAGES][GROUPS][UNIT * 128];
    char units[UNIT_STAGES][GROUPS][UNITS][UNIT_BYTES];
    float scale[TOKEN_STAGES][TOKENS];
    uint2 weights[POWERS][SCALES]; /* the bytes of magnitudes 0 to 7, for each scale byte */
    char out[GROUPS * 4][sm90_gemm::STORE_BYTES];
    ring<TOKEN_STAGES> tokens;
    ring<UNIT_STAGES> packed;
    ring<WEIGHT_STAGES> decoded;
    tile_list tiles;
};

} // namespace sm90_fp8

#endif
