/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* experts_onednn.c - oneDNN's bf16 products beside nvfp4-gemm's: the same rows and weights, dequantised. */
#include "bench_experts.h"

#include "peer_onednn.h"

#include <quern/nvfp4.h>

#include <stdlib.h>

/* The weight in bf16, to be freed; NULL without memory. */
static void *dequantised(const experts_case *c, quern_context *ctx)
{
    const int64_t k = c->depth, n = c->width, codes_shape[] = {k / 2, n}, scales_shape[] = {k / 16, n},
                  shape[] = {k, n};
    uint8_t *codes, *scales;
    float one = 1;
    if (!experts_weight(k, n, &codes, &scales)) return NULL;
    void *weight = bench_allocate((size_t)(k * n) * 2 + 1);
    const quern_tensor views[] = {quern_tensor_contiguous(codes, QUERN_U8, 2, codes_shape),
                                  quern_tensor_contiguous(scales, QUERN_U8, 2, scales_shape),
                                  quern_tensor_contiguous(&one, QUERN_F32, 0, NULL),
                                  quern_tensor_contiguous(weight, QUERN_BF16, 2, shape)};
    quern_nvfp4_dequantize_params p = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors t = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    p.weight = true;
    t.codes = &views[0];
    t.scales = &views[1];
    t.global = &views[2];
    t.x = &views[3];
    if (weight != NULL && quern_nvfp4_dequantize(ctx, NULL, &p, &t, NULL, 0) != QUERN_OK) {
        free(weight);
        weight = NULL;
    }
    free(codes);
    free(scales);
    return weight;
}

static void *open_onednn(const experts_case *c, const job *j, quern_context *ctx)
{
    const int a = tensor_named(j->op, "A");
    if (c->dtype != QUERN_BF16 || j->tensors.t[a] == NULL) return NULL;
    void *weight = dequantised(c, ctx);
    void *peer = weight != NULL ? peer_gemm_open(c->experts, c->rows, c->width, c->depth, weight,
                                                 j->tensors.t[a]->data, quern_context_threads(ctx))
                                : NULL;
    free(weight);
    return peer;
}

const experts_beside experts_onednn = {"oneDNN", open_onednn, peer_gemm_ms, peer_gemm_close};
