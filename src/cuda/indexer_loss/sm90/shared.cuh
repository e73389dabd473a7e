/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - shared memory of a block of `pairs`: QUERIES queries that walk the same entries. A stage of
 * the ring has 128 channels of 128 entries, 32 KB: of keys, D / 128 stages a tile, or of keys_index. Heads
 * of q follow the struct, 16 KB a query and 128 channels.
 *
 * With lists a block has one query and an SM two blocks, as the rows of a list serve one query alone; of
 * dense calls two queries share each tile. Where D is above 128 a block has one. Registers: two
 * accumulators of 64 x 128, 128 a thread, of 216 or 232.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_SHARED_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_SHARED_CUH

#include "hopper/ring.cuh"
#include "hopper/wgmma.cuh"
#include "indexer_loss/sm90/params.cuh"

namespace sm90_loss
{

enum {
    FEEDERS = 128,
    FEED_REGISTERS = 40,
    HEAD_PANEL = HEADS * 128,  /* bytes of 64 channels of heads */
    ENTRY_PANEL = TILE * 128,  /* of a tile of entries */
    SUM_KINDS = 2,             /* the teacher's and the student's */
    COLUMN_TILES = TILE / 8
};

template <int QUERIES, int STAGES> struct shared {
    bf16 stages[STAGES][WIDTH / 64][TILE][64];
    bf16 q_index[QUERIES][WIDTH / 64][HEADS][64];
    float sums[QUERIES][2][SUM_KINDS][4][TILE]; /* over a warp's heads; of a tile and the one before it */
    float mass[QUERIES][HEADS];
    float parts[QUERIES][2][4];
    ring<STAGES> entries;
    stage_barriers<1> heads_full;
};

/* Where the heads of q stand. */
template <int QUERIES, int STAGES> static constexpr size_t heads_at()
{
    return (sizeof(shared<QUERIES, STAGES>) + 1023) / 1024 * 1024;
}

} // namespace sm90_loss

#endif
