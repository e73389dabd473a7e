/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* products.cuh - a warpgroup's two products of attention's forward, on tiles of 64 columns a panel. */
#ifndef QUERN_CUDA_ATTEND_SM90_PRODUCTS_CUH
#define QUERN_CUDA_ATTEND_SM90_PRODUCTS_CUH

#include "common/mma.cuh"
#include "hopper/wgmma.cuh"

namespace attend_parts
{

/* Q of a warp's rows, from row0 on of the tile of M rows at `q`, as the operand of Q K^T. */
template <int DK, int M>
__device__ __forceinline__ void load_queries(uint32_t (&held)[DK / 16][4], uint32_t q, int row0)
{
#pragma unroll
    for (int i = 0; i < DK / 16; i++) load_a<M>(held[i], q, row0, i * 16, threadIdx.x & 31);
}

/* Begins S = Q K^T of the first TILES * 8 of a tile's KEYS keys. Q: `held` where HELD > 1, else the
 * warpgroup's rows at `q`, of a tile of M. */
template <typename T, int DK, int M, int KEYS, int TILES, int HELD>
__device__ __forceinline__ void multiply_queries(float (&s)[TILES][4], const uint32_t (&held)[HELD][4],
                                                 uint32_t q, uint32_t k)
{
    const uint64_t rows = wg_fresh(wg_tile(q, 0)), keys = wg_fresh(wg_tile(k, 0));
#pragma unroll
    for (int c = 0; c < DK; c += 16) {
        const uint64_t da = wg_further(rows, (c >> 6) * (M * 128) + (c & 63) * 2),
                       db = wg_further(keys, (c >> 6) * (KEYS * 128) + (c & 63) * 2);
        if constexpr (HELD > 1) {
            if (c == 0) wg_rs_wide<T, TILES * 8, false, false>(s, held[c / 16], db);
            else wg_rs_wide<T, TILES * 8, true, false>(s, held[c / 16], db);
        } else {
            if (c == 0) wg_ss_wide<T, TILES * 8, false>(s, da, db);
            else wg_ss_wide<T, TILES * 8, true>(s, da, db);
        }
    }
    wg_commit();
}

/* O += P V of a tile. */
template <typename T, int DV, int KEYS>
__device__ __forceinline__ void multiply_values(float (&o)[DV / 8][4], const uint32_t (&p)[KEYS / 16][4],
                                                uint32_t tile)
{
    const uint64_t v = wg_fresh(wg_tile(tile, KEYS * 128));
    wg_start();
#pragma unroll
    for (int c = 0; c < KEYS; c += 16) wg_rs_wide<T, DV, true, true>(o, p[c / 16], wg_further(v, c * 128));
    wg_commit();
}

} // namespace attend_parts

#endif
