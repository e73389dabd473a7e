/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.h - a cache of keys and values inside the library: its kinds of rows (planes), what its memory
 * holds, and a call's batch as stages take it. */
#ifndef QUERN_CACHE_CACHE_H
#define QUERN_CACHE_CACHE_H

#include "core/op.h"

#include <quern/cache.h>

typedef enum cache_kind { CACHE_TOKENS, CACHE_ENTRIES, CACHE_SLC, CACHE_WIN, CACHE_KINDS } cache_kind;

/* What follows from the parameters. */
typedef struct cache_layout {
    quern_cache_params params;   /* defaults resolved; without compression its fields are 0 */
    int64_t blocks[CACHE_KINDS]; /* of a sequence, at most; 0: the cache has no such rows */
    int64_t column[CACHE_KINDS], columns;
    int64_t ring;        /* blocks of the ring */
    int64_t block_bytes; /* of one head */
    size_t memory_bytes, rows_bytes;
} cache_layout;

/* Tokens of a sequence, and the most it ever had. */
typedef struct cache_length {
    int64_t tokens, most;
} cache_length;

struct quern_cache {
    uint64_t magic;
    cache_layout layout;
    char *rows;
    cache_length *sequences;
    /* [pages]: the last writer, as sequence * columns + column, or -1. The sequence still owns the page
     * where it has tokens there and its table names the page there. claim: the same during a call. */
    int64_t *owner, *claim;
};

/* A call over a cache: an append, or attention of the newest tokens. What a cache holds is no tensor yet,
 * so it stands behind what is cleared when a call begins. */
typedef struct cache_call {
    op_call head;
    union {
        quern_attention_params dense;
        quern_nsa_params sparse;
        size_t size; /* of an append's: it has none */
    } params;
    _Alignas(op_step) char program[5 * OP_STEP_BYTES(cache_copy) + OP_STEP_BYTES(compress)];
    const quern_cache *cache;
    quern_cache_batch batch;
    int64_t tokens;
    bool appends;                      /* counts are new tokens, else tokens that are in the cache */
    quern_tensor slots, positions, cu; /* i32 [B], [B], [B + 1], symbolic: in the workspace */
    /* An append's. most: it is laid out for the most that the counts can need, wherever sequences stand. The
     * sums of the tokens of blocks that become whole, and of their entries; i32 as in stage_step, of both. */
    bool most;
    int64_t span_tokens, span_entries;
    quern_tensor cu_tokens, cu_entries, span_positions, new_positions, new_rows;
} cache_call;
_Static_assert(OP_STEP_BYTES(nsa_decode) <= sizeof(((cache_call *)NULL)->program), "a decode fits");

quern_status cache_layout_of(const quern_cache_params *params, cache_layout *layout);
quern_status cache_check(const quern_cache *cache);
/* Checks a sequence's number, and that a table is there where the cache has pages. */
quern_status cache_check_sequence(const quern_cache *cache, int64_t sequence, const char *name);
quern_status cache_check_table_given(const quern_cache *cache, const int32_t *table);
/* Compressed entries of n tokens. */
int64_t cache_entries(const cache_layout *layout, int64_t n);
/* Blocks of a kind that n tokens need. */
int64_t cache_blocks(const cache_layout *layout, cache_kind kind, int64_t n);
/* The rows of a kind as stages see them. */
cache_plane cache_plane_of(const quern_cache *cache, cache_kind kind, const int32_t *table);

/* In call.c: makes a batch the call's, which it checks. */
quern_status cache_take_batch(cache_call *call, const quern_cache *cache, const quern_cache_batch *given,
                              bool appends);
/* Checks that the pages of the batch's sequences are in the pool. */
quern_status cache_check_pages(const cache_call *call);
/* The same for one sequence of so many tokens. */
quern_status cache_check_table(const quern_cache *cache, int64_t sequence, int64_t tokens,
                               const int32_t *table);
/* Makes the sequences own the pages that an append writes, or refuses and changes nothing. */
quern_status cache_claim_pages(quern_cache *cache, const cache_call *call);

/* Tokens from ... to - 1 of a sequence are written. origin: the sequence whose rows they are, or -1. */
typedef struct cache_written {
    int64_t sequence, from, to, origin;
} cache_written;

/* Whether a block is full and stands in a page that both sequences name. */
bool cache_is_shared(const quern_cache *cache, const cache_written *w, const int32_t *table, cache_kind kind,
                     int64_t block);
/* Makes the sequence own the pages that are written, other than shared ones. */
quern_status cache_claim(quern_cache *cache, const cache_written *w, const int32_t *table);

/* ---- call.c: for the families of such calls ---- */

static inline const cache_call *cache_call_of(const op_call *call)
{
    return (const cache_call *)call;
}
static inline const quern_cache_params *cache_params_of(const op_call *call)
{
    return &cache_call_of(call)->cache->layout.params;
}
/* That tensor `first` [T, heads, dim] is there, of the cache's dtype and device, which become the call's. */
quern_status cache_find_like(op_call *call, int32_t first);
/* The tensors of decodes: q of the batch's tokens, and o. Sets DECODE_T ... DECODE_DV. */
typedef enum decode_symbol {
    DECODE_T = 1,
    DECODE_H,
    DECODE_D,
    DECODE_DV,
    DECODE_3,
    DECODE_HS,
    DECODE_K
} decode_symbol;
enum { DECODE_TENSORS = OP_TENSOR_COUNT(quern_decode_tensors) };
#define DD(field) OP_TENSOR(quern_decode_tensors, field)
extern const op_tensor cache_decode_tensors[DECODE_TENSORS];
quern_status cache_derive_decode(op_call *call);
quern_status cache_check_data(const op_call *call, void *const *data);
/* For build() and begin(): the call's step, and the rows of a kind. */
stage_step cache_step(op_build *b);
void cache_write_step(const op_call *call, const op_frame *frame);
cache_plane cache_steps_plane(const cache_call *call, cache_kind kind);

#endif
