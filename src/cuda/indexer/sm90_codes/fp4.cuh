/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fp4.cuh - FP4 keys, whose codes become bf16. A thread's channels have one scale; the largest of the row
 * multiplies the score, and the codes are multiplied by the ratio of their own to it. */
#ifndef QUERN_CUDA_INDEXER_SM90_CODES_FP4_CUH
#define QUERN_CUDA_INDEXER_SM90_CODES_FP4_CUH

#include "indexer/sm90_codes/bytes.cuh"

namespace sm90_indexer
{

/* Two codes, a half of a word each: their signs, their magnitudes in `mask`; times a power of two. */
__device__ __forceinline__ uint32_t widened(uint32_t signs, uint32_t sizes, uint32_t mask, uint32_t times)
{
    return times_bf16x2((signs & 0x80008000) | (sizes & mask), times);
}

struct fp4 : bytes<fp4, ENTRY_FP4>, plain_queries<bf16, fp4> {
    enum { STEPS = sm90_indexer::STEPS, Q_PANELS = PANELS, ONE_STAGES = 10 };

    /*
     * Stores eight channels of a query from c on. A thread's 32 codes of a key are channels 32 j ...
     * 32 j + 31 of lane j of four; in a step of 16 channels it has two at 2 j and two at 8 + 2 j. Those are,
     * in the order in which codes are widened, of eight 0 and 4, 1 and 5; in the next step 2 and 6, 3 and 7.
     */
    template <int TILE>
    static __device__ __forceinline__ void store_channels(char *tile, int row, int c, uint4 x)
    {
        const int lane = c / 32, step = c % 32 / 4;
        const uint32_t pair[4] = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                                  __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)(tile + tile_at<TILE>(row, (step + i / 2) * 2 + i % 2) + lane * 4) = pair[i];
    }

    static __device__ __forceinline__ void widen(uint32_t (&to)[STEPS][4], float (&scale)[2],
                                                 const key_words<ENTRY_FP4> &x)
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

    template <int TILE>
    static __device__ __forceinline__ void multiply(float (&c)[TILE / 8][4], const uint32_t (&keys)[STEPS][4],
                                                    uint32_t tile)
    {
        wg_rs_tile<bf16, TILE>(c, keys, tile);
    }
};

} // namespace sm90_indexer

#endif
