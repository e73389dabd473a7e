/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward.cuh - arguments and shared memory of the forward kernel: what its blocks pass to each other.
 *
 *   sum blocks   x, tile by tile      -> sums, a panel of channels a block
 *   mix blocks   sums of all panels   -> weights, eight tokens a warp
 *                x and f, a token     -> h and the new copies
 *
 * Counters in global memory say how far each has come. A block takes its role by a counter, too: whoever
 * waits for sums then waits for blocks that run already.
 */
#ifndef QUERN_CUDA_HYPER_SM90_FORWARD_CUH
#define QUERN_CUDA_HYPER_SM90_FORWARD_CUH

#include "hopper/group_ring.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "hyper/four/panel.cuh"
#include "hyper/four/weights.cuh"

namespace sm90_hyper_forward
{

enum {
    GROUPS = 3, /* warpgroups that compute; another one feeds them */
    GROUP_THREADS = 128,
    THREADS = (GROUPS + 1) * GROUP_THREADS,
    TOKENS = 64, /* of a tile: the rows of a product */
    BOX = 64,    /* channels: 128 bytes of each token */
    BOX_BYTES = TOKENS * BOX * 2,
    BOXES = 16,  /* of a panel: channels of all copies, one copy after the other */
    AT_ONCE = 2, /* boxes that a copy brings: a stage */
    STAGES = BOXES / AT_ONCE,
    PANEL_CHANNELS = BOXES * BOX,
    FN_ROWS = FN_PARTS * WEIGHTS,
    FN_BOX_BYTES = FN_ROWS * BOX * 2,
    COLUMNS = WEIGHTS + 1, /* products with fn, and the square */
    UNIT = 32 / COPIES,    /* tokens whose weights a warp makes */
    TILE_UNITS = TOKENS / UNIT,
    EACH_WIDTH = GROUP_THREADS * CHUNK /* channels of a group's threads, eight each */
};

struct forward_params : four_params {
    int32_t panels, shares, tiles, lag;
    int32_t *blocks, *units;           /* that have been taken */
    int32_t *summed, *weighed, *mixed; /* [tiles] panels; [units]; [tiles] tokens: that are done */
};

struct sum_shared {
    char fn[BOXES][FN_BOX_BYTES], x[STAGES][AT_ONCE][BOX_BYTES];
    stage_barriers<GROUPS * STAGES> full; /* of a stage of each group's tile: as group_ring's */
    stage_barriers<STAGES> free;
};

/* Of a stage of a block's tile number i. */
__device__ __forceinline__ ring_place<GROUPS * STAGES> full_at(int i, int stage)
{
    return {i % GROUPS * STAGES + stage, (uint32_t)(i / GROUPS) & 1};
}
__device__ __forceinline__ ring_place<STAGES> free_at(int i, int stage)
{
    return {stage, (uint32_t)i & 1};
}

/* EACH: a thread's chunks of a token; OUT: with f and the new copies. */
template <int EACH, bool OUT> struct mix_shared {
    enum { ROWS = COPIES + OUT, STAGES = EACH == 4 ? (OUT ? 5 : 6) : (OUT ? 2 : 3) };
    struct __align__(16) token
    {
        uint4 row[ROWS][EACH * GROUP_THREADS];
        float weights[WEIGHTS];
    }
    stage[STAGES];
    float norm[EACH * EACH_WIDTH];
    float parts[GROUPS][2][GROUP_THREADS / 32];
    group_ring<GROUPS, STAGES> tokens;
};

template <int EACH, bool OUT> constexpr size_t shared_bytes()
{
    return sizeof(mix_shared<EACH, OUT>) > sizeof(sum_shared) ? sizeof(mix_shared<EACH, OUT>)
                                                              : sizeof(sum_shared);
}
static_assert(shared_bytes<4, true>() <= 226 * 1024 && shared_bytes<8, false>() <= 226 * 1024,
              "a block has room");

__device__ __forceinline__ int group_of_thread()
{
    return (int)threadIdx.x / GROUP_THREADS - 1;
}

/* Waits until a counter has come to `count`. */
__device__ __forceinline__ void wait_count(const int32_t *counter, int32_t count)
{
    while (load_acquire(counter) < count) __nanosleep(50);
}

} // namespace sm90_hyper_forward

#endif
