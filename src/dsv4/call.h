/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.h - the family's operations: their tensors, extents and calls. */
#ifndef QUERN_DSV4_CALL_H
#define QUERN_DSV4_CALL_H

#include "core/op.h"
#include "dsv4/dsv4.h"
#include "dsv4/weights.h"

/* Tensors by the fields of the operations' structs. */
#define DC(field) OP_TENSOR(quern_dsv4_compress_tensors, field)
#define DI(field) OP_TENSOR(quern_dsv4_index_tensors, field)
#define DA(field) OP_TENSOR(quern_dsv4_attention_tensors, field)
#define DT(field) OP_TENSOR(quern_dsv4_store_tensors, field)

/* ---- the compressors ---- */

typedef enum dsv4_op { DSV4_COMPRESS, DSV4_COMPRESS_BACKWARD, DSV4_OPS } dsv4_op;

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
    DS_SLOTS, /* of states in a tensor, their floats, and copies of them */
    DS_FLOATS,
    DS_COPIES,
    DS_COPY,
    DS_IFLOATS, /* floats of the indexer's states */
    DS_TABLE,
    DS_ITABLE /* columns of tables of pages */
} dsv4_symbol;

/* The steps of a call with both compressors, each of which has a weight to make. */
enum {
    DSV4_COMPRESS_BYTES =
        2 * (DSV4_WEIGHT_BYTES + OP_STEP_BYTES(pool) + OP_STEP_BYTES(permute)) + OP_STEP_BYTES(convert)
};

typedef struct dsv4_compress_call {
    op_call head;
    quern_dsv4_compress_params params;
    dsv4_weight_given weights[2]; /* the compressor's, the indexer's */
    _Alignas(op_step) char program[DSV4_COMPRESS_BYTES];
} dsv4_compress_call;

extern const op_family dsv4_compress_family;
/* An append has them, too; of the parameters the first ones. */
enum { DSV4_COMPRESS_PARAMS = 12, DSV4_APPEND_PARAMS = 9 };
extern const op_param dsv4_compress_param_rows[DSV4_COMPRESS_PARAMS];
extern const char dsv4_compress_symbols[];
extern const dsv4_weight_row dsv4_compress_weights[2];

/* In compress.c. */
void dsv4_compress_build(op_build *b);

/* ---- appends ---- */

/* A tensor by its field. */
#define DP(field) OP_TENSOR(quern_dsv4_append_tensors, field)
enum { DSV4_APPEND_TENSORS = OP_TENSOR_COUNT(quern_dsv4_append_tensors) };
extern const op_tensor dsv4_append_rows[DSV4_APPEND_TENSORS];
extern const dsv4_weight_row dsv4_append_weights[2]; /* the compressor's, the indexer's */
extern const op_family dsv4_append_step_family;

/* In append_schema.c. */
/* Checks what comes in and the weights, by the extents B, T and n; sets the others. */
quern_status dsv4_append_derive(op_call *call, const quern_dsv4_compress_params *p, int64_t width);
/* x w in f32, or the caller's projections, of the compressor or of the indexer's. */
quern_tensor dsv4_append_projection(op_build *b, bool index, dsv4_weight_given *weight);

/* ---- the indexer ---- */

extern const op_family dsv4_index_family;

/* ---- the attention core ---- */

typedef enum dsv4_attention_op {
    DSV4_ATTENTION,
    DSV4_ATTENTION_BACKWARD,
    DSV4_ATTENTION_OPS
} dsv4_attention_op;

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

extern const op_family dsv4_attention_family;

/* In attention.c. */
void dsv4_attention_build(op_build *b);

/* ---- rows of a cache ---- */

extern const op_family dsv4_store_family;

/* In store.c. That stored rows, which are given, have the dtype of their format. */
quern_status dsv4_check_stored(const op_call *call, int32_t tensor, quern_dsv4_format format);
/* That columns [first, end) of a sequence's row of a table name pages of the pool. */
quern_status dsv4_check_pages(const op_tensor *name, const quern_tensor *table, const int32_t *data,
                              int64_t b, int64_t first, int64_t end, int64_t pages);

/* How many sequences a call goes through, of `batch`: where none of them has `elements`, nothing depends on
 * their number, which may be any. */
static inline int64_t dsv4_sequences(bool elements, int64_t batch)
{
    return elements || batch < 1 ? batch : 1;
}
static inline int64_t dsv4_compress_sequences(const op_call *call)
{
    const int64_t *s = call->symbol;
    return dsv4_sequences(call->varlen || s[DS_T] > 0 || call->alignment[DC(prev_b)] > 0, s[DS_B]);
}
static inline int64_t dsv4_attention_sequences(const op_call *call)
{
    const int64_t *s = call->symbol;
    return dsv4_sequences(call->varlen || s[AS_T] > 0 || s[AS_N] > 0 || s[AS_S] > 0 ||
                              call->alignment[DA(start_positions)] > 0,
                          s[AS_B]);
}

#endif
