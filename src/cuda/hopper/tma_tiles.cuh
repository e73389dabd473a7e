/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tma_tiles.cuh - bulk copies as in tma.cuh, of a head's whole rows of 16-bit elements. In shared memory a
 * tile's panels of 64 columns lie behind one another. Where the tensor's rows are whole panels one copy takes
 * them all: each copy costs the thread that starts it, and the copy engine. */
#ifndef QUERN_CUDA_HOPPER_TMA_TILES_CUH
#define QUERN_CUDA_HOPPER_TMA_TILES_CUH

#include "hopper/tma.cuh"

struct tma_tiles {
    CUtensorMap map;
    int32_t at_once; /* panels that a copy takes */
};

/* Describes tiles of `rows` tokens by `panels` panels, of which the tensor may have fewer columns. */
quern_status tma_describe_tiles(tma_tiles *tiles, const quern_tensor &t, int rows, int panels);

/* Copies the tile of ROWS rows at (batch, token, head) to `to`; `bar` counts its bytes. One thread calls. */
template <int PANELS, int ROWS>
__device__ __forceinline__ void tma_load_tile(uint32_t to, const tma_tiles &t, uint32_t bar, int head,
                                              int token, int batch)
{
    for (int p = 0; p < PANELS; p += t.at_once)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                     "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to + p * ROWS * 128),
                     "l"(&t.map), "r"(bar), "r"(p * 64), "r"(head), "r"(token), "r"(0), "r"(batch)
                     : "memory");
}

#endif
