/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * operand.cuh - products of tokens with a panel of fn that stays in registers: a warp's part of a copy, two
 * bf16 a number, is 192 registers a lane, so shared memory is left to the tokens. The order of channels, of
 * rows and of parts is panel.cuh's.
 */
#ifndef QUERN_CUDA_HYPER_SM90_OPERAND_CUH
#define QUERN_CUDA_HYPER_SM90_OPERAND_CUH

#include "hopper/cluster.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "hyper/four/panel.cuh"

namespace sm90_hyper
{

enum {
    SUM_WARPS = 2 * COPIES, /* two a copy */
    SUM_THREADS = SUM_WARPS * 32,
    THREADS = SUM_THREADS + 128,
    SUM_REGISTERS = 216,
    OTHER_REGISTERS = 72,
    TOKENS = 8,       /* of a tile */
    HALF = PANEL / 2, /* channels of a half; a warp has a half of each half */
    HALF_CHUNKS = HALF / 2 / DEPTH,
    CHUNKS = 2 * HALF_CHUNKS, /* of DEPTH channels, a warp's */
    PRODUCTS = WEIGHTS * TOKENS
};

/* A warp's channels of chunk c: of the panel. */
__device__ __forceinline__ int chunk_channel(int warp, int c)
{
    return c / HALF_CHUNKS * HALF + warp % 2 * (HALF / 2) + c % HALF_CHUNKS * DEPTH;
}

/* Eight tokens' copies in shared memory: boxes of 64 channels, a line of 128 bytes a token and copy, whose
 * chunks of 16 bytes the copy engine permutes. */
enum { BOX = 64, LINE = BOX * 2, BOX_BYTES = TOKENS * COPIES * LINE };

/* Where chunk `chunk` of eight channels of a token's copy stands. */
__device__ __forceinline__ uint32_t chunk_at(int token, int copy, int chunk)
{
    const int line = token * COPIES + copy;
    return chunk / 8 * BOX_BYTES + line * LINE + (((chunk ^ line) & 7) << 4);
}

/* Describes rows of tokens, `copies` of each: a box is a half of eight tokens, its boxes of 64 channels one
 * after the other. */
static inline quern_status describe_rows(CUtensorMap *map, const four_params &p, const token_rows &r,
                                         int copies)
{
    const tma_tensor t = {r.p,
                          CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          4,
                          {BOX, copies, p.tokens, p.width / BOX},
                          {r.copy * 2, r.token * 2, LINE},
                          {BOX, copies, TOKENS, HALF / BOX},
                          CU_TENSOR_MAP_SWIZZLE_128B};
    return tma_describe(map, t);
}

struct fn_operand {
    uint32_t a[CHUNKS][STEPS][ROW_TILES][4];
};

/* A step of 16 of a lane's channels, of which `from` is the first, of fn's row lane / 4. */
__device__ __forceinline__ void load_step(const four_params &p, const float *from,
                                          uint32_t (&a)[ROW_TILES][4])
{
    uint32_t words[FN_PARTS * WEIGHTS / 8][2]; /* of rows lane / 4 + 8 r */
#pragma unroll
    for (int r = 0; r < WEIGHTS / 8; r++) {
        const float4 x = __ldg((const float4 *)(from + r * 8 * p.fn_row));
#pragma unroll
        for (int part = 0; part < FN_PARTS; part++) {
            words[part * (WEIGHTS / 8) + r][0] = pack_two(x.x, x.y, part);
            words[part * (WEIGHTS / 8) + r][1] = pack_two(x.z, x.w, part);
        }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int w = 0; w < 4; w++) a[m][w] = words[2 * m + w % 2][w / 2];
}

__device__ __forceinline__ void load_operand(const four_params &p, int panel, fn_operand &fn)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *const from =
        p.fn + lane / 4 * p.fn_row + (int64_t)(warp / 2) * p.width + panel * PANEL + lane % 4 * CHUNK;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) load_step(p, from + chunk_channel(warp, c) + s * 4, fn.a[c][s]);
}

__device__ __forceinline__ uint4 load_shared16(uint32_t at)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at));
    return x;
}

/* Where a lane's 16 bytes of its warp's first chunk stand; those of chunk c are `chunk_further` on. */
__device__ __forceinline__ uint32_t first_chunk(int warp)
{
    return chunk_at(threadIdx.x % 32 / 4, warp / 2, chunk_channel(warp, 0) / CHUNK + threadIdx.x % 4);
}
__device__ __forceinline__ uint32_t chunk_further(uint32_t first, int c)
{
    return (first ^ c % 2 << 6) + chunk_channel(0, c) / BOX * BOX_BYTES;
}

/* Adds chunk c of a lane's token times fn. */
__device__ __forceinline__ void multiply_chunk(float (&sum)[ROW_TILES][1][4], const fn_operand &fn, int c,
                                               const uint4 &x)
{
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            mma16816<bf16>(sum[m][0], fn.a[c][s][m], word_of(x, 2 * s), word_of(x, 2 * s + 1));
}

/* A warp's sums, [weight][token of the tile]. */
__device__ __forceinline__ void leave_products(float *to, const float (&sum)[ROW_TILES][1][4])
{
    const int lane = threadIdx.x % 32;
    float2 all[3];
    join_parts<1>(sum, 0, all);
#pragma unroll
    for (int w = 0; w < 3; w++) *(float2 *)(to + (w * 8 + lane / 4) * TOKENS + lane % 4 * 2) = all[w];
}

/* Their sum over the warps. */
__device__ __forceinline__ float add_warps(const float (&parts)[SUM_WARPS][PRODUCTS], int at)
{
    float sum = parts[0][at];
#pragma unroll
    for (int w = 1; w < SUM_WARPS; w++) sum += parts[w][at];
    return sum;
}

} // namespace sm90_hyper

#endif
