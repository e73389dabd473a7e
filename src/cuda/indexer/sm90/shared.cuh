/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the indexer's scores and choice on Hopper, for 64 heads of 128 channels.
 *
 * A persistent block walks items of four queries; their Q stays in shared memory, keys stream past it.
 *
 *   feed     gathers Q, the weights and 128 keys a stage; codes are widened to bf16 on the way
 *   choose   a warp a query: appends the scores that beat its k-th best (topk.cuh)
 *   score    two warpgroups of 64 keys each: keys are the products' rows, heads of two queries their columns,
 *            so a score is a sum along a row. While ReLU, weight and sum of two queries run, the products of
 *            the other two do, or the other warpgroup's.
 *
 * Shared memory: Q 64 KB, keys 32 KB a stage, the rest for lists. Registers: two accumulators of 64 of 176.
 * Limit: 2 H C flops a pair over the tensor cores' rate, 2048 clocks for a stage and four queries; ReLU and
 * weight take a fourth of that.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_SHARED_CUH
#define QUERN_CUDA_INDEXER_SM90_SHARED_CUH

#include "indexer/params.cuh"
#include "hopper/ring.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_indexer
{

enum {
    QUERIES = 4,
    HEADS = 64,
    WIDTH = 128,
    PANELS = WIDTH / 64,
    KEYS = 128, /* of a stage */
    PANEL_BYTES = KEYS * 128,
    SLOTS = 4, /* of scores */
    THREADS = 512,
    FEW_REGISTERS = 80,
    MANY_REGISTERS = 176
};

/* With three stages there is less room for lists. */
constexpr int room_of(int stages)
{
    return stages == 3 ? 1600 : 2624;
}
/* The longest lists: between two cuts there are at least 256 appended scores, and a stage adds up to 128. */
constexpr int most_of(int stages)
{
    return room_of(stages) - 384;
}

template <typename T, int STAGES> struct shared {
    T k[STAGES][PANELS][KEYS][64];
    T q[QUERIES / 2][PANELS][2 * HEADS][64];
    float w[QUERIES][HEADS];
    float scale[STAGES][KEYS];
    float score[SLOTS][QUERIES][KEYS];
    uint32_t bins[QUERIES][BEST_BINS];
    uint32_t rank[QUERIES][room_of(STAGES)];
    int32_t index[QUERIES][room_of(STAGES)];
    ring<STAGES> keys;
    ring<SLOTS> scores;
    ring<1> queries;
};
enum { FILLERS = 2 * 128, SCORERS = 2 * 128, CHOOSERS = 128 };

/* Item `item`: the last queries, which see the most, come first. */
struct item_of {
    int b, query, stages; /* stages: of the keys that its last query sees */
};
__device__ __forceinline__ item_of item_at(const index_kernel &a, int item)
{
    const int groups = (a.queries + QUERIES - 1) / QUERIES, group = item / a.batch;
    item_of x = {item - group * a.batch, (groups - 1 - group) * QUERIES, 0};
    const int last = x.query + QUERIES < a.queries ? x.query + QUERIES - 1 : a.queries - 1;
    x.stages = (index_seen(a, x.b, last) + KEYS - 1) / KEYS;
    return x;
}

typedef quern_status instance(const stage_exec *exec, const index_kernel &a);
instance indexer_bf16, indexer_f16;

} // namespace sm90_indexer

#endif
