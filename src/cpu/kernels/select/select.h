/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * select.h - selection on the CPU as inner functions: the scores of a run of tiles (select_score.c) and the
 * lists chosen from them (select_choose.c). Stages compose these.
 */
#ifndef QUERN_CPU_SELECT_H
#define QUERN_CPU_SELECT_H

#include "cpu/kernels/attend/attend.h"
#include "cpu/kernels/nsa_kernels.h"
#include "stages/block_index.h"

enum { SELECT_ROWS = 48, SELECT_KEYS = 128 };

typedef struct select_plan {
    const select_args *args;
    attend_args attend; /* the entries' mask over q and keys; attention.args points to it */
    attend_plan attention;
    const nsa_kernels *kernels;
    int64_t list_heads, hs, tile; /* hs: query heads that share a list */
    int64_t width;  /* floats of a tile's entry scores: one more than the entries, rounded up to 16 */
    int64_t blocks; /* most selection blocks of a sequence */
    int64_t tiles;  /* tiles of a task */
} select_plan;

/* A thread's scratch for running tasks. */
typedef struct select_scratch {
    attend_chunk chunk;               /* queries of up to SELECT_ROWS rows, or of a tile */
    float *mean;                      /* [tiles][dim]: mean_logit */
    float *s;                         /* [SELECT_ROWS][SELECT_KEYS] */
    float *lse2, *max, *sum, *shrink; /* [SELECT_ROWS] */
    int32_t *lo, *seen, *tile_hi;
    float *entries; /* [tiles][width] */
    float *scores;  /* [blocks + 16] */
    uint64_t *best;
    int32_t *chosen;
} select_scratch;

/* Never copy or move the plan: it points into itself. */
void select_plan_make(const stage_exec *exec, const select_args *args, select_plan *plan);
/* The keys in panels for the products. */
void *select_keys_carve(const select_plan *plan, arena *a);
void select_keys_pack(const stage_exec *exec, const select_plan *plan, void *keys);
void select_scratch_carve(const select_plan *plan, arena *a, select_scratch *s);

/* Fills scratch->entries for tiles [tile0, tile0 + count): the sum of probabilities or the mean logit of each
 * entry. */
void select_score(const select_plan *plan, const void *keys, int64_t b, int64_t list_head, int64_t tile0,
                  int64_t count, select_scratch *s);
/* Writes tile `tile`'s lists, row `row` of the lists, from its entry scores. */
void select_choose(const select_plan *plan, const attend_sequence *seq, int64_t list_head, int64_t tile,
                   int64_t row, float *entries, select_scratch *s);

/* Writes a list: blocks 0 ... first - 1, the `found` in `chosen`, which it sorts, blocks local ...
 * candidates - 1. Returns its length; -1 stands in the rest of k. */
static inline int32_t select_write_list(int64_t first, int32_t *chosen, int64_t found, int64_t local,
                                        int64_t candidates, int64_t k, int32_t *out)
{
    int64_t count = 0;
    attend_list_sort(chosen, found);
    for (int64_t j = 0; j < first; j++) out[count++] = (int32_t)j;
    for (int64_t i = 0; i < found; i++) out[count++] = chosen[i];
    for (int64_t j = local; j < candidates; j++) out[count++] = (int32_t)j;
    for (int64_t i = count; i < k; i++) out[i] = -1;
    return (int32_t)count;
}

/* The block indexer's list of a query at `position`, whose candidates are blocks 0 ... candidates - 1 with
 * these scores; they are not read where all find room. Room of min(k, candidates) in best and chosen. Returns
 * its length. */
int32_t select_index_list(const nsa_kernels *kernels, const index_rule *rule, const float *scores,
                          int64_t position, int64_t candidates, uint64_t *best, int32_t *chosen,
                          int32_t *out);

/* How many entries query `query` of a sequence sees. */
static inline int64_t select_seen(const select_plan *plan, const attend_sequence *seq, int64_t query)
{
    int64_t lo, hi;
    attend_interval(&plan->attend, seq, query, &lo, &hi);
    return hi;
}

#endif
