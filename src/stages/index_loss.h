/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * index_loss.h - the arguments of the stage that compares a block indexer's scores with attention's weights,
 * and of its gradients. Over the tokens s <= p of the blocks that list j names for query t, p the position of
 * t:
 *
 *   T = mean over the heads h of list j of softmax(scale q_h . key_s)         the teacher
 *   P = softmax(scale_index q_index[t,j] . key_index[s])                      the student
 *   row_loss[t,j] = sum_s T (log max(T, 1e-10) - log P)                       0 without a token
 *   loss = lambda sum row_loss / (Hs max(1, rows)),  rows: how many t have a token in some list
 *   d_q_index = scale_index sum_s g key_index[s], d_keys_index[s] = scale_index sum g q_index, where
 *   g = lambda (P - T) / (Hs max(1, rows))
 *
 * Entries of the lists have any order, repeated ones count once, those out of range are skipped and flagged.
 * The scores are not stored.
 */
#ifndef QUERN_STAGES_INDEX_LOSS_H
#define QUERN_STAGES_INDEX_LOSS_H

#include "stages/stage.h"

typedef struct index_loss_args {
    stage_seqs seqs;      /* cu_q: queries; cu_kv: keys */
    int64_t block_size;   /* tokens */
    int64_t query_offset; /* position of query 0 of every sequence; -1: the last query is at the last key */
    float scale, scale_index, lambda;
    quern_tensor list;                /* i32 [B,Hs,rows,k] */
    quern_tensor q_index, keys_index; /* [B,N,Hs,D_I], [B,S,Hs,D_I] or, shared by all lists, [B,S,1,D_I] */
    quern_tensor q, keys;             /* [B,N,H,D], [B,S,Hs,D] */
    quern_tensor lse;                 /* f32 [B,H,N] of the teacher's scores, or absent: computed */
    /* Each may be absent. f32 [1], [B,Hs,rows]; the gradients as q_index and keys_index. */
    quern_tensor loss, row_loss, d_q_index, d_keys_index;
} index_loss_args;
STAGE_DECLARE(index_loss);
#define INDEX_LOSS_TENSORS(IN, OUT, GRAD)                                                                    \
    STAGE_SEQS_TENSORS(IN)                                                                                   \
    IN(list)                                                                                                 \
    IN(q_index)                                                                                              \
    IN(keys_index)                                                                                           \
    IN(q)                                                                                                    \
    IN(keys) IN(lse) OUT(loss) OUT(row_loss) OUT(d_q_index) OUT(d_keys_index)
#define INDEX_LOSS_VALUES(F)                                                                                 \
    STAGE_SEQS_VALUES(F) F(block_size) F(query_offset) F(scale) F(scale_index) F(lambda)

#endif
