/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.h - rows of keys and values that stand in blocks of 64 tokens, copies to and from them, and attention
 * of the newest tokens over them. */
#ifndef QUERN_STAGES_CACHE_H
#define QUERN_STAGES_CACHE_H

#include "stages/gate.h"
#include "stages/select.h"

enum { CACHE_BLOCK = 64 };

/* One kind of rows of all sequences: tokens, compressed entries, a branch's own tokens. A block holds 64 rows
 * of one head: keys [64, dim], then values [64, dim_v]. */
typedef struct cache_plane {
    char *data;
    int64_t dim, dim_v, kv_heads;
    /* bytes; with a table, block_step is that of a page and sequence_step 0 */
    int64_t sequence_step, head_step, block_step;
    const int32_t
        *table; /* block b of sequence s stands in page table[s * columns + b]; NULL: block b is the b-th */
    int64_t columns;
    int64_t ring; /* blocks of the ring; 0: no ring, rows stay */
    quern_dtype dtype;
} cache_plane;

static inline char *cache_block(const cache_plane *p, int64_t sequence, int64_t head, int64_t block)
{
    if (p->ring > 0) block %= p->ring;
    if (p->table != NULL) block = p->table[sequence * p->columns + block];
    return p->data + sequence * p->sequence_step + head * p->head_step + block * p->block_step;
}

/* Rows first ... first + count - 1 of a sequence are rows row ... row + count - 1 of the call's tensors. */
typedef struct cache_run {
    int64_t sequence, first, row, count;
} cache_run;

/* Copies runs between k, v [T, heads, dim] and a plane. */
typedef struct cache_copy_args {
    cache_plane plane;
    const cache_run *runs;
    int64_t count;
    quern_tensor k, v;
    bool from_cache;
} cache_copy_args;
STAGE_DECLARE(cache_copy);
#define CACHE_COPY_TENSORS(IN, OUT, GRAD) OUT(k) OUT(v)
#define CACHE_COPY_VALUES(F) F(plane) F(runs) F(count) F(from_cache)

/* Tokens of a sequence, and the most it ever had. */
typedef struct cache_length {
    int64_t tokens, most;
} cache_length;

/* Queries of `batch` sequences: the newest counts[i] tokens of sequences[i], which follow each other in the
 * call's tensors. Host memory. */
typedef struct cache_queries {
    int64_t batch;
    const int32_t *sequences;
    const int64_t *counts;
    const cache_length *lengths; /* of all sequences */
} cache_queries;

static inline cache_run cache_queries_at(const cache_queries *q, int64_t i, int64_t row)
{
    return (cache_run){q->sequences[i], q->lengths[q->sequences[i]].tokens - q->counts[i], row, q->counts[i]};
}

/* Dense attention of queries over all tokens of the plane up to them. */
typedef struct decode_args {
    cache_plane tokens;
    cache_queries queries;
    int64_t capacity; /* most tokens of a sequence */
    int64_t window;   /* 0: none */
    float scale;
    quern_tensor q, o, lse; /* [1, T, H, D]; lse f32 [1, H, T] or absent */
} decode_args;
STAGE_DECLARE(decode);
#define DECODE_TENSORS(IN, OUT, GRAD) IN(q) OUT(o) OUT(lse)
#define DECODE_VALUES(F) F(tokens) F(queries) F(capacity) F(window) F(scale)

/* The same over three branches, with their selection and gate. */
typedef struct nsa_decode_args {
    cache_plane plane[3]; /* compressed entries; tokens of the selected and of the window branch */
    cache_queries queries;
    int64_t capacity; /* most tokens of a sequence */
    int64_t window;
    float scale;
    /* as in the select stage, with tiles of one query */
    int64_t block_size, stride, select_block, k, forced_first, forced_local;
    select_scorer scorer;
    list_scope scope;
    uint32_t branches;
    gate_kind gate;
    quern_tensor q, o;                /* [1, T, H, D] */
    quern_tensor w_gate, gates;       /* as in the gate stage */
    quern_tensor blocks, block_count; /* [1, Hs, T, k]; the count may be absent */
} nsa_decode_args;
STAGE_DECLARE(nsa_decode);
#define NSA_DECODE_TENSORS(IN, OUT, GRAD) IN(q) OUT(o) IN(w_gate) OUT(gates) OUT(blocks) OUT(block_count)
#define NSA_DECODE_VALUES(F)                                                                                 \
    F(plane)                                                                                                 \
    F(queries)                                                                                               \
    F(capacity)                                                                                              \
    F(window)                                                                                                \
    F(scale) F(block_size) F(stride) F(select_block) F(k) F(forced_first) F(forced_local) F(scorer) F(scope) \
        F(branches) F(gate)

#endif
