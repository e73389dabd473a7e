/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer.h - the whole layer: its tensors, extents and calls, and the parts of their programs. */
#ifndef QUERN_DSV4_LAYER_INTERNAL_H
#define QUERN_DSV4_LAYER_INTERNAL_H

#include "dsv4/weights.h"

#include <quern/dsv4_layer.h>

typedef enum dsv4_layer_op { DSV4_LAYER, DSV4_LAYER_BACKWARD, DSV4_LAYER_OPS } dsv4_layer_op;

/* A tensor by its field. */
#define DL(field) OP_TENSOR(quern_dsv4_layer_tensors, field)

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
    LS_4CI
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
    dsv4_weight_given weights[2]; /* the compressor's, the indexer's */
} dsv4_layer_call;

/* A call of dsv4_layer_family. A backward of kind CSA has most steps. */
enum {
    LAYER_PROGRAM_BYTES = 34 * OP_STEP_BYTES(gemm) + 2 * OP_STEP_BYTES(permute) + 2 * OP_STEP_BYTES(convert) +
                          7 * OP_STEP_BYTES(norm_rope) + 3 * OP_STEP_BYTES(pool) + OP_STEP_BYTES(indexer) +
                          2 * OP_STEP_BYTES(attend_mqa) +
                          9 * sizeof(int64_t) /* by which views of three products move */
};
typedef struct layer_whole_call {
    dsv4_layer_call call;
    _Alignas(op_step) char program[LAYER_PROGRAM_BYTES];
} layer_whole_call;

/* What the cache's books say of a step, in the workspace. */
typedef struct layer_step {
    quern_tensor slots, copies;          /* i64 [B]: rows of the cache's states, and of copies of them */
    quern_tensor positions, merged[2];   /* i32 [B]; merged: of the compressor's, the indexer's state */
    quern_tensor cu, cu_raw;             /* i32 [B + 1]: tokens; raw rows, old ones before new ones */
    quern_tensor at;                     /* i32 [T]: the tokens' positions */
    quern_tensor raw_slots, entry_slots; /* i64 [T], [S]: of the new rows among the raw ones, in the cache */
    quern_tensor table;                  /* i32 [B, columns]: pages of entries and keys */
    /* i64 [B, 3]: runs of raw rows from the cache and back, of states to their copies and back */
    quern_tensor old, kept, copied, returned;
} layer_step;

/* A call of dsv4_layer_decode_family; CSA with weights in FP8 or NVFP4 has most steps. What the caller's
 * structs do not say stands behind what is cleared when the call begins. */
enum {
    LAYER_DECODE_BYTES = 15 * OP_STEP_BYTES(gemm) + 2 * DSV4_WEIGHT_BYTES + 9 * OP_STEP_BYTES(permute) +
                         5 * OP_STEP_BYTES(convert) + 5 * OP_STEP_BYTES(norm_rope) +
                         6 * OP_STEP_BYTES(copy_rows) + 3 * OP_STEP_BYTES(store_rows) +
                         2 * OP_STEP_BYTES(pool_append) + OP_STEP_BYTES(indexer) + OP_STEP_BYTES(attend_mqa) +
                         3 * sizeof(int64_t) /* by which views of a product move */
};
typedef struct layer_decode_call {
    dsv4_layer_call call;
    _Alignas(op_step) char program[LAYER_DECODE_BYTES];
    layer_batch batch;
    layer_step step;
} layer_decode_call;

static inline const layer_batch *layer_batch_of(const op_call *call)
{
    return &((const layer_decode_call *)call)->batch;
}

extern const op_family dsv4_layer_family, dsv4_layer_decode_family;
extern const dsv4_weight_row layer_weights[2];

/* ---- views ---- */

static inline const quern_dsv4_layer_params *layer_params(const op_build *b)
{
    return &((const dsv4_layer_call *)b->call)->params;
}
static inline quern_tensor layer_view(const op_build *b, int32_t tensor)
{
    return op_view(b->call, tensor, false);
}
/* [rows, heads * width] at any row stride as [batch, rows / batch, heads, width]. */
quern_tensor layer_heads(const quern_tensor *t, int64_t batch, int64_t heads);
/* The same as [batch, rows / batch, columns]. */
quern_tensor layer_batches(const quern_tensor *t, int64_t batch);
quern_tensor layer_rows(const quern_tensor *t, int64_t first, int64_t count);
quern_tensor layer_columns(const quern_tensor *t, int64_t first, int64_t count);

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

/* Converts [batch, rows, heads, width] to another dtype. */
void layer_change(op_build *b, const quern_tensor *from, const quern_tensor *to);
layer_parts layer_project(op_build *b);
/* Rotates rows of `heads` heads. Before that it norms them where `norm` is set, by a weight or OP_NONE. `at`:
 * positions, as in norm_rope_args; NULL: sequences begin at 0. */
void layer_rotate(op_build *b, const quern_tensor *in, const quern_tensor *out, int64_t batch, int64_t heads,
                  const quern_tensor *at, bool norm, int32_t weight);
/* Queries [batch, T, H, D] to the result [batch, H, T, D] or [H, T, D]. */
void layer_give_q(op_build *b, const quern_tensor *q, int64_t batch);
/* The biases of a compressor's series, [r, width] each; where there is none, or no second one as in HCA,
 * the view stays absent. */
void layer_biases(const quern_tensor *bias, int64_t width, quern_tensor *a, quern_tensor *second);
/* Norm and rotation of entries of the compressor whose weights start at `first`. */
entry_args layer_entry(const op_build *b, int32_t first);
/* Fills the arguments of a step that makes entries of whole sequences. */
void layer_pool(const op_build *b, pool_args *args, const quern_tensor *proj, const quern_tensor *out,
                int32_t first, int64_t batch);
/* The indexer on queries from position 0 on, which the caller may change. keys: as the stage takes them. */
indexer_args *layer_choose(op_build *b, const quern_tensor *q, const quern_tensor *keys,
                           const quern_tensor *heads, const quern_tensor *idx, const quern_tensor *count,
                           int64_t batch);

/* What the core reads and makes. */
typedef struct layer_states {
    int64_t batch;               /* 1: a decoding call's tokens are a varlen batch */
    quern_tensor q, kv, entries; /* [rows, H D] [rows, D] [batch S, D] */
    quern_tensor idx, count;     /* [rows, k] [rows, 1], or absent */
    quern_tensor core, lse;      /* [rows, H D] rotated back; [batch, H, T] or absent */
    quern_tensor sinks;
} layer_states;
/* The core's arguments; kv [batch, N, D], entries as the stage takes them. */
attend_mqa_args layer_core(const op_build *b, const layer_states *states, const quern_tensor *kv,
                           const quern_tensor *entries);
/* The core, rotated back, and where it is wanted to `unrotated` [batch, T, H, D]: its rows before that,
 * from which the others then have the same bits. `at` as above. */
void layer_attend(op_build *b, const attend_mqa_args *args, const quern_tensor *at,
                  const quern_tensor *unrotated);
/* Both output projections of [rows, H D]. Returns the first's result [rows, G o_lora]. */
quern_tensor layer_project_groups(op_build *b, const quern_tensor *core);
void layer_project_out(op_build *b, const quern_tensor *o_a_out);

/* ---- calls ---- */

/* In layer.c. */
layer_states layer_compute(op_build *b, const layer_parts *parts, bool lse);
attend_mqa_args layer_states_core(const op_build *b, const layer_states *states);
void layer_build(op_build *b);          /* layer.c */
void layer_build_backward(op_build *b); /* layer_backward.c */
/* layer_decode.c */
void layer_build_decode(op_build *b);
void layer_begin_decode(const op_call *call, const op_frame *frame);

/* ---- caches ---- */

/* In layer_cache.c. Checks a decoding call's ids and counts; sets the sums of tokens and of the entries
 * that become whole, and the entries and tokens of the longest sequence. */
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
/* Copies the first rows of a sequence's area to rows `step` bytes apart or, in, from them. */
void layer_move_rows(const quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area, int64_t count,
                     char *rows, int64_t step, bool in);
/* Rows that a sequence has in an area. */
int64_t layer_rows_of(const quern_dsv4_layer_cache *cache, const layer_sequence *s, layer_area area);

#endif
