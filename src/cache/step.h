/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.h - what the operations of a step over keys and values share: the step's tensors in their schemas,
 * extents and checks. */
#ifndef QUERN_CACHE_STEP_H
#define QUERN_CACHE_STEP_H

#include "core/op.h"

#include <quern/cache.h>

/* Tensors by their fields. */
#define DR(field) OP_TENSOR(quern_cache_tensors, field)
#define DD(field) OP_TENSOR(quern_decode_tensors, field)
#define DK(field) OP_TENSOR(quern_cache_pack_tensors, field)

/* Extents; an operation's own follow. */
typedef enum step_symbol {
    ST_T = 1,
    ST_HKV,
    ST_D,
    ST_DV,
    ST_PAGE, /* 64 (D + Dv) */
    ST_B,
    ST_B1,
    ST_PAGES,
    ST_COLUMNS,
    ST_ENTRY_PAGES,
    ST_ENTRY_COLUMNS,
    ST_WIN_PAGES,
    ST_WIN_COLUMNS,
    ST_H,
    ST_HS,
    ST_K,
    ST_3,
    ST_IN,
    ST_IN_V,
    ST_L,
    ST_COPIES,
    ST_COPY,
    ST_PACKED,
    ST_HI,
    ST_DI,
    ST_INDEX_PAGE /* 64 D_I */
} step_symbol;
extern const char step_symbols[];

/* The step's tensors, in the order of the public structs. */
enum {
    STEP_SLOTS,
    STEP_POSITIONS,
    STEP_CU,
    STEP_TOKENS,
    STEP_TOKENS_TABLE,
    STEP_SLC,
    STEP_ENTRIES,
    STEP_ENTRIES_TABLE,
    STEP_WIN,
    STEP_WIN_TABLE,
    STEP_TENSORS
};
#define STEP_POOL(field, pages)                                                                              \
    {                                                                                                        \
        field, field, OP_ACTIVATION, OP_NONE, {pages, ST_HKV, ST_PAGE},                                      \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }
#define STEP_TABLE(field, columns)                                                                           \
    {                                                                                                        \
        field, field, OP_I32, OP_NONE, {ST_B, columns},                                                      \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }
#define STEP_ROWS                                                                                            \
    {"slots", "slots", OP_I32, OP_NONE, {ST_B}, {0}},                                                        \
        {"positions", "positions", OP_I32, OP_NONE, {ST_B}, {0}},                                            \
        {"cu", "cu", OP_I32, OP_NONE, {ST_B1}, {0}}, STEP_POOL("tokens", ST_PAGES),                          \
        STEP_TABLE("tokens_table", ST_COLUMNS), STEP_POOL("slc", ST_PAGES),                                  \
        STEP_POOL("entries", ST_ENTRY_PAGES), STEP_TABLE("entries_table", ST_ENTRY_COLUMNS),                 \
        STEP_POOL("win", ST_WIN_PAGES), STEP_TABLE("win_table", ST_WIN_COLUMNS)
/* Keys of the block indexer, in pages that the tokens' table names; behind the structs' other fields. */
#define STEP_INDEX                                                                                           \
    {                                                                                                        \
        "index", "index", OP_ACTIVATION, OP_NONE, {ST_PAGES, ST_HI, ST_INDEX_PAGE},                          \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

/* Roles of the pools and tables that begin at tensor `tokens`. */
void step_pool_roles(op_call *call, int32_t tokens, bool entries, op_role of_pools);
/* Checks the step's tokens, in rows of tensor `rows` [T, heads, dim]. */
quern_status step_derive_rows(op_call *call, int32_t rows);
/* The channels of index keys: those of tensor `rows` [T, heads, D_I], where there is one, else from their
 * pool. */
quern_status step_derive_index(op_call *call, int32_t index, int32_t rows);
/* Extents that follow from the batch and the channels. */
void step_derive(op_call *call);
/* Tokens of a sequence, at most: a table may have more columns than there can be tokens. */
int64_t step_capacity(const op_call *call);
/* For build(). */
stage_step step_of(const op_build *b, int32_t slots);
cache_plane step_plane(const op_build *b, int32_t pool, int32_t table, bool ring);
cache_plane step_index_plane(const op_build *b, int32_t index, int32_t table);

/* The tensors of decodes, and their extents. */
enum { STEP_DECODE_TENSORS = OP_TENSOR_COUNT(quern_decode_tensors) };
extern const op_tensor step_decode_tensors[STEP_DECODE_TENSORS];
quern_status step_derive_decode(op_call *call);

/* For check_data(): the step's numbers, and the pages of `rows_of` rows of each sequence. */
typedef struct step_data {
    const op_call *call;
    void *const *data;
    int32_t slots; /* the tensor */
    const stage_step *step;
    int64_t block_size, stride; /* of entries; 0: there are none */
} step_data;
quern_status step_check(const step_data *s);
/* The offsets and positions of a step of any operation: rows is a view of ranges in cu. */
quern_status step_check_numbers(const stage_step *step, const int32_t *cu, const int32_t *positions,
                                int64_t batch, int64_t tokens);
/* The copies of a step: those in the pool of `args` are between its pages, or slots of states. */
quern_status step_check_copies(const copy_pages_args *args, const int32_t *copies);
/* A table of the step: that the pages of each sequence's rows of a kind are the pool's. */
quern_status step_check_table(const step_data *s, const cache_plane *plane, int32_t table, bool entries);
/* Of a call of pack_rows steps alone: that the tables name pages of the pools, before any is written. */
quern_status step_check_packed(const op_call *call, void *const *data);

#endif
