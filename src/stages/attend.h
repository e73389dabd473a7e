/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.h - attention of queries over keys and values under a mask, forward and backward. */
#ifndef QUERN_STAGES_ATTEND_H
#define QUERN_STAGES_ATTEND_H

#include "stages/stage.h"

/* The backward recomputes P = exp(scale q . k - lse). lse is f32: where scores exceed some 2^23, its
 * rounding alone overflows the exponential. A backward therefore refuses a larger scale. */
enum { ATTEND_BACKWARD_SCALE_MOST = 65536 };

/* An lse in f32 is off by up to |lse| 2^-24, an error of the whole row's P, and where one key has nearly all
 * of P, dS is what the rounding of delta leaves. From this |lse| on, an eighth of f32 gradients' bound, a row
 * is coarse: its scores are computed twice, and the first time give its lse and delta. */
enum { ATTEND_LSE_COARSE = 20 };

typedef struct attend_args {
    attend_mask mask; /* which keys a query sees: stages/mask.h */
    stage_seqs seqs;
    bool causal;
    float scale;
    int64_t window;               /* RANGE; 0: none */
    int64_t query_offset;         /* RANGE; -1: n_kv - n_q. The other masks: queries stand at 0 ... n_q - 1 */
    int64_t block_size, stride;   /* COMPRESSED: l, d. BLOCKS: block_size is l' */
    entry_visibility visibility;  /* COMPRESSED */
    int64_t tile;                 /* queries that share a list (COMPRESSED with groups, BLOCKS) */
    list_scope scope;             /* of the list */
    quern_tensor list;            /* i32 [B,Hs,rows,k]; BLOCKS: blocks. COMPRESSED: groups, or absent */
    quern_tensor q, k, v, o, lse; /* COMPRESSED: k, v are k_cmp, v_cmp; varlen ones use seqs.cu_kv */
    quern_tensor sink; /* f32 [H] or absent: logits of the denominator alone; lse is without them */
    /* i32 [B] or absent; RANGE of fixed lengths. Keys kv_first ... kv_count - 1 of a sequence are its keys,
     * and stand at 0 ...; absent: 0, n_kv. */
    quern_tensor kv_first, kv_count;
    /* Backward only. Given: q, k, v, lse, d_o, delta. The gradient that reaches this branch is row_scale *
     * d_o, row by row (row_scale absent: 1), and delta = row_scale * rowsum(d_o * o). A backward may write
     * delta. d_q, d_k, d_v are f32 or the activations' dtype; with accumulate_* they are f32 and added to.
     * d_sink: f32 [H] or absent. */
    quern_tensor d_o, row_scale, delta; /* row_scale, delta: f32 [B,H,N], any strides */
    quern_tensor d_q, d_k, d_v, d_sink;
    bool accumulate_q, accumulate_k, accumulate_v;
} attend_args;
STAGE_DECLARE(attend);

/* Rows of at most this many keys have their delta recomputed from dP by a backward: overlapping entries
 * are alike, so dP - delta is small beside the rounding of o. 0: no row. */
static inline int64_t attend_few_keys(const attend_args *args)
{
    const bool all_entries = args->mask == ATTEND_COMPRESSED && args->list.ndim == 0;
    return all_entries ? 2 * (args->block_size / args->stride) + 1 : 0;
}
#define ATTEND_TENSORS(IN, OUT, GRAD)                                                                        \
    STAGE_SEQS_TENSORS(IN)                                                                                   \
    IN(list)                                                                                                 \
    IN(q)                                                                                                    \
    IN(k)                                                                                                    \
    IN(v) OUT(o) OUT(lse) IN(sink) IN(kv_first) IN(kv_count) IN(d_o) IN(row_scale) GRAD(delta) GRAD(d_q)     \
        GRAD(d_k) GRAD(d_v) GRAD(d_sink)
#define ATTEND_VALUES(F)                                                                                     \
    F(mask)                                                                                                  \
    STAGE_SEQS_VALUES(F)                                                                                     \
    F(causal)                                                                                                \
    F(scale)                                                                                                 \
    F(window) F(query_offset) F(block_size) F(stride) F(visibility) F(tile) F(scope) F(accumulate_q)         \
        F(accumulate_k) F(accumulate_v)

#endif
