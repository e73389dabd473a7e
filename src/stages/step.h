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
    quern_tensor slots;     /* i32 or i64 [B] */
    quern_tensor positions; /* i32 [B] */
    quern_tensor rows;      /* i32 [B, 2] */
} stage_step;
#define STAGE_STEP_TENSORS(F) F(step.slots) F(step.positions) F(step.rows)

/*
 * Which sequences of a step run, and where their tokens stand. A layer's raw rows stand in rings of `ring`
 * rows, a page a sequence, its entries of `ratio` tokens in pages of `page` slots.
 *
 * A sequence of which a number is wrong does not run, and sets its bit: of its slot, its positions (those
 * that the states' `merged` rows allow, up to `most` tokens), its pages. With `fault` the bit is or-ed into
 * fault[slot], too, and a sequence whose fault is set does not run until it begins at position 0, which
 * clears it. Without `fault` the CPU's stage then fails. The results are safe to follow in any case.
 */
typedef struct step_tokens_args {
    int64_t ratio, page, pages; /* ratio 0: there are no entries */
    int64_t ring, raw_pages;
    int64_t rollback; /* rows that the rings of the states hold */
    int64_t most;     /* tokens of a sequence */
    int64_t slot_count;
    stage_step step;
    quern_tensor merged, merged_index; /* i32 [slots], or absent */
    quern_tensor raw_table, table;     /* i32 [B, 1], [B, columns]; table absent without entries */
    quern_tensor fault;                /* i32 [slots], updated; or absent */
    /* Written. A sequence that does not run has slot -1, starts at 0 and has page 0 everywhere. */
    quern_tensor cu;               /* i32 [B + 1]: the step's offsets */
    quern_tensor slots, positions; /* i32 [B]; positions: the step's, made positive */
    quern_tensor starts;           /* i32 [B]: positions of those that run */
    quern_tensor pages_of, raw_of; /* i32 [B, columns], [B]: tables in which each page is the pool's */
    quern_tensor at;               /* i32 [T]: a token's position */
    /* For states that are copied before they are changed, or absent: i32 [B], the number of a sequence that
     * runs, else -1; i64 [B, 3], the run of copy_rows from its slot to row b. */
    quern_tensor own, copied;
} step_tokens_args;
STAGE_DECLARE(step_tokens);
#define STEP_TOKENS_TENSORS(IN, OUT, GRAD)                                                                   \
    STAGE_STEP_TENSORS(IN)                                                                                   \
    IN(merged)                                                                                               \
    IN(merged_index)                                                                                         \
    IN(raw_table)                                                                                            \
    IN(table)                                                                                                \
    OUT(fault)                                                                                               \
    OUT(cu) OUT(slots) OUT(positions) OUT(starts) OUT(pages_of) OUT(raw_of) OUT(at) OUT(own) OUT(copied)
#define STEP_TOKENS_VALUES(F) F(ratio) F(page) F(pages) F(ring) F(raw_pages) F(rollback) F(most) F(slot_count)

/*
 * Where the rows of a step go. The call has its raw rows side by side: of each sequence up to `window` - 1
 * old ones from its ring, then the step's. Entries that become whole stand in order of the sequences, also of
 * those that do not run.
 */
typedef struct step_places_args {
    int64_t ratio, page, ring, window;
    stage_step step; /* step_tokens': slots, positions */
    quern_tensor raw_of, pages_of;
    /* written */
    quern_tensor slots;       /* i32 [B]: those of the step, -1 for sequences without tokens */
    quern_tensor cu_raw;      /* i32 [B + 1]: of the call's raw rows */
    quern_tensor raw_slots;   /* i64 [T]: a token's row among these; -1: none */
    quern_tensor entry_slots; /* i64 [n]: page * `page` + slot, or -1; absent without entries */
    quern_tensor first_entry; /* i32 [B]: a sequence's first of these; absent without entries */
    quern_tensor old, kept;   /* i64 [2 B, 3]: runs of copy_rows from the rings, and back to them */
    quern_tensor returned;    /* i64 [B, 3]: of states, from row b to the slot; or absent */
} step_places_args;
STAGE_DECLARE(step_places);
#define STEP_PLACES_TENSORS(IN, OUT, GRAD)                                                                   \
    STAGE_STEP_TENSORS(IN)                                                                                   \
    IN(raw_of)                                                                                               \
    IN(pages_of)                                                                                             \
    OUT(slots)                                                                                               \
    OUT(cu_raw) OUT(raw_slots) OUT(entry_slots) OUT(first_entry) OUT(old) OUT(kept) OUT(returned)
#define STEP_PLACES_VALUES(F) F(ratio) F(page) F(ring) F(window)

/*
 * Looks through the new rows of a step. A sequence of which one is not finite stops, as in step_tokens: none
 * of its rows go anywhere, and its state does not return. step_places has left it a place among the call's
 * raw rows, whose step's rows nobody writes then.
 */
typedef struct step_check_args {
    int64_t ratio;
    stage_step step;                  /* step_tokens': slots, positions */
    quern_tensor first_entry;         /* i32 [B], or absent */
    quern_tensor rows, entries, keys; /* f32 [T, D], [n, D], [n, C], or absent */
    /* updated, where a sequence stops */
    quern_tensor fault;                  /* i32 [slots] */
    quern_tensor slots;                  /* i32 [B]: to -1 */
    quern_tensor raw_slots, entry_slots; /* i64 [T], [n]: to -1; entry_slots may be absent */
    quern_tensor kept, returned;         /* i64 [2 B, 3], [B, 3]: runs of no rows; returned may be absent */
} step_check_args;
STAGE_DECLARE(step_check);
#define STEP_CHECK_TENSORS(IN, OUT, GRAD)                                                                    \
    STAGE_STEP_TENSORS(IN)                                                                                   \
    IN(first_entry)                                                                                          \
    IN(rows)                                                                                                 \
    IN(entries)                                                                                              \
    IN(keys)                                                                                                 \
    OUT(fault) OUT(slots) OUT(raw_slots) OUT(entry_slots) OUT(kept) OUT(returned)
#define STEP_CHECK_VALUES(F) F(ratio)

/* Writes 0 to rows of a step's results that belong to no sequence that runs: those of the others, and those
 * behind the last. */
typedef struct clear_rows_args {
    int64_t ratio; /* 0: a row a token; else a row an entry that becomes whole */
    stage_step step;
    quern_tensor out; /* [rows, heads, C] */
} clear_rows_args;
STAGE_DECLARE(clear_rows);
#define CLEAR_ROWS_TENSORS(IN, OUT, GRAD) STAGE_STEP_TENSORS(IN) OUT(out)
#define CLEAR_ROWS_VALUES(F) F(ratio)

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
