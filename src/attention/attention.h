/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.h - dense attention inside the family: its description, and a call. */
#ifndef QUERN_ATTENTION_CALL_H
#define QUERN_ATTENTION_CALL_H

#include "core/op.h"

#include <quern/attention.h>

typedef enum attention_op { ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION_OPS } attention_op;

/* The number of a tensor. */
#define A(field) OP_TENSOR(quern_attention_tensors, field)
enum { ATTENTION_TENSORS = OP_TENSOR_COUNT(quern_attention_tensors) };

/* Extents: fixed length B and N, varlen T. */
typedef enum attention_symbol {
    ATTENTION_B = 1,
    ATTENTION_B1,
    ATTENTION_NQ,
    ATTENTION_NKV,
    ATTENTION_TQ,
    ATTENTION_TKV,
    ATTENTION_H,
    ATTENTION_HKV,
    ATTENTION_D,
    ATTENTION_DV
} attention_symbol;

extern const op_family attention_family, attention_decode_family;
/* The parameters, which decoding has, too. */
enum { ATTENTION_PARAMS = 4 };
extern const op_param attention_param_rows[ATTENTION_PARAMS];

/* In attention.c. */
void attention_build(op_build *b);

#endif
