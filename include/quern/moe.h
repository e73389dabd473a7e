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
 * The router: which top_k experts each of T tokens goes to, with which weights, and the order of the experts' rows.
 * Scores are f32: softmax over the experts, sqrt(softplus), or sigmoid of the logits. The experts are those of the
 * greatest score + bias (ties: the lowest expert; NaN counts as least), in rising order, or a table's by token id, in the
 * table's order. Weights are the scores of the chosen without bias, divided by (their sum + 1e-20) where `renormalize`,
 * times route_scale.
 * A token's slot j is number t top_k + j. permutation lists the slots by expert, then by number; offsets says where each
 * expert's end. (DeepSeek-V3 and V4, Qwen, Mixtral route so.)
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
#define QUERN_MOE_ROUTE_PARAMS_INIT {sizeof(quern_moe_route_params), QUERN_MOE_SCORE_SOFTMAX, 1, false, 1.0f}

typedef struct quern_moe_route_tensors {
    size_t size;
    const quern_tensor *logits;           /* f32 [T, E]; or */
    const quern_tensor *hidden, *weight;  /* f32, f16, bf16: [T, D], [E, D]; logits = hidden weight^T in f32 */
    const quern_tensor *bias;             /* f32 [E], or NULL; not with a table */
    const quern_tensor *input_ids, *tid2eid; /* i32 [T], [V, top_k]: the table; or NULL */
    const quern_tensor *experts;          /* i32 [T, top_k]: written by forward, read by backward */
    const quern_tensor *weights;          /* f32 [T, top_k]: written by forward */
    const quern_tensor *offsets, *permutation; /* i32 [E], [T top_k]: written by forward */
    const quern_tensor *d_weights;        /* f32 [T, top_k]: read by backward */
    const quern_tensor *d_logits;         /* f32 [T, E], or NULL: written by backward */
    const quern_tensor *d_hidden;         /* hidden's dtype [T, D], or NULL: written by backward */
    const quern_tensor *d_weight;         /* f32 [E, D], or NULL: written by backward */
} quern_moe_route_tensors;
#define QUERN_MOE_ROUTE_TENSORS_INIT QUERN_SIZED(quern_moe_route_tensors)

QUERN_API quern_status quern_moe_route_workspace(quern_context *ctx, const quern_moe_route_params *params,
                                                 const quern_moe_route_tensors *tensors, size_t *bytes);
/* A token or expert id outside its range is QUERN_ERR_INVALID_ARGUMENT on the CPU; outputs are then untouched. */
QUERN_API quern_status quern_moe_route(quern_context *ctx, const quern_exec *exec, const quern_moe_route_params *params,
                                       const quern_moe_route_tensors *tensors, void *workspace, size_t workspace_bytes);
/* The gradient of the weights through the scores of the experts given; the bias has none, nor has the choice.
 * d sqrt(softplus) where the score is 0 is 0. */
QUERN_API quern_status quern_moe_route_backward_workspace(quern_context *ctx, const quern_moe_route_params *params,
                                                          const quern_moe_route_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_moe_route_backward(quern_context *ctx, const quern_exec *exec, const quern_moe_route_params *params,
                                                const quern_moe_route_tensors *tensors, void *workspace, size_t workspace_bytes);

/*
 * Experts' weights, repacked once into the layout that quern_nvfp4_gemm reads fastest, and exactly back. The layout is the
 * backend's; its version changes when its bytes do. Version 2, on the CPU: panels of 64 columns; 2304 bytes for 64 of K.
 */
enum { QUERN_MOE_PREPACK_VERSION = 2 };

typedef struct quern_moe_prepack_params {
    size_t size;
    bool inverse;                       /* from b_repacked to b_codes and b_scales */
    quern_nvfp4_codes_layout b_codes;
    quern_nvfp4_scales_layout b_scales;
} quern_moe_prepack_params;
#define QUERN_MOE_PREPACK_PARAMS_INIT QUERN_SIZED(quern_moe_prepack_params)

typedef struct quern_moe_prepack_tensors {
    size_t size;
    const quern_tensor *b_codes, *b_scales; /* as for quern_nvfp4_gemm, swizzled scales excepted where they are written */
    const quern_tensor *b_repacked;         /* u8 [E, quern_moe_prepack_bytes(N, K)] */
} quern_moe_prepack_tensors;
#define QUERN_MOE_PREPACK_TENSORS_INIT QUERN_SIZED(quern_moe_prepack_tensors)

/* Bytes of one expert's repacked matrix [K, N]; 0 where n or k is negative. */
QUERN_API int64_t quern_moe_prepack_bytes(int64_t n, int64_t k);
QUERN_API quern_status quern_moe_prepack_workspace(quern_context *ctx, const quern_moe_prepack_params *params,
                                                   const quern_moe_prepack_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_moe_prepack(quern_context *ctx, const quern_exec *exec, const quern_moe_prepack_params *params,
                                         const quern_moe_prepack_tensors *tensors, void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
