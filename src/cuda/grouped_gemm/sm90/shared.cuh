/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the grouped product on Hopper: the plan of a block.
 *
 * Persistent blocks walk tiles of 64 columns of B a warpgroup and TOKENS tokens of an expert.
 *
 *   feed      one thread copies tokens by TMA and repacked weights by bulk copies into stages of units of
 *             64 of K; of weights in the caller's layout all four warps gather the fragments
 *   multiply  warpgroups of 64 columns each: a lane reads its 16 bytes of codes and 8 of scales of a unit,
 *             decodes them into the products' first operand while the products of the unit before run; up to
 *             16 tokens are multiplied by warps
 *
 * The gradient of A is the same product by transposed weights: it sums over B's columns, a warpgroup has 64
 * of K, and fragments are transposed once they are decoded.
 *
 * TOKENS, 8 to 256, is the width of the products. Decoding a unit takes 90 instructions a warp; products of
 * TOKENS / 2 clocks for each 16 of K run beside it. Up to 64 tokens four warpgroups a multiprocessor hide the
 * decoding's latency, in two blocks or in one, and a stage holds several units, since a wait takes as long as
 * multiplying one.
 *
 * Registers at 256 tokens: 128 accumulators, 32 for two units' operands. Shared memory: a stage's unit is 128
 * bytes a token and 2304 of weights a warpgroup. Limit: 4.5 bits a weight over the read rate, or 2 flops a
 * weight and token over the tensor cores' rate.
 */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_SHARED_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_SHARED_CUH

#include "grouped_gemm/params.cuh"
#include "hopper/tma.cuh"
#include "hopper/ring.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_gemm
{

enum {
    FEW_REGISTERS = 56,
    MANY_REGISTERS = 224,
    STORE_BYTES = 1024,
    FEW_TOKENS = 8 /* up to which calls are so short that kernels are launched behind each other */
};

/* How a width is run. */
template <int TOKENS> struct form {
    enum {
        BLOCKS = TOKENS <= 16 ? 2 : 1,                 /* of a multiprocessor */
        GROUPS = TOKENS == 32 || TOKENS == 64 ? 4 : 2, /* that multiply */
        PAIRS = TOKENS >= 128,                         /* whether a panel more takes as much longer */
        THREADS = 128 + GROUPS * 128,
        UNITS = TOKENS <= 16    ? 4
                : TOKENS <= 128 ? 2
                                : 1, /* of a stage */
        UNIT_STAGE = TOKENS * 128 + GROUPS * UNIT_BYTES,
        STAGE_BYTES = (BLOCKS == 2 ? 100 : 200) * 1024, /* of all stages */
        STAGES = STAGE_BYTES / (UNITS * UNIT_STAGE)
    };
};

template <int TOKENS> struct shared {
    typedef form<TOKENS> f;
    char a[f::STAGES][f::UNITS][TOKENS * 128]; /* first: tiles are aligned to 1024 bytes */
    char b[f::STAGES][f::GROUPS][f::UNITS][UNIT_BYTES];
    char out[f::GROUPS * 4][STORE_BYTES]; /* a warp's results, staged for C */
    ring<f::STAGES> stages;
    tile_list tiles;
};

/* A specialisation an instance; rows: tokens as the products' rows (rows.cuh); of the gradient, transposed
 * weights. */
template <typename T, int TOKENS>
quern_status launch(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a);
template <typename T, int EIGHTS>
quern_status launch_rows(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a);
template <int TOKENS>
quern_status launch_gradient(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a);

} // namespace sm90_gemm

#endif
