/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* codes.cuh - FP8 keys and queries that are rounded to FP8: codes are multiplied as they are, two words of
 * eight a step. */
#ifndef QUERN_CUDA_INDEXER_SM90_CODES_CODES_CUH
#define QUERN_CUDA_INDEXER_SM90_CODES_CODES_CUH

#include "indexer/sm90_codes/bytes.cuh"

namespace sm90_indexer
{

struct codes : bytes<codes, ENTRY_FP8>, scaled_queries<codes> {
    enum { STEPS = WIDTH / 32, Q_PANELS = 1, ONE_STAGES = 8 };
    enum { SLOTS = 26 }; /* there is room, and lists are cut meanwhile */

    /* Stores eight channels of a head from c on, as codes; returns their scale. Row -1: none that is stored.
     * In a step of 32 channels lane l of four has those at 4 l and at 16 + 4 l: eight of its 32. */
    template <int TILE>
    static __device__ __forceinline__ float store(const index_kernel &a, char *tile, int row, int c, uint4 x)
    {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        float v[8], most = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = index_finite(a, __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16));
            most = fmaxf(most, fabsf(v[i]));
        }
#pragma unroll
        for (int by = 1; by < 16; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
        const float scale = index_round_scale(most);
        if (row < 0) return scale;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *y = v + half * 4;
            const uint32_t codes = two_e4m3(__fdiv_rn(y[0], scale), __fdiv_rn(y[1], scale)) |
                                   (uint32_t)two_e4m3(__fdiv_rn(y[2], scale), __fdiv_rn(y[3], scale)) << 16;
            *(uint32_t *)(tile + tile_at<TILE>(row, c % 32 / 8 * 2 + half) + c / 32 * 4) = codes;
        }
        return scale;
    }

    /* A negative scale changes the codes' signs. */
    static __device__ __forceinline__ void widen(uint32_t (&to)[STEPS][4], float (&scale)[2],
                                                 const key_words<ENTRY_FP8> &x)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t sign = (uint32_t)((int32_t)x.scale[h] >> 31) & 0x80808080;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) to[i / 2][h + i % 2 * 2] = x.code[h][i] ^ sign;
            scale[h] = __uint_as_float(x.scale[h] & 0x7fffffff);
        }
    }

    template <int TILE>
    static __device__ __forceinline__ void multiply(float (&c)[TILE / 8][4], const uint32_t (&keys)[STEPS][4],
                                                    uint32_t tile)
    {
        const uint64_t heads = wg_fresh(wg_tile(tile, 0));
        wg_start();
        wgmma_rs_e4m3<TILE, false>(c, keys[0], heads);
#pragma unroll
        for (int i = 1; i < STEPS; i++) wgmma_rs_e4m3<TILE, true>(c, keys[i], wg_further(heads, i * 32));
        wg_commit();
    }
};

} // namespace sm90_indexer

#endif
