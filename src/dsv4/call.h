/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.h - the family's operations: their tensors, extents and calls. */
#ifndef QUERN_DSV4_CALL_H
#define QUERN_DSV4_CALL_H

#include "core/op.h"
#include "dsv4/dsv4.h"
#include "dsv4/weights.h"

typedef enum dsv4_op { DSV4_COMPRESS, DSV4_COMPRESS_BACKWARD, DSV4_OPS } dsv4_op;

/* In the order of quern_dsv4_compress_tensors. */
typedef enum dsv4_compress_tensor {
    DC_PROJ,
    DC_X,
    DC_W,
    DC_B_A,
    DC_B_B,
    DC_PREV_B,
    DC_NORM_WEIGHT,
    DC_COS_SIN,
    DC_CU_SEQLENS,
    DC_START_TOKENS,
    DC_START_POSITIONS,
    DC_BLOCK_COUNTS,
    DC_HAS_PREV,
    DC_CU_SEQLENS_CMP,
    DC_POOLED,
    DC_OUT,
    DC_D_OUT,
    DC_D_PROJ,
    DC_D_X,
    DC_D_PREV_B,
    DC_D_W,
    DC_D_B_A,
    DC_D_B_B,
    DC_D_NORM_WEIGHT,
    DC_INDEX_PROJ,
    DC_INDEX_W,
    DC_INDEX_B_A,
    DC_INDEX_B_B,
    DC_INDEX_PREV_B,
    DC_INDEX_NORM_WEIGHT,
    DC_INDEX_POOLED,
    DC_INDEX_OUT,
    DC_INDEX_D_OUT,
    DC_INDEX_D_PROJ,
    DC_INDEX_D_PREV_B,
    DC_INDEX_D_W,
    DC_INDEX_D_B_A,
    DC_INDEX_D_B_B,
    DC_INDEX_D_NORM_WEIGHT,
    DC_W_FP8,
    DC_W_FP8_SCALES,
    DC_W_CODES,
    DC_W_SCALES,
    DC_W_GLOBAL,
    DC_INDEX_W_FP8,
    DC_INDEX_W_FP8_SCALES,
    DC_INDEX_W_CODES,
    DC_INDEX_W_SCALES,
    DC_INDEX_W_GLOBAL,
    DSV4_COMPRESS_TENSORS
} dsv4_compress_tensor;

/* Extents; DS_N counts the entries of a sequence, or of a varlen batch, DS_ROW the elements of a stored one.
 */
typedef enum dsv4_symbol {
    DS_B = 1,
    DS_B1,
    DS_T,
    DS_COLUMNS,
    DS_IN,
    DS_R,
    DS_C,
    DS_2C,
    DS_P,
    DS_ROPE,
    DS_N,
    DS_ROW,
    DS_ICOLUMNS, /* of the indexer's compressor: columns, C, 2C, elements of an entry */
    DS_CI,
    DS_2CI,
    DS_IROW,
    DS_IN_BLOCKS, /* Dm / 128, columns / 128, Dm / 2, Dm / 16 */
    DS_COLUMN_BLOCKS,
    DS_ICOLUMN_BLOCKS,
    DS_IN_BYTES,
    DS_IN_SCALES
} dsv4_symbol;

typedef struct dsv4_compress_call {
    op_call head;
    quern_dsv4_compress_params params;
    pool_args pool;
    dsv4_weight weight, index_weight;
    bool both;                          /* with index_b_a: */
    pool_args index;                    /* the indexer's compressor */
    bool index_first;                   /* it may refuse an entry, before the main one has written anything */
    permute_args late_out, late_pooled; /* both may: the indexer's outputs wait in the workspace */
    convert_args d_x;                   /* from the sum of both gradients in f32 */
    const void *scratch;
} dsv4_compress_call;

extern const op_family dsv4_compress_family;

/* In compress.c. */
quern_status dsv4_compress_plan(op_call *call);
quern_status dsv4_compress_run(const op_call *call, const op_frame *frame);

/* ---- the indexer ---- */

/* In the order of quern_dsv4_index_tensors. */
typedef enum dsv4_index_tensor {
    DI_Q,
    DI_K,
    DI_W,
    DI_IDX,
    DI_COUNT,
    DI_SCORES,
    DI_START_POSITIONS,
    DI_K_TABLE,
    DSV4_INDEX_TENSORS
} dsv4_index_tensor;

typedef struct dsv4_index_call {
    op_call head;
    quern_dsv4_index_params params;
    indexer_args indexer;
    const void *scratch;
} dsv4_index_call;

extern const op_family dsv4_index_family;

/* ---- the attention core ---- */

typedef enum dsv4_attention_op {
    DSV4_ATTENTION,
    DSV4_ATTENTION_BACKWARD,
    DSV4_ATTENTION_OPS
} dsv4_attention_op;

/* In the order of quern_dsv4_attention_tensors. */
typedef enum dsv4_attention_tensor {
    DA_Q,
    DA_KV,
    DA_KV_CMP,
    DA_IDX,
    DA_COUNT,
    DA_SINK,
    DA_COS_SIN,
    DA_CU_SEQLENS,
    DA_O,
    DA_LSE,
    DA_LSE_WIN,
    DA_D_O,
    DA_D_Q,
    DA_D_KV,
    DA_D_KV_CMP,
    DA_D_SINK,
    DA_START_POSITIONS,
    DA_KV_TABLE,
    DA_KV_CMP_TABLE,
    DSV4_ATTENTION_TENSORS
} dsv4_attention_tensor;

typedef enum dsv4_attention_symbol {
    AS_B = 1,
    AS_B1,
    AS_T,
    AS_N,
    AS_H,
    AS_D,
    AS_S,
    AS_K,
    AS_P,
    AS_ROPE,
    AS_ROW,
    AS_KV_COLUMNS,
    AS_CMP_COLUMNS
} dsv4_attention_symbol;
enum { AS_KV = OP_LEAD, AS_KV_CMP = OP_LEAD + 1 };

typedef struct dsv4_attention_call {
    op_call head;
    quern_dsv4_attention_params params;
    attend_mqa_args attend;
    const void *scratch;
} dsv4_attention_call;

extern const op_family dsv4_attention_family;

/* In attention.c. */
quern_status dsv4_attention_plan(op_call *call);
quern_status dsv4_attention_run(const op_call *call, const op_frame *frame);

/* ---- rows of a cache ---- */

/* In the order of quern_dsv4_store_tensors. */
typedef enum dsv4_store_tensor { DT_X, DT_SLOTS, DT_CACHE, DSV4_STORE_TENSORS } dsv4_store_tensor;

typedef struct dsv4_store_call {
    op_call head;
    quern_dsv4_store_params params;
    store_rows_args store;
    const void *scratch;
} dsv4_store_call;

extern const op_family dsv4_store_family;

/* How many sequences a call goes through, of `batch`: where none of them has `elements`, nothing depends on
 * their number, which may be any. */
static inline int64_t dsv4_sequences(bool elements, int64_t batch)
{
    return elements || batch < 1 ? batch : 1;
}
static inline int64_t dsv4_compress_sequences(const op_call *call)
{
    const int64_t *s = call->symbol;
    return dsv4_sequences(call->varlen || s[DS_T] > 0 || call->alignment[DC_PREV_B] > 0, s[DS_B]);
}
static inline int64_t dsv4_attention_sequences(const op_call *call)
{
    const int64_t *s = call->symbol;
    return dsv4_sequences(call->varlen || s[AS_T] > 0 || s[AS_N] > 0 || s[AS_S] > 0 ||
                              call->alignment[DA_START_POSITIONS] > 0,
                          s[AS_B]);
}

#endif
