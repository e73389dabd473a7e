/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * indexer_loss.h - the arguments of the stage that compares DeepSeek-V4's indexer with attention's weights,
 * and of its gradients. Query t, at position `position` + t, sees entries s < (position + t + 1) / ratio;
 * S_t are these, or those of them that its list names.
 *
 *   a[h,s] = scale q[t,h] . key[s],  L_h = log(sum over S_t of e^a + e^lse_win + e^sink),  p = e^(a - L)
 *   T = sum_h p / max(sum over S_t of sum_h p, 2^-126)                   the teacher
 *   I = scale_index sum_h w[t,h] relu(q_index[t,h] . key_index[s]),  P = softmax of I over S_t
 *   row_loss[t] = sum over S_t of T (log max(T, 1e-10) - log P)          0 where S_t is empty
 *   loss = lambda sum row_loss / max(1, rows),  rows: how many t have an entry
 *
 * and the gradients of loss by q_index, keys_index and w, the rest taken as given. Entries of a list have any
 * order, repeated ones count once, those out of range are skipped and flagged. The scores are not stored.
 */
#ifndef QUERN_STAGES_INDEXER_LOSS_H
#define QUERN_STAGES_INDEXER_LOSS_H

#include "stages/stage.h"

typedef struct indexer_loss_args {
    int64_t ratio, position;
    float scale, scale_index, lambda;
    quern_tensor q_index, keys_index, w; /* [B,T,Hi,C], [B,S,C], [B,T,Hi] */
    quern_tensor q, keys;                /* [B,T,H,D], [B,S,D] */
    quern_tensor lse_win;                /* f32 [B,H,T] */
    quern_tensor sink;                   /* f32 [H], or absent: -inf */
    quern_tensor list;                   /* i32 [B,T,k], or absent: all that is seen */
    /* Each may be absent. f32 [1], [B,T]; the gradients as q_index, keys_index and w. */
    quern_tensor loss, row_loss, d_q_index, d_keys_index, d_w;
} indexer_loss_args;
STAGE_DECLARE(indexer_loss);
#define INDEXER_LOSS_TENSORS(IN, OUT, GRAD)                                                                  \
    IN(q_index)                                                                                              \
    IN(keys_index)                                                                                           \
    IN(w)                                                                                                    \
    IN(q)                                                                                                    \
    IN(keys)                                                                                                 \
    IN(lse_win)                                                                                              \
    IN(sink) IN(list) OUT(loss) OUT(row_loss) OUT(d_q_index) OUT(d_keys_index) OUT(d_w)
#define INDEXER_LOSS_VALUES(F) F(ratio) F(position) F(scale) F(scale_index) F(lambda)

#endif
