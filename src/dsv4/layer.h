/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer.h - the whole layer: its tensors, extents and calls.
 *
 * A call is composed from stages twice by the same functions: once while it is planned, which sizes the
 * workspace, and once to run. Between both, a pass takes the same rooms from the workspace in the same order.
 */
#ifndef QUERN_DSV4_LAYER_INTERNAL_H
#define QUERN_DSV4_LAYER_INTERNAL_H

#include "core/op.h"

#include <quern/dsv4_layer.h>

typedef enum dsv4_layer_op { DSV4_LAYER, DSV4_LAYER_BACKWARD, DSV4_LAYER_OPS } dsv4_layer_op;

/* In the order of quern_dsv4_layer_tensors. */
typedef enum dsv4_layer_tensor {
    DL_X,
    DL_COS_SIN,
    DL_SINKS,
    DL_Q_A,
    DL_Q_A_NORM,
    DL_Q_B,
    DL_KV,
    DL_KV_NORM,
    DL_O_A,
    DL_O_B,
    DL_COMPRESSOR, /* bias, values, gate, norm */
    DL_COMPRESSOR_KV,
    DL_COMPRESSOR_GATE,
    DL_COMPRESSOR_NORM,
    DL_INDEXER, /* the same */
    DL_INDEXER_KV,
    DL_INDEXER_GATE,
    DL_INDEXER_NORM,
    DL_INDEXER_Q_B,
    DL_INDEXER_HEADS,
    DL_OUT,
    DL_Q_RESIDUAL,
    DL_Q,
    DL_KV_ROWS,
    DL_COMPRESSED,
    DL_IDX_K,
    DL_IDX_Q,
    DL_IDX_SCORE,
    DL_IDX_TOPK,
    DL_CORE,
    DL_CORE_IROPE,
    DL_O_A_OUT,
    DL_D_OUT,
    DL_D_X,
    DL_D_SINKS,
    DL_D_Q_A,
    DL_D_Q_A_NORM,
    DL_D_Q_B,
    DL_D_KV,
    DL_D_KV_NORM,
    DL_D_O_A,
    DL_D_O_B,
    DL_D_COMPRESSOR,
    DL_D_COMPRESSOR_KV,
    DL_D_COMPRESSOR_GATE,
    DL_D_COMPRESSOR_NORM,
    DL_COMPRESSOR_FP8, /* scales; NVFP4: codes, scales, global */
    DL_COMPRESSOR_FP8_SCALES,
    DL_COMPRESSOR_CODES,
    DL_COMPRESSOR_SCALES,
    DL_COMPRESSOR_GLOBAL,
    DL_INDEXER_FP8, /* the same */
    DL_INDEXER_FP8_SCALES,
    DL_INDEXER_CODES,
    DL_INDEXER_SCALES,
    DL_INDEXER_GLOBAL,
    DSV4_LAYER_TENSORS
} dsv4_layer_tensor;

/* Extents. */
typedef enum dsv4_layer_symbol {
    LS_T = 1, /* of a sequence, or of a decoding call */
    LS_IN,
    LS_Q_LORA,
    LS_H,
    LS_D,
    LS_HD,
    LS_G,
    LS_GROUP, /* H / G D */
    LS_O_LORA,
    LS_GO,
    LS_R,
    LS_SERIES, /* mD */
    LS_S,
    LS_HI,
    LS_CI,
    LS_2CI,
    LS_HICI,
    LS_SCORES, /* columns of idx_score */
    LS_K,
    LS_P,
    LS_ROPE,
    LS_PROJ, /* 2mD */
    LS_PROJ_BLOCKS,
    LS_4CI,
    LS_4CI_BLOCKS,
    LS_IN_BLOCKS,
    LS_IN_BYTES,
    LS_IN_SCALES
} dsv4_layer_symbol;
enum { LL_TOKENS = OP_LEAD, LL_BATCH = OP_LEAD + 1 }; /* B T, or T; B, or nothing */

/* A sequence of a cache. */
typedef struct layer_sequence {
    int64_t tokens, held; /* how many of the last ones can be taken back */
    int64_t raw;          /* raw rows that are there, the last of the tokens */
    int64_t pages;        /* that its entries may take */
    quern_dsv4_state *main, *index;
} layer_sequence;

/* Rows of a sequence. Entries and keys may stand in pages. */
typedef enum layer_area { LAYER_RAW, LAYER_ENTRIES, LAYER_KEYS, LAYER_AREAS } layer_area;

/* How the rows of an area are stored. */
typedef struct layer_plane {
    quern_dsv4_format format;
    quern_dtype dtype; /* u8 where the format is bytes */
    int64_t width;     /* channels */
    int64_t columns;   /* elements of a row */
    size_t row, data;  /* bytes of a row, and of its part before the scales */
    bool paged;
    char *base; /* contiguous: sequence after sequence, `sequence` bytes each; or the pool */
    size_t sequence;
} layer_plane;

struct quern_dsv4_layer_cache {
    uint64_t magic;
    quern_dsv4_layer_cache_params params; /* resolved */
    int64_t kept, entries;                /* most raw rows and entries of a sequence */
    int64_t columns;                      /* most pages of a sequence */
    layer_plane plane[LAYER_AREAS];       /* of width 0: there are no such rows */
    char *states;                         /* memory of all sequences */
    size_t state_bytes[2];                /* of the compressor's and the indexer's state */
    int32_t *table;                       /* [sequences, columns]: the pages of a sequence's entries */
    int32_t *owner;                       /* [pages]: the sequence that has a page, or -1 */
    layer_sequence sequence[];
};

/* The sequences that a decoding call is about. */
typedef struct layer_batch {
    quern_dsv4_layer_cache *cache;
    const int32_t *sequences;
    const int64_t *counts;
    int64_t batch;
} layer_batch;

typedef struct dsv4_layer_call {
    op_call head;
    quern_dsv4_layer_params params;
    quern_tensor view[DSV4_LAYER_TENSORS]; /* symbolic; absent where the call does not use it */
    const void *scratch;
} dsv4_layer_call;

/* A call of dsv4_layer_decode_family. What the caller's structs do not say stands behind the call, which is
 * cleared when it begins. */
typedef struct layer_decode_call {
    dsv4_layer_call call;
    layer_batch batch;
} layer_decode_call;

static inline const layer_batch *layer_batch_of(const op_call *call)
{
    return &((const layer_decode_call *)call)->batch;
}

extern const op_family dsv4_layer_family, dsv4_layer_decode_family;

/* ---- composing a call (layer_pass.c) ---- */

typedef struct layer_pass {
    const dsv4_layer_call *call;
    const int64_t *symbol;
    const op_frame *frame; /* NULL: stages are sized, not run */
    arena a;
    size_t scratch_bytes; /* most of any stage */
    quern_status status;
} layer_pass;

/* F(stage, arguments): the stages that a call may run. */
#define LAYER_STAGES(F)                                                                                      \
    F(gemm, gemm)                                                                                            \
    F(norm_rope_forward, norm_rope)                                                                          \
    F(norm_rope_backward, norm_rope)                                                                         \
    F(pool_forward, pool)                                                                                    \
    F(pool_backward, pool)                                                                                   \
    F(pool_append, pool_append)                                                                              \
    F(indexer, indexer)                                                                                      \
    F(attend_mqa_forward, attend_mqa)                                                                        \
    F(attend_mqa_backward, attend_mqa)                                                                       \
    F(permute, permute)                                                                                      \
    F(widen_blocks, widen_blocks)                                                                            \
    F(dequantise, dequantise)                                                                                \
    F(grouped_gemm, grouped_gemm)                                                                            \
    F(convert, convert)                                                                                      \
    F(store_rows, store_rows)
/* Sizes or runs a stage, unless one before has failed. */
// NOLINTBEGIN(bugprone-macro-parentheses): a function's name cannot stand in parentheses here
#define LAYER_STAGE(stage, name) void layer_##stage(layer_pass *p, const name##_args *args);
LAYER_STAGES(LAYER_STAGE)
// NOLINTEND(bugprone-macro-parentheses)
#undef LAYER_STAGE

/* Contiguous [rows, columns] in the workspace. */
quern_tensor layer_room(layer_pass *p, quern_dtype dtype, int64_t rows, int64_t columns);
/* [rows, heads * width] at any row stride as [batch, rows / batch, heads, width]. */
quern_tensor layer_heads(const quern_tensor *t, int64_t batch, int64_t heads);
/* The same as [batch, rows / batch, columns]. */
quern_tensor layer_batches(const quern_tensor *t, int64_t batch);
quern_tensor layer_rows(const quern_tensor *t, int64_t first, int64_t count);
quern_tensor layer_columns(const quern_tensor *t, int64_t first, int64_t count);
/* An activation or weight of the call, [.., columns], as a matrix: a view, or a copy where strides forbid
 * one. */
quern_tensor layer_matrix(layer_pass *p, dsv4_layer_tensor tensor);
/* Copies rows that are as many and as long, whatever the shapes. */
void layer_copy(layer_pass *p, const quern_tensor *from, const quern_tensor *to);
/* Converts [batch, rows, heads, width] to another dtype. */
void layer_change(layer_pass *p, const quern_tensor *from, const quern_tensor *to);
/* Copies to a result of the call, if it has that result. */
void layer_give(layer_pass *p, dsv4_layer_tensor tensor, const quern_tensor *from);
/* c = a w^T. */
void layer_product(layer_pass *p, const quern_tensor *a, const quern_tensor *w, const quern_tensor *c);

/* ---- what a layer goes through (layer_parts.c) ---- */

/* Rows of all tokens; absent where the kind has none. */
typedef struct layer_parts {
    quern_tensor x;                     /* [rows, Dm] */
    quern_tensor residual_in, residual; /* f32 and act [rows, q_lora]: before and after the norm */
    quern_tensor q_in, kv_in;           /* f32 [rows, H D], [rows, D] before norm and rotation */
    quern_tensor main, index;           /* f32 projections of the compressors */
    quern_tensor main_w;                /* [Dm, 2mD]: what main was multiplied by; absent with kv and gate */
    quern_tensor index_q_in, heads;     /* f32 [rows, Hi C_I] before the rotation, [rows, Hi] */
    quern_tensor sinks;                 /* f32 [H] */
} layer_parts;

layer_parts layer_project(layer_pass *p);
/* Norm and rotation of rows of tokens from `position` on: of heads, of raw rows, of the indexer's queries. */
void layer_make_q(layer_pass *p, const quern_tensor *in, const quern_tensor *out, int64_t batch,
                  int64_t position);
void layer_make_kv(layer_pass *p, const quern_tensor *in, const quern_tensor *out, int64_t batch,
                   int64_t position);
void layer_make_index_q(layer_pass *p, const quern_tensor *in, const quern_tensor *out, int64_t batch,
                        int64_t position);
/* The biases of a compressor's series, [r, width] each; the second is absent in HCA. */
void layer_biases(const quern_tensor *bias, int64_t width, quern_tensor *a, quern_tensor *b);
/* Norm and rotation of entries of the compressor whose weights start at `first`. */
entry_args layer_entry(const layer_pass *p, dsv4_layer_tensor first);
/* Entries of whole sequences. */
pool_args layer_pool(const layer_pass *p, const quern_tensor *proj, const quern_tensor *out,
                     dsv4_layer_tensor first, int64_t batch);
/* The keys of the indexer: [batch, S, C_I] or bytes; or a pool with i32 table [batch, columns]. */
typedef struct layer_keys {
    entry_format format;
    int64_t page;
    quern_tensor rows, table;
} layer_keys;
/* The indexer on queries at `position`; scores may be absent. */
void layer_choose(layer_pass *p, const quern_tensor *q, const layer_keys *keys, const quern_tensor *heads,
                  int64_t batch, int64_t position, const quern_tensor *idx, const quern_tensor *count,
                  const quern_tensor *scores);
/* The core's arguments; kv [batch, N, D], entries [batch, S, D], idx, count and sinks may be absent. */
attend_mqa_args layer_core(const layer_pass *p, const quern_tensor *sinks, const quern_tensor *q,
                           const quern_tensor *kv, const quern_tensor *entries, const quern_tensor *idx,
                           const quern_tensor *count, int64_t position);
/* Runs the core to `core` [rows, H D], rotated back, and where it is wanted to `unrotated` [batch, T, H, D]:
 * its rows before that, from which the others then have the same bits. */
void layer_attend(layer_pass *p, const attend_mqa_args *args, const quern_tensor *core,
                  const quern_tensor *unrotated);
/* Both output projections of [rows, H D]. Returns the first's result [rows, G o_lora]. */
quern_tensor layer_project_groups(layer_pass *p, const quern_tensor *core);
void layer_project_out(layer_pass *p, const quern_tensor *o_a_out);

/* ---- calls ---- */

/* What the core of whole sequences reads and makes. */
typedef struct layer_states {
    int64_t batch;
    quern_tensor q, kv, entries; /* [rows, H D] [rows, D] [batch S, D] */
    quern_tensor idx, count;     /* [rows, k] [rows, 1] */
    quern_tensor core, lse;      /* [rows, H D] rotated back; [batch, H, T] or absent */
    quern_tensor sinks;
} layer_states;

/* In layer.c. */
layer_states layer_compute(layer_pass *p, const layer_parts *parts, bool lse);
attend_mqa_args layer_states_core(const layer_pass *p, const layer_states *states);
void layer_forward(layer_pass *p);  /* layer.c */
void layer_backward(layer_pass *p); /* layer_backward.c */
void layer_decode(layer_pass *p);   /* layer_decode.c */
/* In layer.c. */
quern_status dsv4_layer_plan(op_call *call);
quern_status dsv4_layer_run(const op_call *call, const op_frame *frame);

/* ---- caches ---- */

/* In layer_cache.c. Checks a decoding call's ids and counts; sets the sums of tokens and of the entries that
 * become whole, and the entries and tokens of the longest sequence. */
quern_status layer_check_batch(const layer_batch *d, int64_t *tokens, int64_t *entries, int64_t *most,
                               int64_t *last);
/* Whether a pointer is a cache. */
quern_status layer_check_cache(const quern_dsv4_layer_cache *cache);
/* The same, and that it has such a sequence. */
quern_status layer_check_sequence(const quern_dsv4_layer_cache *cache, const char *name, int64_t sequence);
quern_status layer_in_range(const char *name, int64_t value, int64_t least, int64_t most);
/* That a sequence has pages for so many entries. */
quern_status layer_check_pages(const quern_dsv4_layer_cache *cache, int64_t sequence, int64_t entries);
/* Entries before a position. */
int64_t layer_entries_at(const quern_dsv4_layer_cache *cache, int64_t position);
/* Memory of the compressor's (0) or the indexer's (1) state. */
char *layer_state_memory(const quern_dsv4_layer_cache *cache, int64_t sequence, int which);
/* The parameters of the states. */
quern_dsv4_compress_params layer_state_params(const quern_dsv4_layer_cache_params *p);

/* In layer_rows.c: where a row's data and scales stand. */
typedef struct layer_place {
    char *data, *scales;
} layer_place;
layer_place layer_row_at(const quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area, int64_t row);
/* Copies rows between an area and contiguous rows. */
void layer_read_rows(const quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area, int64_t count,
                     char *to);
void layer_write_rows(quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area, int64_t count,
                      const char *from, int64_t step);
/* Rows that a sequence has in an area. */
int64_t layer_rows_of(const quern_dsv4_layer_cache *cache, const layer_sequence *s, layer_area area);

#endif
