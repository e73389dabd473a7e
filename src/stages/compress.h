/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compress.h - blocks of tokens as entries: their mean, optionally projected, or a linear map; forward and
 * backward. */
#ifndef QUERN_STAGES_COMPRESS_H
#define QUERN_STAGES_COMPRESS_H

#include "stages/stage.h"

typedef enum compress_kind { COMPRESS_MEAN = 0, COMPRESS_LINEAR = 1, COMPRESS_GIVEN = 2 } compress_kind;

typedef struct compress_args {
    stage_seqs seqs; /* cu_q: tokens; cu_kv: compressed rows (an output where varlen) */
    compress_kind kind;
    int64_t block_size, stride;
    quern_tensor k, v, w_k, w_v, pe_k, pe_v;
    quern_tensor k_cmp, v_cmp;
    /* Backward: d_k_cmp, d_v_cmp (act or f32) in; d_k, d_v (accumulate: f32, added to), weights out. */
    quern_tensor d_k_cmp, d_v_cmp, d_k, d_v, d_w_k, d_w_v, d_pe_k, d_pe_v;
    bool accumulate;
} compress_args;
STAGE_DECLARE(compress);
#define COMPRESS_TENSORS(IN, OUT, GRAD)                                                                      \
    IN(seqs.cu_q)                                                                                            \
    OUT(seqs.cu_kv)                                                                                          \
    IN(k)                                                                                                    \
    IN(v) IN(w_k) IN(w_v) IN(pe_k) IN(pe_v) OUT(k_cmp) OUT(v_cmp) IN(d_k_cmp) IN(d_v_cmp) GRAD(d_k)          \
        GRAD(d_v) GRAD(d_w_k) GRAD(d_w_v) GRAD(d_pe_k) GRAD(d_pe_v)
#define COMPRESS_VALUES(F) STAGE_SEQS_VALUES(F) F(kind) F(block_size) F(stride) F(accumulate)

#endif
