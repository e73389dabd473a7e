/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ops.h - the library's operations for the command, as quern/op.h describes them; read once. */
#ifndef QUERN_TOOLS_OPS_H
#define QUERN_TOOLS_OPS_H

#include "options.h"

#include <quern/attention.h>
#include <quern/nsa.h>
#include <quern/op.h>

/* Parameters of any operation. Benchmarks read those of known operations by their type. */
typedef union any_params {
    quern_attention_params attention;
    quern_nsa_params nsa;
    char bytes[QUERN_OP_PARAMS_BYTES];
} any_params;

/* A tensors struct of any operation. */
typedef struct any_tensors {
    size_t size;
    const quern_tensor *t[QUERN_OP_TENSORS_MAX];
} any_tensors;

typedef struct operation {
    const char *name;
    const quern_op *op;
    quern_op_info info;
    quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
    quern_op_param params[QUERN_OP_PARAMS_MAX];
    option_row options[QUERN_OP_PARAMS_MAX]; /* OPTION_PARAM; base: any_params */
    size_t option_count;
    const char *words[QUERN_OP_PARAMS_MAX][3]; /* of the options */
    struct operation *next;
} operation;

/* NULL where there is none of the name. */
const operation *operation_named(const char *name);
/* The number of a tensor; -1 where there is none of the name. */
int tensor_named(const operation *op, const char *name);
/* Whether the operation has a parameter of this option. */
bool has_option(const operation *op, const char *name);

/* Default parameters, and no tensors; op NULL: zeros. */
any_params params_init(const operation *op);
any_tensors tensors_init(const operation *op);
/* Sets a preset: an exit code after a message. */
int params_preset(const operation *op, any_params *params, const char *preset);

#endif
