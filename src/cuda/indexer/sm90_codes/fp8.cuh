/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp8.cuh - FP8 keys, whose codes become f16 in one instruction a pair. So do the queries: a head times the
 * power of two that brings its largest channel to 2^14 and above, its weight over that. A channel below 2^-31
 * of the largest loses bits, less than 2^-39 of the largest; all others are exact.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_CODES_FP8_CUH
#define QUERN_CUDA_INDEXER_SM90_CODES_FP8_CUH

#include "indexer/sm90_codes/bytes.cuh"

namespace sm90_indexer
{

/* e4m3_f16x2(word, 1), for which ptxas needs no shift. */
__device__ __forceinline__ uint32_t upper_f16x2(uint32_t word)
{
    uint32_t halves;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(halves)
        : "r"(word));
    return halves;
}

struct fp8 : bytes<fp8, ENTRY_FP8>, scaled_queries<fp8> {
    enum { STEPS = sm90_indexer::STEPS, Q_PANELS = PANELS, ONE_STAGES = 8 };

    /*
     * Stores eight channels of a head from c on; returns what the weight is multiplied by. Row -1: none that
     * is stored. A thread's 32 codes of a key are channels 32 j ... 32 j + 31 of lane j of four; in a step of
     * 16 channels it has two at 2 j and two at 8 + 2 j. Those are four in a row, as codes are widened.
     */
    template <int TILE>
    static __device__ __forceinline__ float store(const index_kernel &, char *tile, int row, int c, uint4 x)
    {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        uint32_t most = 0, halves[4]; /* most: of the finite, the bits of bf16 */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t size = words[i / 2] >> i % 2 * 16 & 0x7fff;
            if (size < 0x7f80) most = max(most, size);
        }
#pragma unroll
        for (int by = 1; by < 16; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
        const uint32_t up = min(268 - (most >> 7), 253u); /* 141 - exponent, biased by 127 */
        if (row < 0) return 0.0f;
        const float times = __uint_as_float(up << 23);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float low = __uint_as_float(words[i] << 16) * times,
                        high = __uint_as_float(words[i] & 0xffff0000) * times;
            const __half2 two = __floats2half2_rn(low, high);
            halves[i] = *(const uint32_t *)&two;
        }
        const int lane = c / 32, step = c % 32 / 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)(tile + tile_at<TILE>(row, (step + i / 2) * 2 + i % 2) + lane * 4) = halves[i];
        return __uint_as_float((254 - up) << 23);
    }

    /* The scale's magnitude multiplies the score; its sign, rarely negative, goes to the codes. NaN of a code
     * stays. */
    static __device__ __forceinline__ void widen(uint32_t (&to)[STEPS][4], float (&scale)[2],
                                                 key_words<ENTRY_FP8> &x)
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
                to[i][h + 2] = upper_f16x2(x.code[h][i]);
            }
            scale[h] = __uint_as_float(x.scale[h] & 0x7fffffff);
        }
    }

    template <int TILE>
    static __device__ __forceinline__ void multiply(float (&c)[TILE / 8][4], const uint32_t (&keys)[STEPS][4],
                                                    uint32_t tile)
    {
        wg_rs_tile<__half, TILE>(c, keys, tile);
    }
};

} // namespace sm90_indexer

#endif
