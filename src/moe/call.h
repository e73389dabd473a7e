/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * call.h - the layer's tensors, extents and call.
 */
#ifndef QUERN_MOE_CALL_H
#define QUERN_MOE_CALL_H

#include "core/op.h"

#include <quern/moe.h>

typedef enum moe_op { MOE_FORWARD, MOE_BACKWARD, MOE_OPS } moe_op;

/* The number of a tensor. */
#define M(field) OP_TENSOR(quern_moe_tensors, field)
enum { MOE_TENSORS = OP_TENSOR_COUNT(quern_moe_tensors) };

/* Extents; those named ..._BYTES are of repacked matrices. */
typedef enum moe_symbol {
    MS_T = 1,
    MS_D,
    MS_E,
    MS_K,
    MS_TK,
    MS_V,
    MS_I,
    MS_2I,
    MS_UP_BYTES,
    MS_DOWN_BYTES,
    MS_IS,
    MS_2IS,
    MS_SHARED_UP_BYTES,
    MS_SHARED_DOWN_BYTES
} moe_symbol;
enum { ML_TOKENS = OP_LEAD, ML_UP_GLOBAL, ML_DOWN_GLOBAL, ML_SHARED_GLOBAL, ML_UP_INPUT, ML_DOWN_INPUT };

enum { MOE_TOKENS_BESIDE = 512 /* of a forward whose shared expert runs beside the routed ones */ };

/* The steps of a backward with a shared expert, which has most. */
enum {
    MOE_PROGRAM_BYTES = 2 * OP_STEP_BYTES(route) + 9 * OP_STEP_BYTES(permute) + 2 * OP_STEP_BYTES(quantise) +
                        OP_STEP_BYTES(dequantise) + 8 * OP_STEP_BYTES(grouped_gemm) +
                        4 * OP_STEP_BYTES(swiglu) + 2 * OP_STEP_BYTES(expert_sums) +
                        2 * OP_STEP_BYTES(grouped_outer) + OP_STEP_BYTES(combine)
};

typedef struct moe_call {
    op_call head;
    quern_moe_params params;
    quern_tensor up_global, down_global, up_input, down_input, shared_up_global,
        shared_down_global; /* check_data() reads them */
    _Alignas(op_step) char program[MOE_PROGRAM_BYTES];
} moe_call;

extern const op_family moe_family, moe_route_family;

static inline moe_call *moe_call_of(const op_build *b)
{
    return (moe_call *)b->call;
}

/* The router's results. */
typedef struct moe_routing {
    quern_tensor experts, weights, ends, slots;
} moe_routing;

/* An operand of the experts' products: floats, or NVFP4 codes with their scales and globals. */
typedef struct moe_rows {
    quern_tensor x, codes, scales, global;
    quantise_global per;
} moe_rows;

/* Whether the routing is handed in, as experts and weights, instead of made by a router. */
static inline bool moe_is_routed(const op_call *call)
{
    const quern_tensor *const *t = call->given;
    return (t[M(experts)] != NULL || t[M(weights)] != NULL) && t[M(weight)] == NULL && t[M(logits)] == NULL;
}

/* In parts.c. */
moe_routing moe_route(op_build *b, const quern_tensor *x);
/* The experts' input: the tokens' rows, sorted by expert. */
moe_rows moe_gather(op_build *b, const quern_tensor *x, const moe_routing *r);
/* Quantises the rows to NVFP4, with given globals or one a row. */
moe_rows moe_quantised(op_build *b, const quern_tensor *x, const quern_tensor *slots, int64_t rows,
                       const quern_tensor *ends, const quern_tensor *given);
/* x gate_up + bias as f32 [R, 2 I], or with the activation in `dtype` [R, I]. */
quern_tensor moe_up(op_build *b, const moe_rows *rows, const quern_tensor *ends, bool activate,
                    quern_dtype dtype);
/* act down + bias as f32 [R, D]. */
quern_tensor moe_down(op_build *b, const moe_rows *rows, const quern_tensor *ends);
/* The same products of the shared expert; absent views if there is none. */
quern_tensor moe_shared_up(op_build *b, const quern_tensor *x, bool activate);
quern_tensor moe_shared_down(op_build *b, const quern_tensor *act);
bool moe_has_shared(const op_call *call);
/* SwiGLU whose gate and up alternate by runs of so many columns. */
swiglu_rule moe_rule(const moe_call *c, int64_t granularity);
/* SwiGLU of h [R, 2 I] in `dtype`. */
quern_tensor moe_activate(op_build *b, const quern_tensor *h, int64_t granularity, quern_dtype dtype);
/* The length of the runs in which gate and up alternate in the experts' (or the shared expert's) columns. */
int64_t moe_runs(const moe_call *c, bool shared);
/* The gradient of the operand of gate_up, or of down, in f32, from the product's gradient. */
quern_tensor moe_up_gradient(op_build *b, const quern_tensor *d_h, const quern_tensor *ends);
quern_tensor moe_down_gradient(op_build *b, const quern_tensor *d_y, const quern_tensor *ends);
quern_tensor moe_shared_up_gradient(op_build *b, const quern_tensor *d_h);
quern_tensor moe_shared_down_gradient(op_build *b, const quern_tensor *d_y);

/* In layer.c. */
void moe_build(op_build *b);

#endif
