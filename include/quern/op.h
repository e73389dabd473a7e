/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op.h - EXPERIMENTAL: the operations as data, for commands, benchmarks, tests and bindings.
 *
 * This header is outside the promise of a stable ABI: it may change in any release. attention.h, nsa.h and so
 * on say beside each function what it computes. Here is what these functions check against: which tensors and
 * parameters there are, under which names, in which shapes, and which of them a call with given parameters
 * needs. `params` and `tensors` point to the functions' own structs.
 *
 * An operation is a forward pass and, where it has one, its backward pass, on one params struct and one
 * tensors struct. Tensors and parameters have numbers from 0 on, in the order of the structs' fields.
 */
#ifndef QUERN_OP_H
#define QUERN_OP_H

#include <quern/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QUERN_OP_TENSORS_MAX = 64, QUERN_OP_PARAMS_MAX = 32, QUERN_OP_PARAMS_BYTES = 512 };

/* What a tensor is to a pass, given the parameters and which other tensors are there. */
typedef enum quern_op_role {
    QUERN_OP_UNUSED = 0, /* not read */
    QUERN_OP_NEEDED = 1,
    QUERN_OP_OPTIONAL = 2,
    QUERN_OP_RESULT = 3,
    QUERN_OP_OPTIONAL_RESULT = 4,
    QUERN_OP_REFUSED = 5,        /* has no meaning with these parameters: the call refuses it */
    QUERN_OP_SOURCE_MISSING = 6, /* the gradient of a tensor that is not there */
    QUERN_OP_UPDATED = 7         /* needed, and written in place */
} quern_op_role;

typedef struct quern_op quern_op;

typedef enum quern_op_pass { QUERN_OP_FORWARD = 0, QUERN_OP_BACKWARD = 1 } quern_op_pass;

/* Texts are in static storage. */
typedef struct quern_op_info {
    const char *name, *help;           /* "nsa-compress" */
    const char *group;                 /* operations of one group share their parameters */
    quern_operation forward, backward; /* of plan.h; backward 0: there is none */
    int32_t tensor_count, param_count;
    int32_t varlen_by; /* the tensor whose presence means the shapes of a varlen batch; -1: there is none */
    size_t tensors_size, params_size; /* of the structs */
    const char *aside;    /* an option that asks for the tensors marked so; NULL: there are none */
    bool aside_valued;    /* it takes true or false */
    const char *asked[4]; /* extents of results that follow from no input; NULL past the last */
} quern_op_info;

typedef struct quern_op_tensor {
    const char *name, *field; /* in files, and in the struct */
    const char *other_name;   /* in files, with some parameters (quern_op_tensor_name()); NULL: none */
    /* "act", that of the operation's activations; "weight", act or f32; "float", f32, f16 or bf16; "f32",
     * "i32", "i64", "u8"; "index", i32 or i64; "codes", u8 or e2m1x2; "scale", u8 or e4m3; "exponent", u8 or
     * e8m0; "stored", float or u8; "any"; "same", that of the input of the same name */
    const char *dtype;
    int32_t gradient_of; /* or -1 */
    bool needed;    /* the forward pass needs it at default parameters, where no other tensor replaces it */
    bool input;     /* some parameters make it an input of the forward pass */
    bool trigger;   /* only the backward pass reads it: giving it asks for that pass */
    bool result[2]; /* by pass: some parameters make it a result */
    bool updated;   /* an input and a result at once: read, and written in place */
    bool aside;     /* a result that is written where it is asked for, or where the backward pass reads it */
    char fixed[64], varlen[64]; /* the shape, "B N H D"; varlen "": as fixed */
} quern_op_tensor;

typedef struct quern_op_param {
    char name[32];     /* "block-size" */
    const char *field; /* "block_size" */
    const char *help;
    char value[64];   /* what it takes: INT, NUMBER, true|false, or words: "mean|linear", "all|cmp,slc" */
    char initial[64]; /* its default, as such a text */
    bool option;      /* false: it is fixed, or follows from the tensors that are there */
} quern_op_param;

/* ---- the list ---- */

/* The i-th operation from 0 on; NULL past the last. */
QUERN_API const quern_op *quern_op_at(size_t i);
/* NULL if no operation has this name. */
QUERN_API const quern_op *quern_op_named(const char *name);
QUERN_API quern_status quern_op_get(const quern_op *op, quern_op_info *info);
/* All of them: info.tensor_count entries, info.param_count entries. May allocate for the call. */
QUERN_API quern_status quern_op_get_tensors(const quern_op *op, quern_op_tensor *tensors);
QUERN_API quern_status quern_op_get_params(const quern_op *op, quern_op_param *params);

/* The name of a tensor in files, with these parameters (NULL: the usual one); NULL where there is no such
 * tensor. */
QUERN_API const char *quern_op_tensor_name(const quern_op *op, const void *params, int32_t tensor);

/* ---- parameters ---- */

/* Writes a params struct (at most QUERN_OP_PARAMS_BYTES) of defaults. */
QUERN_API quern_status quern_op_defaults(const quern_op *op, void *params);
/* The same at a preset of the family's own ("tile256"). */
QUERN_API quern_status quern_op_preset(const quern_op *op, void *params, const char *preset);
/* Sets a parameter by its name (or field) from a text as in quern_op_param.value. The call itself checks
 * whether the operation accepts the number. */
QUERN_API quern_status quern_op_set(const quern_op *op, void *params, const char *name, const char *text);
/* The value of a parameter as such a text, cut to `bytes`. */
QUERN_API quern_status quern_op_text(const quern_op *op, const void *params, int32_t param, char *text,
                                     size_t bytes);
/* Sets the parameters that follow from which tensors are there: gates, block lists. */
QUERN_API quern_status quern_op_follow(const quern_op *op, void *params, const void *tensors);

/* ---- what a call expects ---- */

/* roles[i] of every tensor. */
QUERN_API quern_status quern_op_roles(const quern_op *op, quern_op_pass pass, const void *params,
                                      const void *tensors, quern_op_role *roles);
/* The dtype and shape, contiguous and without data, that each tensor with a role must have (a result's
 * where several are accepted: the usual one). Where inputs are absent or not accepted: the call's error.
 * `asked`: the extents that info.asked names; NULL: 0. Where an extent follows from what an index tensor
 * holds (swizzled of tokens_per_expert), that is read if it is in the host's memory and its data is not NULL;
 * if not, the extent is the most that it can be. */
QUERN_API quern_status quern_op_expect(const quern_op *op, quern_op_pass pass, const void *params,
                                       const void *tensors, const int64_t *asked, quern_tensor *expected);
/* One extent by its name in shapes, as far as the tensors that are there and the parameters decide it. */
QUERN_API quern_status quern_op_extent(const quern_op *op, const void *params, const void *tensors,
                                       const char *name, int64_t *extent);
/* Fills an index tensor in host memory that follows from the others (cu_seqlens_cmp of handed-in entries).
 * `tensors` are in host memory and hold it at its shape. QUERN_ERR_UNSUPPORTED: it does not follow. */
QUERN_API quern_status quern_op_complete(const quern_op *op, const void *params, const void *tensors,
                                         int32_t tensor, int32_t *data);

/* ---- calls: the same as the operation's own functions ---- */

QUERN_API quern_status quern_op_workspace(quern_context *ctx, const quern_op *op, quern_op_pass pass,
                                          const void *params, const void *tensors, size_t *bytes);
QUERN_API quern_status quern_op_run(quern_context *ctx, const quern_exec *exec, const quern_op *op,
                                    quern_op_pass pass, const void *params, const void *tensors,
                                    void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
