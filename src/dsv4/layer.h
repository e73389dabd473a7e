/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer.h - the whole layer: its tensors, extents and calls, and the parts of their programs. */
#ifndef QUERN_DSV4_LAYER_INTERNAL_H
#define QUERN_DSV4_LAYER_INTERNAL_H

#include "dsv4/weights.h"

#include <quern/dsv4_layer.h>
#include <quern/ledger.h>

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
    LS_4CI,
    LS_B, /* these of a step */
    LS_B1,
    LS_1,
    LS_SLOTS,
    LS_COLUMNS,
    LS_FLOATS,
    LS_INDEX_FLOATS
} dsv4_layer_symbol;
/* B T, or T; B, or nothing; of a step's pools, and its copies. */
enum {
    LL_TOKENS = OP_LEAD,
    LL_BATCH,
    LL_RAW,
    LL_ENTRIES,
    LL_KEYS,
    LL_COPIES,
};
#define LEAD_OF(lead) ((lead)-OP_LEAD)

/* A layer's parameters are the first of a step's. */
typedef struct dsv4_layer_call {
    op_call head;
    quern_dsv4_layer_step_params params;
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

/* A call of dsv4_layer_step_family; CSA with weights in FP8 or NVFP4 has most steps. */
enum {
    LAYER_GROUPS_BESIDE = 8,   /* products that a step may have in place of a loop */
    LAYER_TOKENS_BESIDE = 512, /* of a step whose stages run beside each other */
    LAYER_STEP_BYTES =
        (14 + LAYER_GROUPS_BESIDE) * OP_STEP_BYTES(gemm) + 2 * DSV4_WEIGHT_BYTES +
        9 * OP_STEP_BYTES(permute) + 5 * OP_STEP_BYTES(convert) + 5 * OP_STEP_BYTES(norm_rope) +
        4 * OP_STEP_BYTES(copy_rows) + 7 * OP_STEP_BYTES(copy_pages) + 3 * OP_STEP_BYTES(store_rows) +
        OP_STEP_BYTES(pool_append) + OP_STEP_BYTES(indexer) + OP_STEP_BYTES(attend_mqa) +
        OP_STEP_BYTES(step_tokens) + OP_STEP_BYTES(step_places) + OP_STEP_BYTES(step_check) +
        10 * OP_STEP_BYTES(clear_rows) + 3 * sizeof(int64_t) /* by which views of a product move */
};
typedef struct layer_step_call {
    dsv4_layer_call call;
    _Alignas(op_step) char program[LAYER_STEP_BYTES];
} layer_step_call;

/* A step's tensor by its field; x ... o_a_out are DL(..), too. */
#define DLS(field) OP_TENSOR(quern_dsv4_layer_step_tensors, field)
#define DLP(field) OP_TENSOR(quern_dsv4_layer_pack_tensors, field)

extern const op_family dsv4_layer_family, dsv4_layer_step_family, dsv4_layer_pack_family;
extern const char *const layer_kinds[];
/* A layer has the first of a step's parameters. */
enum { LAYER_PARAMS = 4, LAYER_STEP_PARAMS = 6 };
extern const op_param layer_param_rows[LAYER_STEP_PARAMS];

/* ---- in layer_schema.c: what both kinds of calls share ---- */

void layer_resolve(quern_dsv4_layer_step_params *p);
/* Where the compressor's and the indexer's weights stand among a call's tensors. */
const dsv4_weight_row *layer_weights(const op_call *call);
extern const dsv4_weight_row layer_step_weights[2];
/* Of x, weights and results of a forward call. */
void layer_roles(op_call *call);
const char *layer_refuse(const op_call *call, int32_t tensor, char text[OP_REASON]);
/* The extents that follow from x and the weights. */
quern_status layer_derive(op_call *call);
quern_status layer_check_data(const op_call *call, void *const *data);

/* ---- pools of a step ---- */

/* In layer_step_schema.c. Check a pool's tensor, whose rows have `width` channels, and set the extents that
 * it is to have: of raw rows [pages, R, row]; of entries. */
quern_status layer_derive_raw(op_call *call, int32_t tensor, quern_dsv4_format format, int64_t width);
quern_status layer_derive_pool(op_call *call, int32_t tensor, quern_dsv4_format format, int64_t width,
                               op_extents *extents);
/* The extents of a pool of pages; slots of a page by them. */
void layer_set_pool(op_extents *extents, int64_t pages, int64_t page, quern_dsv4_format format,
                    int64_t width);
int64_t layer_page_of(const op_extents *extents, quern_dsv4_format format, int64_t width);
/* Tokens of a sequence that positions, table and scores have room for. */
int64_t layer_step_room(const op_call *call);
/* Entries that the step's tokens complete, at most. */
int64_t layer_step_entries(const op_call *call);

/* ---- views ---- */

static inline const quern_dsv4_layer_step_params *layer_params(const op_build *b)
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
/* All projections of x and the norm of the residual; the residual's projections, the indexer's and q's, are
 * steps of their own. */
layer_parts layer_project(op_build *b);
void layer_project_index(op_build *b, layer_parts *parts);
void layer_project_q(op_build *b, layer_parts *parts);
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
/* Both output projections of [rows, H D]. Returns the first's result [rows, G o_lora]. live: as in gemm_args;
 * false: the backend's product does not know it, and all rows have been written. */
quern_tensor layer_project_groups(op_build *b, const quern_tensor *core);
bool layer_project_out(op_build *b, const quern_tensor *o_a_out, const quern_tensor *live);

/* ---- calls ---- */

/* In layer.c. */
layer_states layer_compute(op_build *b, const layer_parts *parts, bool lse);
attend_mqa_args layer_states_core(const op_build *b, const layer_states *states);
void layer_build(op_build *b);          /* layer.c */
void layer_build_backward(op_build *b); /* layer_backward.c */
/* layer_step.c */
void layer_step_build(op_build *b);

#endif
