/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * block_index.h - the arguments of the stage that scores blocks of tokens by an indexer's own queries and
 * keys and keeps the best of every query:
 *
 *   score[t, head, J] = max over the tokens s <= p of block J of q[t, head] . key[s],   p the position of t
 *
 * Candidates are the blocks that begin at or before p. Forced blocks are chosen first: the first ones, and
 * those that end with the block of p. Ties go to the lowest index, NaN sorts last, lists rise and are padded
 * with -1. The scores of tokens are not stored.
 */
#ifndef QUERN_STAGES_BLOCK_INDEX_H
#define QUERN_STAGES_BLOCK_INDEX_H

#include "stages/stage.h"

/* Which blocks are always chosen, and how many. */
typedef struct index_rule {
    int64_t block_size; /* tokens */
    int64_t k;          /* entries of a list, at least the forced ones */
    int64_t forced_first, forced_local;
} index_rule;
#define INDEX_RULE_VALUES(F) F(rule.block_size) F(rule.k) F(rule.forced_first) F(rule.forced_local)

typedef struct block_index_args {
    stage_seqs seqs;
    index_rule rule;
    int64_t query_offset; /* position of query 0 of every sequence; -1: the last query is at the last key */
    quern_tensor q, keys; /* [B,N,Hs,D], [B,S,Hs,D], or [B,S,1,D] where all heads share their keys */
    quern_tensor blocks, count; /* i32 [B,Hs,rows,k], [B,Hs,rows]; count may be absent */
    quern_tensor scores;        /* f32 [B,Hs,N,blocks] or absent; -inf where a block is no candidate */
} block_index_args;
STAGE_DECLARE(block_index);
#define BLOCK_INDEX_TENSORS(IN, OUT, GRAD)                                                                   \
    STAGE_SEQS_TENSORS(IN) IN(q) IN(keys) OUT(blocks) OUT(count) OUT(scores)
#define BLOCK_INDEX_VALUES(F) STAGE_SEQS_VALUES(F) INDEX_RULE_VALUES(F) F(query_offset)

#endif
