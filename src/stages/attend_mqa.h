/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_mqa.h - the arguments of the stage in which all query heads share one row per key, which is key
 * and value at once.
 *
 * A query's keys are the raw rows of its window and, of the entries that stand for `ratio` tokens each, the
 * visible ones: all, or those of its list. The i-th query of a sequence of n stands at `position` + i, the
 * j-th of m raw rows at `position` + n - m + j; entry s is visible from position (s + 1) ratio - 1 on.
 * Varlen batches ([1, T, ..], seqs.cu_q): without `positions` position is 0; raw rows are those of
 * seqs.cu_kv or, where that is absent, the queries' own; without a table a sequence of n has n / ratio
 * entries, sequence after sequence.
 *
 * Pages: row i of sequence b stands in slot i % page of page table[b, i / page] of a pool [pages, page, D
 * or bytes], or as bytes [pages, page row bytes], all slots' data before all slots' scales. Raw rows with a
 * table are numbered by position from 0 on. Raw rows or entries without a table are contiguous.
 */
#ifndef QUERN_STAGES_ATTEND_MQA_H
#define QUERN_STAGES_ATTEND_MQA_H

#include "stages/pool.h"
#include "stages/stage.h"

typedef struct attend_mqa_args {
    stage_seqs seqs; /* n_q: queries; n_kv: raw rows */
    int64_t window, ratio, position;
    float scale;
    entry_format format;                  /* of kv and entries: ENTRY_ROWS or ENTRY_ROW584 */
    int64_t page;                         /* slots of a page, where there is a table */
    quern_tensor positions;               /* i32 [B] in place of position, or absent */
    quern_tensor kv_table, entries_table; /* i32 [B, columns], or absent: contiguous */
    quern_tensor q, kv, entries;          /* [B,T,H,D], [B,N,D], [B,S,D] or absent */
    quern_tensor list, count; /* i32 [B,T,k] in any order, or absent: all visible; [B,T] or absent */
    quern_tensor sink;        /* f32 [H] or absent: logits that add to the denominator alone */
    quern_tensor cos_sin; /* [P,R] or absent: the output's last R channels are rotated back at its position */
    quern_tensor o, lse, lse_win; /* [B,T,H,D]; f32 [B,H,T] without the sink: of all keys, of the raw ones.
                                     lse_win may be absent */
    /* Backward, from o, lse and d_o; each gradient may be absent. */
    quern_tensor d_o, d_q, d_kv, d_entries, d_sink;
} attend_mqa_args;
STAGE_DECLARE(attend_mqa);
#define ATTEND_MQA_TENSORS(IN, OUT, GRAD)                                                                    \
    STAGE_SEQS_TENSORS(IN)                                                                                   \
    IN(positions)                                                                                            \
    IN(kv_table)                                                                                             \
    IN(entries_table)                                                                                        \
    IN(q)                                                                                                    \
    IN(kv) IN(entries) IN(list) IN(count) IN(sink) IN(cos_sin) OUT(o) OUT(lse) OUT(lse_win) IN(d_o)          \
        GRAD(d_q) GRAD(d_kv) GRAD(d_entries) GRAD(d_sink)
#define ATTEND_MQA_VALUES(F) STAGE_SEQS_VALUES(F) F(window) F(ratio) F(position) F(scale) F(format) F(page)

#endif
