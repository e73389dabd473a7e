/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * indexer.h - the arguments of the stage that scores a query against all entries it sees and keeps the
 * best:
 *
 *   score[t,s] = scale sum_h w[t,h] max(0, q[t,h] . key[s]),   s < (position of t + 1) / ratio
 *
 * The scores go into the choice as they come; they are stored only where `scores` is present.
 *
 * Varlen batches, [1, T, ..] by `cu`, have positions and pages. Scores past a sequence's entries then stay
 * as they are.
 *
 * Rounded queries: each head is one row of FP8 (stages/pool.h), whose codes are multiplied by the keys' codes
 * and whose scale multiplies the head's weight. Keys are FP8, too.
 *
 * Pages: entry s of sequence b stands in slot s % page of page table[b, s / page] of a pool [pages, page, C
 * or bytes], or as bytes [pages, page row bytes], all slots' data before all slots' scales.
 */
#ifndef QUERN_STAGES_INDEXER_H
#define QUERN_STAGES_INDEXER_H

#include "stages/pool.h"
#include "stages/stage.h"

typedef struct indexer_args {
    int64_t ratio, position; /* tokens of an entry; where query 0 of every sequence stands */
    int64_t page;            /* slots of a page; 0: keys are contiguous */
    entry_format format;     /* of keys: ENTRY_ROWS, or bytes */
    bool rounded;            /* queries, to FP8 */
    float scale;
    quern_tensor cu;         /* i32 [B + 1]: a varlen batch; or absent */
    quern_tensor positions;  /* i32 [B] in place of position, or absent */
    quern_tensor table;      /* i32 [B, columns], with pages */
    quern_tensor q, keys, w; /* [B,T,H,C], [B,S,C or bytes], [B,T,H] */
    quern_tensor idx, count; /* i32 [B,T,k] ascending, then -1; [B,T] */
    quern_tensor scores;     /* f32 [B,T,S] or absent; -inf where an entry is not seen */
} indexer_args;
STAGE_DECLARE(indexer);
#define INDEXER_TENSORS(IN, OUT, GRAD)                                                                       \
    IN(cu) IN(positions) IN(table) IN(q) IN(keys) IN(w) OUT(idx) OUT(count) OUT(scores)
#define INDEXER_VALUES(F) F(ratio) F(position) F(page) F(format) F(rounded) F(scale)

#endif
