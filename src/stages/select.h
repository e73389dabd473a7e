/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select.h - per tile of queries the best blocks by the scores of their compressed entries, and the best
 * groups. */
#ifndef QUERN_STAGES_SELECT_H
#define QUERN_STAGES_SELECT_H

#include "stages/stage.h"

typedef enum select_metric { SELECT_SOFTMAX = 0, SELECT_MEAN_LOGIT = 1 } select_metric;

/* How blocks are scored and chosen. Lengths count tokens. */
typedef struct select_params {
    int64_t block_size, stride, select_block;
    int64_t num_selected, forced_first, forced_local, max_compressed_groups;
    int64_t tile;
    list_scope scope;
    select_metric metric;
    entry_visibility compressed_visibility;
    bool causal;
    float scale;
} select_params;

typedef struct select_args {
    stage_seqs seqs; /* cu_q: tokens; cu_kv: compressed rows */
    select_params params;
    quern_tensor q, k_cmp;
    quern_tensor lse_cmp; /* softmax metric: of the compressed branch, or absent */
    quern_tensor block_idx, block_count, group_idx; /* group_idx with max_compressed_groups > 0 */
    bool groups_given;
} select_args;
STAGE_DECLARE(select);
#define SELECT_TENSORS(F) STAGE_SEQS_TENSORS(F) F(q) F(k_cmp) F(lse_cmp) F(block_idx) F(block_count) F(group_idx)
#define SELECT_VALUES(F)                                                                                               \
    STAGE_SEQS_VALUES(F) F(params.block_size) F(params.stride) F(params.select_block) F(params.num_selected)           \
    F(params.forced_first) F(params.forced_local) F(params.max_compressed_groups) F(params.tile) F(params.scope)       \
    F(params.metric) F(params.compressed_visibility) F(params.causal) F(params.scale) F(groups_given)

#endif
