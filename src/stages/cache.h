/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.h - rows of keys and values that stand in blocks of 64 tokens, copies to and from them, and attention
 * of the newest tokens over them. */
#ifndef QUERN_STAGES_CACHE_H
#define QUERN_STAGES_CACHE_H

#include "stages/block_index.h"
#include "stages/compress.h"
#include "stages/gate.h"
#include "stages/select.h"
#include "stages/step.h"

enum { CACHE_BLOCK = 64 };

/* One kind of rows: tokens, compressed entries, a branch's own tokens. A page holds 64 of them of each head:
 * keys [64, dim], then values [64, dim_v]. */
typedef struct cache_plane {
    quern_tensor blocks; /* [pages, heads, 64 (dim + dim_v)] */
    quern_tensor table;  /* i32 [B, columns]: the page of block b of a step's sequence */
    int64_t dim, dim_v;
    int64_t ring; /* blocks of the ring; 0: no ring, rows stay */
} cache_plane;
/* A block of the step's sequence b, once the views have addresses that the caller may read. */
static inline char *cache_block(const cache_plane *p, int64_t b, int64_t head, int64_t block)
{
    const quern_tensor *t = &p->blocks;
    if (p->ring > 0) block %= p->ring;
    const int64_t page =
        ((const int32_t *)p->table.data)[b * p->table.strides[0] + block * p->table.strides[1]];
    return (char *)t->data +
           (page * t->strides[0] + head * t->strides[1]) * (int64_t)quern_dtype_size(t->dtype);
}

/* Copies the rows of a step between k, v [T, heads, dim] and a plane. Where dim_v is 0, v is absent. */
typedef struct cache_copy_args {
    cache_plane plane;
    stage_step step;
    quern_tensor k, v;
    bool from_cache;
} cache_copy_args;
STAGE_DECLARE(cache_copy);
#define CACHE_COPY_TENSORS(IN, OUT, GRAD)                                                                    \
    OUT(plane.blocks) IN(plane.table) STAGE_STEP_TENSORS(IN) OUT(k) OUT(v)
#define CACHE_COPY_VALUES(F) F(plane.dim) F(plane.dim_v) F(plane.ring) F(from_cache)

/* Computes the entries that a step's tokens complete, which the tokens' plane holds already, by the compress
 * stage's rules: an entry has the bits that it gives it in the whole sequence. */
typedef struct cache_compress_args {
    cache_plane tokens, entries;
    stage_step step;
    int64_t most; /* tokens of the step, at most */
    compress_kind kind;
    int64_t block_size, stride;
    quern_tensor w_k, w_v, pe_k, pe_v;
} cache_compress_args;
STAGE_DECLARE(cache_compress);
#define CACHE_COMPRESS_TENSORS(IN, OUT, GRAD)                                                                \
    IN(tokens.blocks)                                                                                        \
    IN(tokens.table)                                                                                         \
    OUT(entries.blocks) IN(entries.table) STAGE_STEP_TENSORS(IN) IN(w_k) IN(w_v) IN(pe_k) IN(pe_v)
#define CACHE_COMPRESS_VALUES(F)                                                                             \
    F(tokens.dim)                                                                                            \
    F(tokens.dim_v)                                                                                          \
    F(tokens.ring)                                                                                           \
    F(entries.dim) F(entries.dim_v) F(entries.ring) F(most) F(kind) F(block_size) F(stride)

/* Dense attention of a step's tokens, which the plane holds already, over all tokens up to them. */
typedef struct decode_args {
    cache_plane tokens;
    stage_step step;
    int64_t capacity; /* most tokens of a sequence */
    int64_t window;   /* 0: none */
    float scale;
    quern_tensor q, o, lse; /* [1, T, H, D]; lse f32 [1, H, T] or absent */
    quern_tensor sink;      /* f32 [H] or absent: as attend's */
} decode_args;
STAGE_DECLARE(decode);
#define DECODE_TENSORS(IN, OUT, GRAD)                                                                        \
    IN(tokens.blocks) IN(tokens.table) STAGE_STEP_TENSORS(IN) IN(q) OUT(o) OUT(lse) IN(sink)
#define DECODE_VALUES(F) F(tokens.dim) F(tokens.dim_v) F(tokens.ring) F(capacity) F(window) F(scale)

/* The blocks of a step's tokens by the block indexer, whose keys the plane holds already: the lists that
 * block_index gives for the whole sequence. */
typedef struct index_decode_args {
    cache_plane keys; /* dim_v 0; of one head where all of q share their keys */
    stage_step step;
    int64_t capacity; /* most tokens of a sequence */
    index_rule rule;
    quern_tensor q;             /* [1, T, Hs, D_I] */
    quern_tensor blocks, count; /* i32 [1, Hs, T, k], [1, Hs, T]; count may be absent */
} index_decode_args;
STAGE_DECLARE(index_decode);
#define INDEX_DECODE_TENSORS(IN, OUT, GRAD)                                                                  \
    IN(keys.blocks) IN(keys.table) STAGE_STEP_TENSORS(IN) IN(q) OUT(blocks) OUT(count)
#define INDEX_DECODE_VALUES(F) F(keys.dim) F(keys.dim_v) F(keys.ring) F(capacity) INDEX_RULE_VALUES(F)

/* The same over three branches, with their selection and gate. Where lists are given, nothing is scored, and
 * without the compressed branch its plane is absent. */
typedef struct nsa_decode_args {
    cache_plane plane[3]; /* compressed entries; tokens of the selected and of the window branch */
    stage_step step;
    int64_t capacity; /* most tokens of a sequence */
    int64_t window;
    select_rule rule; /* with tiles of one query; its scale is that of all branches */
    uint32_t branches;
    bool listed;  /* blocks are read, ascending and -1 padded, not chosen */
    bool ungated; /* O is the sum of the branches */
    gate_kind gate;
    quern_tensor q, o;                /* [1, T, H, D] */
    quern_tensor w_gate, gates;       /* as in the gate stage */
    quern_tensor blocks, block_count; /* [1, Hs, T, k]; the count may be absent */
} nsa_decode_args;
STAGE_DECLARE(nsa_decode);
#define NSA_DECODE_TENSORS(IN, OUT, GRAD)                                                                    \
    IN(plane[0].blocks)                                                                                      \
    IN(plane[0].table)                                                                                       \
    IN(plane[1].blocks) IN(plane[1].table) IN(plane[2].blocks) IN(plane[2].table) STAGE_STEP_TENSORS(IN)     \
        IN(q) OUT(o) IN(w_gate) OUT(gates) OUT(blocks) OUT(block_count)
#define NSA_DECODE_VALUES(F)                                                                                 \
    F(plane[0].dim)                                                                                          \
    F(plane[0].dim_v)                                                                                        \
    F(plane[0].ring)                                                                                         \
    F(plane[1].dim)                                                                                          \
    F(plane[1].dim_v) F(plane[1].ring) F(plane[2].dim) F(plane[2].dim_v) F(plane[2].ring) F(capacity)        \
        F(window) SELECT_RULE_VALUES(F) F(branches) F(listed) F(ungated) F(gate)

#endif
