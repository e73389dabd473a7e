/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.h - the sequences of a step (quern/ledger.h), for stages that read or write what a cache holds of
 * them, and copies and packed bytes of what stands in pages. */
#ifndef QUERN_STAGES_STEP_H
#define QUERN_STAGES_STEP_H

#include "stages/stage.h"

/* Sequence b of the call has its state in slot slots[b], or is none where that is -1. Its rows from
 * positions[b] on are rows[b, 0] ... rows[b, 1] - 1 of the call's tensors. A view of cu_seqlens [B + 1]
 * with one stride for both extents is such rows. On the call's device. */
typedef struct stage_step {
    quern_tensor slots;            /* i32 or i64 [B] */
    quern_tensor positions;        /* i32 [B] */
    quern_tensor rows;             /* i32 [B, 2] */
} stage_step;
#define STAGE_STEP_TENSORS(F) F(step.slots) F(step.positions) F(step.rows)

/* Copies pages, or states, before a step writes. */
typedef struct copy_pages_args {
    int64_t pool;        /* of copies, those whose first number this is; others have pages of their own */
    quern_tensor copies; /* i32 [C, 3]: pool, from, to */
    quern_tensor pages;  /* [pages, parts, n]; updated */
} copy_pages_args;
STAGE_DECLARE(copy_pages);
#define COPY_PAGES_TENSORS(IN, OUT, GRAD) IN(copies) OUT(pages)
#define COPY_PAGES_VALUES(F) F(pool)

/* Copies rows of one sequence between its pages and bytes. A page is `parts` times the data of `page` rows,
 * then as many scales. Packed are row after row, of each part the data, then the scales. */
typedef struct pack_rows_args {
    int64_t page, parts, data, scales; /* rows; parts of a page; bytes of a row in a part */
    int64_t first, count;              /* rows of the sequence */
    int64_t ring;                      /* columns of a ring; 0: rows stay */
    bool unpack;
    quern_tensor table;  /* i32 [columns] */
    quern_tensor pages;  /* [pages, parts, elements]; of one part, also [pages, elements] and the like */
    quern_tensor packed; /* u8 [bytes] */
} pack_rows_args;
STAGE_DECLARE(pack_rows);
#define PACK_ROWS_TENSORS(IN, OUT, GRAD) IN(table) OUT(pages) OUT(packed)
#define PACK_ROWS_VALUES(F)                                                                                  \
    F(page)                                                                                                  \
    F(parts)                                                                                                 \
    F(data)                                                                                                  \
    F(scales) F(first) F(count) F(ring) F(unpack)

#endif
