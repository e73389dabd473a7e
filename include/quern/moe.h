/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe.h - mixture-of-experts layers over NVFP4 weights. */
#ifndef QUERN_MOE_H
#define QUERN_MOE_H

#include <quern/nvfp4.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The router: which top_k experts each of T tokens goes to, with which weights, and the order of the experts'
 * rows. Scores are f32: softmax over the experts, sqrt(softplus), or sigmoid of the logits. The experts are
 * those of the greatest score + bias (ties: the lowest expert; NaN counts as least), in rising order, or a
 * table's by token id, in the table's order. Weights are the scores of the chosen without bias, divided by
 * (their sum + 1e-20) where `renormalize`, times route_scale. Slot j of token t is number t top_k + j.
 * permutation lists the slots by expert, then by number; offsets says where each expert's slots end.
 * (DeepSeek-V3 and V4, Qwen, Mixtral route so.)
 */
typedef enum quern_moe_score {
    QUERN_MOE_SCORE_SOFTMAX = 0,
    QUERN_MOE_SCORE_SQRT_SOFTPLUS = 1,
    QUERN_MOE_SCORE_SIGMOID = 2
} quern_moe_score;

typedef struct quern_moe_route_params {
    size_t size;
    quern_moe_score score;
    int64_t top_k; /* 1 ... E */
    bool renormalize;
    float route_scale;
} quern_moe_route_params;
#define QUERN_MOE_ROUTE_PARAMS_INIT                                                                          \
    {                                                                                                        \
        sizeof(quern_moe_route_params), QUERN_MOE_SCORE_SOFTMAX, 1, false, 1.0f                              \
    }

typedef struct quern_moe_route_tensors {
    size_t size;
    const quern_tensor *logits;          /* f32, f16, bf16 [T, E]; or */
    const quern_tensor *hidden, *weight; /* f32, f16, bf16: [T, D], [E, D]; logits = hidden weight^T in f32 */
    const quern_tensor *bias;            /* f32 [E], or NULL; not with a table */
    const quern_tensor *input_ids, *tid2eid;   /* i32 or i64 [T], [V, top_k]: the table; or NULL */
    const quern_tensor *experts;               /* i32 [T, top_k]: written by forward, read by backward */
    const quern_tensor *weights;               /* f32 [T, top_k]: written by forward */
    const quern_tensor *offsets, *permutation; /* i32 [E], [T top_k]: written by forward */
    const quern_tensor *d_weights;             /* f32 [T, top_k]: read by backward */
    const quern_tensor *d_logits; /* [T, E], logits' dtype or f32; or NULL: written by backward */
    const quern_tensor *d_hidden; /* hidden's dtype [T, D], or NULL: written by backward */
    const quern_tensor *d_weight; /* f32 [E, D], or NULL: written by backward */
} quern_moe_route_tensors;
#define QUERN_MOE_ROUTE_TENSORS_INIT QUERN_SIZED(quern_moe_route_tensors)

QUERN_API quern_status quern_moe_route_workspace(quern_context *ctx, const quern_moe_route_params *params,
                                                 const quern_moe_route_tensors *tensors, size_t *bytes);
/* A token or expert id outside its range is QUERN_ERR_INVALID_ARGUMENT on the CPU; outputs are then
 * untouched. */
QUERN_API quern_status quern_moe_route(quern_context *ctx, const quern_exec *exec,
                                       const quern_moe_route_params *params,
                                       const quern_moe_route_tensors *tensors, void *workspace,
                                       size_t workspace_bytes);
/* The gradient of the weights through the scores of the given experts. The bias and the choice have none.
 * d sqrt(softplus) where the score is 0 is 0. */
QUERN_API quern_status quern_moe_route_backward_workspace(quern_context *ctx,
                                                          const quern_moe_route_params *params,
                                                          const quern_moe_route_tensors *tensors,
                                                          size_t *bytes);
QUERN_API quern_status quern_moe_route_backward(quern_context *ctx, const quern_exec *exec,
                                                const quern_moe_route_params *params,
                                                const quern_moe_route_tensors *tensors, void *workspace,
                                                size_t workspace_bytes);

/*
 * Experts' weights, repacked once into the layout that quern_nvfp4_gemm reads fastest, and exactly back. The
 * layout is the device's, its size too; its version changes when its bytes do. Version 3, on the CPU: panels
 * of 64 columns; 2304 bytes for 64 of K. On a GPU units have the same size, and the order of its
 * products' operands.
 */
enum { QUERN_MOE_PREPACK_VERSION = 3 };

typedef struct quern_moe_prepack_params {
    size_t size;
    bool inverse; /* from b_repacked to b_codes and b_scales */
    quern_nvfp4_codes_layout b_codes;
    quern_nvfp4_scales_layout b_scales;
    uint8_t reserved[4]; /* 0; later fields stand here */
} quern_moe_prepack_params;
#define QUERN_MOE_PREPACK_PARAMS_INIT QUERN_SIZED(quern_moe_prepack_params)

typedef struct quern_moe_prepack_tensors {
    size_t size;
    /* as for quern_nvfp4_gemm, swizzled scales excepted where they are written */
    const quern_tensor *b_codes, *b_scales;
    const quern_tensor *b_repacked; /* u8 [E, quern_nvfp4_repacked_bytes()] */
} quern_moe_prepack_tensors;
#define QUERN_MOE_PREPACK_TENSORS_INIT QUERN_SIZED(quern_moe_prepack_tensors)

QUERN_API quern_status quern_moe_prepack_workspace(quern_context *ctx, const quern_moe_prepack_params *params,
                                                   const quern_moe_prepack_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_moe_prepack(quern_context *ctx, const quern_exec *exec,
                                         const quern_moe_prepack_params *params,
                                         const quern_moe_prepack_tensors *tensors, void *workspace,
                                         size_t workspace_bytes);

/*
 * The whole layer: router, experts, shared expert.
 *     out[t] = sum over slots j of weights[t][j] expert(e[t][j])(hidden[t]) + shared(hidden[t])
 *     expert(e)(x) = act(x gate_up[e] + gate_up_bias[e]) down[e] + down_bias[e]
 * act is SwiGLU as of quern_nvfp4_fused_quantize. Slots are added in order in f32, the shared expert without
 * route_scale, and the sum is rounded once to out's dtype. Values between the products are in bf16 where
 * hidden is, else in f32.
 *
 * Experts are in NVFP4, the columns of gate_up interleaved by `granularity`, or in floats, gate_up in two
 * halves. The shared expert is in either, and has the same activation.
 *
 * a4: the experts' products take NVFP4 activations. hidden is quantised with a computed global per token, or
 * with gate_up_input_global, one per expert; the activation, in f32, likewise. A number that is not finite is
 * then QUERN_ERR_INVALID_ARGUMENT on the CPU. The shared expert's activations are not quantised.
 *
 * The backward takes the forward's inputs and d_out, and recomputes the whole forward except the last
 * products. Experts in NVFP4, and the shared expert, are frozen. Those in floats have gradients, summed in
 * f32 over their tokens in order; an expert without tokens gets zeros. Gradients pass straight through
 * quantised activations; a clamp passes none beyond its limit. bias, and the choice of experts, have none.
 *
 * Instead of a router (weight, or logits) the routing may be handed in, as experts and weights. The weights
 * are taken as they are: score, renormalize and route_scale do not matter, and a token may name an expert
 * twice. Their gradient is d_weights. An expert id outside 0 ... E - 1 is QUERN_ERR_INVALID_ARGUMENT on the
 * CPU; on a GPU it sets QUERN_STATUS_BAD_ID, and its slot gives nothing.
 *
 * T is the product of hidden's leading extents. Within a context a token's result does not depend on the
 * other tokens, to the bit. A call that fails writes nothing but the workspace.
 */
typedef struct quern_moe_params {
    size_t size;
    quern_moe_score score; /* of the router, as the next three */
    int64_t top_k;
    bool renormalize;
    float route_scale;
    float limit, alpha, beta; /* of SwiGLU */
    int64_t granularity;      /* of gate and up in NVFP4 columns: a divisor of 32 */
    bool a4;
    /* I and Is; 0: from the tensors. Needed where these are repacked */
    int64_t intermediate, shared_intermediate;
} quern_moe_params;
#define QUERN_MOE_PARAMS_INIT                                                                                \
    {                                                                                                        \
        sizeof(quern_moe_params), QUERN_MOE_SCORE_SOFTMAX, 1, false, 1.0f, 0.0f, 1.0f, 0.0f, 8, false, 0, 0  \
    }

typedef struct quern_moe_tensors {
    size_t size;
    const quern_tensor *hidden; /* f32, f16, bf16 [.., D] */
    const quern_tensor *logits; /* f32, f16, bf16 [.., E]; or */
    const quern_tensor *weight; /* f32, f16, bf16 [E, D]: the router's; or neither, and experts and weights */
    const quern_tensor *bias;   /* as for quern_moe_route, as the next two */
    const quern_tensor *input_ids, *tid2eid; /* [..], [V, top_k] */
    /* NVFP4: [E, D/2, 2 I], [E, D/16, 2 I], or repacked [E, bytes]; global [], [E], or [E, 2], gate's and
     * up's; NULL: 1. */
    const quern_tensor *gate_up_codes, *gate_up_scales, *gate_up_repacked, *gate_up_global;
    /* [E, I/2, D], [E, I/16, D], or [E, bytes]; [] or [E]. */
    const quern_tensor *down_codes, *down_scales, *down_repacked, *down_global;
    const quern_tensor *gate_up, *down; /* or floats: [E, 2 I, D], [E, D, I] */
    /* f32, f16, bf16 [E, 2 I], with gate_up's columns, and [E, D]; or NULL */
    const quern_tensor *gate_up_bias, *down_bias;
    /* f32 [E] or [], with a4; NULL: computed, one per row */
    const quern_tensor *gate_up_input_global, *down_input_global;
    /* f32, f16, bf16 [Is, D], [Is, D], [D, Is]; or NULL */
    const quern_tensor *shared_gate, *shared_up, *shared_down;
    /* Or in NVFP4: [D/2, 2 Is], [D/16, 2 Is], or [bytes]; [] or [2]. */
    const quern_tensor *shared_gate_up_codes, *shared_gate_up_scales, *shared_gate_up_repacked,
        *shared_gate_up_global;
    const quern_tensor *shared_down_codes, *shared_down_scales,
        *shared_down_repacked;              /* [Is/2, D], [Is/16, D] */
    const quern_tensor *shared_down_global; /* [] */
    const quern_tensor *out;                /* hidden's dtype [.., D]: written by forward */
    /* i32, f32 [T, top_k], or NULL: written by forward; without a router read by both */
    const quern_tensor *experts, *weights;
    const quern_tensor *offsets, *permutation; /* i32 [E], [T top_k], or NULL: written by forward */
    const quern_tensor *d_out;                 /* hidden's dtype [.., D]: read by backward, which writes: */
    const quern_tensor *d_hidden;              /* hidden's dtype [.., D], or NULL */
    const quern_tensor *d_logits, *d_weight;   /* [.., E] in logits' dtype, f32 [E, D], or NULL */
    const quern_tensor *d_weights;             /* f32 [T, top_k]: of the routing weights, or NULL */
    const quern_tensor *d_gate_up_bias, *d_down_bias; /* f32 [E, 2 I], [E, D], or NULL */
    /* f32, or the weight's dtype: [E, 2 I, D], [E, D, I], or NULL */
    const quern_tensor *d_gate_up, *d_down;
} quern_moe_tensors;
#define QUERN_MOE_TENSORS_INIT QUERN_SIZED(quern_moe_tensors)

QUERN_API quern_status quern_moe_forward_workspace(quern_context *ctx, const quern_moe_params *params,
                                                   const quern_moe_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_moe_forward(quern_context *ctx, const quern_exec *exec,
                                         const quern_moe_params *params, const quern_moe_tensors *tensors,
                                         void *workspace, size_t workspace_bytes);
QUERN_API quern_status quern_moe_backward_workspace(quern_context *ctx, const quern_moe_params *params,
                                                    const quern_moe_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_moe_backward(quern_context *ctx, const quern_exec *exec,
                                          const quern_moe_params *params, const quern_moe_tensors *tensors,
                                          void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
