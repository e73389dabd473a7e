/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * select.h - top-k: for each tile of queries the k best blocks of tokens, by scores of the entries that stand
 * for them.
 *
 * A scorer gives a score to every entry that a tile's last query sees. A block's score is the sum of its
 * entries', each as often as it overlaps the block; under MEAN_LOGIT blocks are entries. Forced blocks are
 * chosen first. Ties go to the lowest index, NaN sorts last, lists rise and are padded with -1.
 */
#ifndef QUERN_STAGES_SELECT_H
#define QUERN_STAGES_SELECT_H

#include "stages/stage.h"

/* The rows of a tile: its queries' heads that share a list. */
typedef enum select_scorer {
    SELECT_PROBABILITY =
        0, /* sum over the rows of softmax(scale q . key), over the entries that the row sees */
    SELECT_MEAN_LOGIT = 1 /* scale (mean of the rows) . key */
} select_scorer;

/* What is chosen, and by which scores: of every stage that makes lists. Lengths count tokens. */
typedef struct select_rule {
    select_scorer scorer;
    list_scope scope;
    float scale;
    int64_t block_size, stride; /* of entries (stages/mask.h) */
    int64_t select_block;       /* of the blocks that are chosen */
    int64_t k;                  /* entries of a list of blocks */
    /* blocks: the first so many; where causal, as many up to the one of the tile's first query, and with
     * them all up to the one of its last query */
    int64_t forced_first, forced_local;
} select_rule;
#define SELECT_RULE_VALUES(F)                                                                                \
    F(rule.scorer)                                                                                           \
    F(rule.scope)                                                                                            \
    F(rule.scale)                                                                                            \
    F(rule.block_size) F(rule.stride) F(rule.select_block) F(rule.k) F(rule.forced_first) F(rule.forced_local)

typedef struct select_args {
    stage_seqs seqs; /* cu_q: tokens; cu_kv: entries */
    select_rule rule;
    bool causal;
    entry_visibility visibility;
    int64_t tile;    /* queries that share a list */
    int64_t group_k; /* entries of a list of groups: STAGE_GROUP_ENTRIES entries, by their mean score; where
                         causal,  the newest that the first query and the last query see are forced */
    quern_tensor q, keys;
    quern_tensor lse; /* PROBABILITY: of each row over the keys that it sees; absent: computed inside */
    quern_tensor blocks, count; /* i32 [B,Hs,rows,k], [B,Hs,rows]; either may be absent */
    quern_tensor groups;        /* i32 [B,Hs,rows,group_k], or absent */
} select_args;
STAGE_DECLARE(select);
#define SELECT_TENSORS(IN, OUT, GRAD)                                                                        \
    STAGE_SEQS_TENSORS(IN) IN(q) IN(keys) IN(lse) OUT(blocks) OUT(count) OUT(groups)
#define SELECT_VALUES(F) STAGE_SEQS_VALUES(F) SELECT_RULE_VALUES(F) F(causal) F(visibility) F(tile) F(group_k)

#endif
