/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* check.h - reports on what only the device can read: lists that were handed in, and the offsets of `seqs`. */
#ifndef QUERN_STAGES_CHECK_H
#define QUERN_STAGES_CHECK_H

#include "stages/stage.h"

typedef struct check_args {
    stage_seqs seqs;             /* cu_q: tokens; cu_kv: compressed rows where they are an input; n_kv: their bound */
    quern_tensor blocks, groups; /* i32 [B,Hs,rows,k], or absent */
    int64_t tile, select_block, block_size, stride;
    quern_tensor status; /* i32 [1]; QUERN_STATUS_* are or-ed in */
} check_args;
STAGE_DECLARE(check);
#define CHECK_TENSORS(F) STAGE_SEQS_TENSORS(F) F(blocks) F(groups) F(status)
#define CHECK_VALUES(F) STAGE_SEQS_VALUES(F) F(tile) F(select_block) F(block_size) F(stride)

#endif
