/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* shared.cuh - the forward's tiles, its shared memory and its parameters. LISTED: keys are those of a list's
 * blocks, else a range. */
#ifndef QUERN_CUDA_ATTEND_SM90_FORWARD_SHARED_CUH
#define QUERN_CUDA_ATTEND_SM90_FORWARD_SHARED_CUH

#include "attend/sm90/rows.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"

namespace sm90_forward
{

using namespace attend_parts;

enum { STAGES = 2, PLANS = 2, MOST_LIST = 256, SEARCHERS = 2 };

struct maps {
    CUtensorMap q, k, v, o;
    int32_t heads; /* of a box of O, which has the 16 rows of a warp; 0: the threads store O themselves */
};

template <int DK, int DV, bool LISTED> struct shape {
    static constexpr int GROUPS = DK == 64 && DV == 64 ? 3 : 2, M = 64 * GROUPS,
                         KEYS = DK <= 192 && DV <= 128 ? 128
                                : LISTED               ? 64
                                                       : 80,
                         Q_STAGES = DK <= 128 && DV <= 128 ? 2 : 1;
    /* Registers a thread. */
    static constexpr int FEED = GROUPS == 3 ? 32 : 40, COMPUTE = GROUPS == 3 ? 160 : 232;
    static_assert(FEED + GROUPS * COMPUTE <= (GROUPS + 1) * (512 / (GROUPS + 1) / 8 * 8),
                  "more registers than a block is launched with: its warps would wait for them for ever");
    /* Whether warpgroups take turns at the tensor cores. Above 128 a tile's products take so much longer than
     * its softmax that these overlap anyway, and barriers cost 2%. */
    static constexpr bool TURNS = DK <= 128 || LISTED;
    /* Whether tiles that all rows see whole have a loop of their own, without a branch among the products:
     * ptxas then begins the softmax before P V has ended. At D 64 it has too few registers for that. */
    static constexpr bool WHOLES = DK > 64;
    /* Of ranges, Q stays in registers, which saves a fifth of what the products read of shared memory, and
     * the first tile of a piece may be half a tile. Lists gain nothing by either. The copy engine stores O
     * from its rows' place of Q. */
    static constexpr bool HELD = !LISTED && DK == 128 && DV <= 128, HALVES = !LISTED && KEYS == 128,
                          BULK = Q_STAGES == 2 && DV <= DK;
};

template <int DK, int DV, bool LISTED> struct __align__(1024) shared
{
    typedef shape<DK, DV, LISTED> sh;
    typedef uint16_t panel_row[64];
    panel_row q[sh::Q_STAGES][DK / 64][sh::M], k[STAGES][DK / 64][sh::KEYS], v[STAGES][DV / 64][sh::KEYS];
    ring<sh::Q_STAGES> queries;
    ring<STAGES> keys, values;
    stage_barriers<STAGES> searched;      /* V of a stage is finite */
    ring<PLANS> plans;                    /* of pieces, and their lists */
    int32_t nonfinite[STAGES][SEARCHERS]; /* a searcher found something in V */
    work plan[PLANS];
    int32_t list[LISTED ? PLANS : 1][LISTED ? MOST_LIST : 1], scratch[LISTED ? MOST_LIST : 1];

    /* One thread. */
    __device__ __forceinline__ void init()
    {
        queries.init(1, 4 * sh::GROUPS);
        keys.init(1, 4 * sh::GROUPS);
        values.init(1, 4 * sh::GROUPS + SEARCHERS);
        searched.init(SEARCHERS * WARP_ARRIVALS);
        plans.init(WARP_ARRIVALS, (1 + SEARCHERS + 4 * sh::GROUPS) * WARP_ARRIVALS);
        mbar_init_done();
    }

    /* Waits until V of a stage is searched; whether something was not finite. `parities`: those of the next
     * waits, a bit a stage. All lanes of a warp call; lane 0 frees V. */
    __device__ __forceinline__ bool wait_searched(int stage, uint32_t *parities)
    {
        searched.wait_next(stage, parities);
        const int found = (threadIdx.x & 31) == 0 ? nonfinite[stage][0] | nonfinite[stage][SEARCHERS - 1] : 0;
        return __shfl_sync(~0u, found, 0) != 0;
    }

    /* The plan of the block's n-th piece; it and its list stay until all have given it back. */
    __device__ __forceinline__ const work &wait_plan(int n)
    {
        const auto at = ring_place<PLANS>::of(n);
        plans.wait_full(at);
        return plan[at.stage];
    }
    __device__ __forceinline__ const int32_t *list_of(int n)
    {
        return list[0] + (LISTED ? n % PLANS * MOST_LIST : 0);
    }
    /* Each lane's, for what it read. */
    __device__ __forceinline__ void give_back_plan(int n)
    {
        plans.give_back(ring_place<PLANS>::of(n));
    }
};

} // namespace sm90_forward

#endif
