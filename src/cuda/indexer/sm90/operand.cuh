/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* operand.cuh - a stage's keys as the products' first operand: a warp has 16 rows, a thread two of them, lane
 * / 4 and that + 8, and of each 32 channels. Rows of bytes are read 4 or 16 bytes at a time without bank
 * conflicts and widened here. */
#ifndef QUERN_CUDA_INDEXER_SM90_OPERAND_CUH
#define QUERN_CUDA_INDEXER_SM90_OPERAND_CUH

#include "indexer/sm90/shared.cuh"

namespace sm90_indexer
{

__device__ __forceinline__ uint32_t shared_word(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void shared_words(uint32_t (&x)[4], uint32_t address)
{
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* Of a thread's two rows: the codes' words, the scales' bits, and whether the row is there. */
template <key_kind KIND> struct key_words {
    uint32_t code[2][codes_of(KIND) / 16], scale[2];
};

template <key_kind KIND>
__device__ __forceinline__ void read_words(key_words<KIND> &x, uint32_t tile, int row0, bool planar)
{
    constexpr int CODES = codes_of(KIND), WORDS = CODES / 16;
    const int lane = threadIdx.x % 32, row = row0 + lane / 4, own = lane % 4 * WORDS * 4;
    if (planar) {
        const bool odd = codes_of(KIND) == WIDTH && (lane / 4 & 1) != 0; /* its halves the other way round */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t at = tile + (row + h * 8) * CODES + own;
            uint32_t half[WORDS / 4][4];
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) shared_words(half[i], at + (i ^ (int)odd) * 16);
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                x.code[h][i] = odd ? half[(WORDS / 4 - 1) ^ i / 4][i % 4] : half[i / 4][i % 4];
            x.scale[h] = shared_word(tile + KEYS * CODES + (row + h * 8) * SCALE_BYTES);
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t at = tile + (row + h * 8) * (CODES + SCALE_BYTES);
#pragma unroll
            for (int i = 0; i < WORDS; i++) x.code[h][i] = shared_word(at + own + i * 4);
            x.scale[h] = shared_word(at + CODES);
        }
    }
}

/* Two codes at bits `sign` and below of the halves of a word, times `times`, a power of two. */
__device__ __forceinline__ uint32_t widened(uint32_t signs, uint32_t sizes, uint32_t mask, uint32_t times)
{
    return times_bf16x2((signs & 0x80008000) | (sizes & mask), times);
}

/* FP8, as f16: what multiplies the score goes to `scale`, a negative scale's sign, which is rare, to the
 * codes. NaN of a code stays. */
__device__ __forceinline__ void widen(uint32_t (&to)[STEPS][4], float (&scale)[2], key_words<FP8> &x)
{
    if (__any_sync(~0u, ((x.scale[0] | x.scale[1]) & 0x80000000) != 0)) {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            x.code[i % 2][i / 2] ^= (uint32_t)((int32_t)x.scale[i % 2] >> 31) & 0x80808080;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            to[i][h] = e4m3_f16x2(x.code[h][i], 0);
            to[i][h + 2] = e4m3_f16x2(x.code[h][i], 1);
        }
        scale[h] = __uint_as_float(x.scale[h] & 0x7fffffff);
    }
}

/* Codes that are multiplied as they are: two words of eight a step; a negative scale turns their signs. */
__device__ __forceinline__ void widen(uint32_t (&to)[STEPS / 2][4], float (&scale)[2],
                                      const key_words<CODES> &x)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t turned = (uint32_t)((int32_t)x.scale[h] >> 31) & 0x80808080;
#pragma unroll
        for (int i = 0; i < STEPS; i++) to[i / 2][h + i % 2 * 2] = x.code[h][i] ^ turned;
        scale[h] = __uint_as_float(x.scale[h] & 0x7fffffff);
    }
}

/* FP4: a thread's channels have one scale; the largest of the row multiplies the score, and the codes are
 * multiplied by the ratio of their own to it. */
__device__ __forceinline__ void widen(uint32_t (&to)[STEPS][4], float (&scale)[2], const key_words<FP4> &x)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) most = max(most, (int)(x.scale[h] >> i * 8 & 255));
        const int own = (int)(x.scale[h] >> lane % 4 * 8 & 255);
        const uint32_t times = e8m0_bf16x2(own - most + 253);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t word = x.code[h][i];
            to[i * 2][h] = widened(word << 12, word << 6, 0x01c001c0, times);
            to[i * 2][h + 2] = widened(word << 8, word << 2, 0x01c001c0, times);
            to[i * 2 + 1][h] = widened(word << 4, word >> 2, 0x01c001c0, times);
            to[i * 2 + 1][h + 2] = widened(word, word >> 6, 0x01c001c0, times);
        }
        scale[h] = most == 255 ? NAN : __uint_as_float(most == 0 ? 0x00400000 : most << 23);
    }
}

/* 16 rows from row0 on of a stage, and what multiplies their scores. */
template <typename T, key_kind KIND, int Q, int STAGES, int N>
__device__ __forceinline__ void read_keys(uint32_t (&to)[N][4], float (&scale)[2], const index_kernel &a,
                                          const key_feed &f, fed<T, KIND, Q, STAGES> &m, int stage, int row0)
{
    const int lane = threadIdx.x % 32;
    const uint32_t tile = stage_address(m.k, stage), here = m.here[stage];
    if constexpr (KIND == ROWS) {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            ldmatrix4(to[i], tile + tile_at<KEYS>(row0 + lane % 16, i * 2 + lane / 16));
        scale[0] = scale[1] = 1.0f;
    } else {
        key_words<KIND> x;
        read_words(x, tile, row0, f.planar);
        widen(to, scale, x);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int run = (row0 + lane / 4 + h * 8) >> f.run_shift;
        scale[h] = (here >> run & 1) != 0 ? scale[h] * a.scale : NAN; /* chosen last */
    }
}

} // namespace sm90_indexer

#endif
