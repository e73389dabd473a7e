/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* validate_lists.h - reports in the status word on what only the device can read: lists that were handed in,
 * and the offsets of `seqs`. */
#ifndef QUERN_STAGES_VALIDATE_LISTS_H
#define QUERN_STAGES_VALIDATE_LISTS_H

#include "stages/stage.h"

typedef struct validate_lists_args {
    stage_seqs seqs; /* cu_q: tokens; cu_kv: compressed rows where they are an input; n_kv: their bound */
    quern_tensor blocks, groups; /* i32 [B,Hs,rows,k], or absent */
    int64_t tile, select_block, block_size, stride;
} validate_lists_args;
STAGE_DECLARE(validate_lists);
#define VALIDATE_LISTS_TENSORS(IN, OUT, GRAD) STAGE_SEQS_TENSORS(IN) IN(blocks) IN(groups)
#define VALIDATE_LISTS_VALUES(F) STAGE_SEQS_VALUES(F) F(tile) F(select_block) F(block_size) F(stride)

#endif
