/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema.h - the numbers by which NSA's description calls its operations, tensors and extents. */
#ifndef QUERN_NSA_SCHEMA_H
#define QUERN_NSA_SCHEMA_H

#include "core/op.h"

#include <quern/nsa.h>

/* In the order of quern_operation. */
typedef enum nsa_op {
    NSA_FORWARD,
    NSA_BACKWARD,
    NSA_COMPRESS,
    NSA_COMPRESS_BACKWARD,
    NSA_SELECT,
    NSA_ATTEND,
    NSA_ATTEND_BACKWARD,
    NSA_GATES,
    NSA_COMBINE,
    NSA_GATE,
    NSA_GATE_BACKWARD,
    NSA_OPS
} nsa_op;

enum { NSA_CMP, NSA_SLC, NSA_WIN, NSA_BRANCHES };

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_nsa_tensors, field)
enum { NSA_TENSORS = OP_TENSOR_COUNT(quern_nsa_tensors) };

/* Extents as the shapes below name them: fixed length B and N, varlen T. */
typedef enum nsa_symbol {
    S_B = 1,
    S_B1,
    S_N,
    S_T,
    S_H,
    S_HKV,
    S_D,
    S_DV,
    S_NC,
    S_TC,
    S_L,
    S_LD,
    S_LDV,
    S_3,
    S_HS,
    S_TILES,
    S_ROWS,
    S_K,
    S_C,
    S_DI,
    S_S, /* keys of the block indexer, which may be more than queries; blocks of them */
    S_TKV,
    S_BLOCKS
} nsa_symbol;

/* Shapes of k_index, fixed length and varlen. */
enum { LEAD_KEYS, LEAD_KEY_ROWS };

extern const char nsa_symbols[];
extern const op_family nsa_family, nsa_decode_family;
/* The parameters, which decoding has, too. */
enum { NSA_PARAMS = 20, NSA_GATE_PARAM = NSA_PARAMS - 3 };
extern const op_param nsa_param_rows[NSA_PARAMS];
extern const quern_nsa_params nsa_defaults;

/* params.c: what parameters allow together; resolves defaults. */
quern_status nsa_check_params(op_call *call);
/* roles.c: what each operation does with each tensor. */
void nsa_roles(op_call *call);
const char *nsa_refuse(const op_call *call, int32_t tensor, char text[OP_REASON]);
/* Compressed entries of a sequence of n tokens. */
int64_t nsa_entries_of(const op_call *call, int64_t n);
/* build.c. */
void nsa_build_program(op_build *b);

#endif
