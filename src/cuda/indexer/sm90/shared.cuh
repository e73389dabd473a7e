/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the indexer's scores and choice on Hopper, for 64 heads of 128 channels.
 *
 * A persistent block walks items: the keys, or a share of them (sm90_plan), of four queries. These stay in
 * shared memory, keys stream past them by bulk copies.
 *
 *   feed     one warp copies 128 keys a stage, three bring the queries and weights
 *   score    keys are the products' rows, in registers; heads are their columns, so a score is a sum along a
 *            row. A warpgroup has 64 keys of a stage, and two accumulators of two queries: while ReLU, weight
 *            and sum of one run, the products of the other do
 *   choose   a warp a query appends the scores that beat its k-th best (topk.cuh)
 *
 * A type of keys K says how they are copied, read into registers and multiplied, and how queries are stored
 * for that: rows.cuh has rows of 16 bits, sm90_codes those of bytes.
 *
 * Limit: 2 H C flops a pair over the tensor cores' rate, 2048 clocks for a stage and four queries, of which
 * ReLU and weight take a fourth of the issue slots.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_SHARED_CUH
#define QUERN_CUDA_INDEXER_SM90_SHARED_CUH

#include "hopper/products.cuh"
#include "indexer/sm90_plan/plan.cuh"

namespace sm90_indexer
{

/* Steps of a product, panels of a row; threads that bring queries and that choose; a stage's warps that score
 * it, and threads that have a score of each of its queries. */
enum { STEPS = WIDTH / 16, PANELS = WIDTH / 64 };
enum { Q_FILLERS = 96, CHOOSERS = 128, KEY_USERS = KEYS / 16, SCORE_GIVERS = KEYS };

/* Heads of one query that a thread has asked for, before it stores them; none of several queries. */
template <int Q> struct raw_heads {
};
template <> struct raw_heads<1> {
    uint4 of[(HEADS * WIDTH / 8 + Q_FILLERS - 1) / Q_FILLERS][Q_FILLERS];
};

/* What the feed fills, of Q queries a tile. */
template <typename K, int Q, int STAGES> struct fed {
    static constexpr int ROUNDS = Q == 1 ? 2 : 1, /* of queries */
        TILE = Q == 1 ? HEADS : 2 * HEADS, TILES = Q == 1 ? 1 : Q / 2;
    alignas(1024) char k[STAGES][K::STAGE_BYTES];
    alignas(1024) typename K::query q[ROUNDS][TILES][K::Q_PANELS][TILE][64];
    float w[ROUNDS][Q][HEADS];
    uint32_t here[STAGES]; /* which runs of a stage there are */
    item_of item[ROUNDS];  /* of one query a tile, whose; stages 0: there are no more */
    raw_heads<Q> raw;
    ring<STAGES> keys;
    ring<ROUNDS> queries;
};

/* The longest list for a room: a cut may keep SPARE more, and 256 are appended at most before the next. */
enum { SPARE = 128 };
constexpr int most_of(int room)
{
    return room - 384;
}
template <typename K, int STAGES> struct shared : fed<K, MOST_QUERIES, STAGES> {
    static constexpr int ROOM = STAGES == K::STAGES ? K::ROOM : K::LONG_ROOM;
    float score[K::SLOTS][MOST_QUERIES][KEYS]; /* while a list is cut they wait */
    uint32_t rank[MOST_QUERIES][ROOM];
    int32_t index[MOST_QUERIES][ROOM];
    ring<K::SLOTS> scores;
};

typedef quern_status instance(const stage_exec *exec, plan &p, const share_lists &lists);
instance indexer_bf16, indexer_f16, indexer_fp8, indexer_fp4, indexer_codes;

} // namespace sm90_indexer

#endif
