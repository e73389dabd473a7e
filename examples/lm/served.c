/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * served.c - the experts as a server holds them: in bf16, or quantised to NVFP4, and the whole mixture by
 * quern_moe_forward(). The shared network is in bf16 in both, so that the two differ by the experts alone.
 */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

#include <quern/moe.h>

typedef struct served_layer {
    uint16_t *gate_up, *down;                                 /* bf16 [E, 2 I, D], [E, D, I]; or */
    uint8_t *up_codes, *up_scales, *down_codes, *down_scales; /* NVFP4, gate and up interleaved */
    float *up_global, *down_global;                           /* [E] */
    uint16_t *shared;                                         /* bf16: gate and up [I, D], down [D, I] */
} served_layer;

struct lm_served {
    lm_expert_weights weights;
    served_layer layer[MAX_LAYERS];
};

static uint16_t bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* to [cols][rows] = w [rows][cols] */
static void transpose(const float *w, int64_t rows, int64_t cols, uint16_t *to)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) to[c * rows + r] = bf16(w[r * cols + c]);
}

static bool to_bf16(const lm_model *m, int32_t layer, served_layer *s)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, inner = config_expert_inner(c), size = w * inner;
    const float *w1 = layer_param(m, layer, L_W1)->value + size,
                *w3 = layer_param(m, layer, L_W3)->value + size,
                *w2 = layer_param(m, layer, L_W2)->value + size;
    s->gate_up = malloc((size_t)(c->experts * 2 * size) * 2);
    s->down = malloc((size_t)(c->experts * size) * 2);
    if (s->gate_up == NULL || s->down == NULL) return failure("no memory for the experts") == 0;
    for (int64_t e = 0; e < c->experts; e++) {
        transpose(w1 + e * size, w, inner, s->gate_up + e * 2 * size);
        transpose(w3 + e * size, w, inner, s->gate_up + (e * 2 + 1) * size);
        transpose(w2 + e * size, inner, w, s->down + e * size);
    }
    return true;
}

static bool quantize(lm_model *m, const float *x, int64_t experts, int64_t k, int64_t n, uint8_t *to_codes,
                     uint8_t *to_scales, float *to_global)
{
    const quern_tensor from = view(x, QUERN_F32, 3, experts, k, n, 0),
                       codes = view(to_codes, QUERN_U8, 3, experts, k / 2, n, 0),
                       scales = view(to_scales, QUERN_U8, 3, experts, k / QUERN_NVFP4_BLOCK, n, 0),
                       global = view(to_global, QUERN_F32, 1, experts, 0, 0, 0);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    p.global_per = QUERN_NVFP4_GLOBAL_EXPERT;
    p.weight = true;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    t.x = &from;
    t.codes = &codes;
    t.scales = &scales;
    t.global = &global;
    size_t bytes;
    return done(quern_nvfp4_quantize_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_nvfp4_quantize(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

/* halves [rows][2 I] -> runs of gate and up in turn */
static bool interleave(lm_model *m, const float *halves, int64_t rows, int64_t columns, float *runs)
{
    const quern_tensor x = view(halves, QUERN_F32, 2, rows, columns, 0, 0),
                       out = view(runs, QUERN_F32, 2, rows, columns, 0, 0);
    const quern_nvfp4_interleave_params p = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT;
    quern_nvfp4_interleave_tensors t = QUERN_NVFP4_INTERLEAVE_TENSORS_INIT;
    t.x = &x;
    t.out = &out;
    size_t bytes;
    return done(quern_nvfp4_interleave_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_nvfp4_interleave(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

static bool to_nvfp4(lm_model *m, int32_t layer, served_layer *s)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, inner = config_expert_inner(c), size = w * inner, e = c->experts;
    const float *w1 = layer_param(m, layer, L_W1)->value + size,
                *w3 = layer_param(m, layer, L_W3)->value + size,
                *w2 = layer_param(m, layer, L_W2)->value + size;
    float *halves = malloc((size_t)(e * 2 * size) * 4), *runs = malloc((size_t)(e * 2 * size) * 4);
    s->up_codes = malloc((size_t)(e * size));
    s->up_scales = malloc((size_t)(e * 2 * size / QUERN_NVFP4_BLOCK));
    s->up_global = malloc((size_t)e * 4);
    s->down_codes = malloc((size_t)(e * size / 2));
    s->down_scales = malloc((size_t)(e * size / QUERN_NVFP4_BLOCK));
    s->down_global = malloc((size_t)e * 4);
    if (!halves || !runs || !s->up_codes || !s->up_scales || !s->up_global || !s->down_codes ||
        !s->down_scales || !s->down_global) {
        free(halves), free(runs);
        return failure("no memory for the experts") == 0;
    }
    for (int64_t r = 0; r < e * w; r++) {
        memcpy(halves + r * 2 * inner, w1 + r * inner, (size_t)inner * 4);
        memcpy(halves + (r * 2 + 1) * inner, w3 + r * inner, (size_t)inner * 4);
    }
    const bool ok = interleave(m, halves, e * w, 2 * inner, runs) &&
                    quantize(m, runs, e, w, 2 * inner, s->up_codes, s->up_scales, s->up_global) &&
                    quantize(m, w2, e, inner, w, s->down_codes, s->down_scales, s->down_global);
    free(halves), free(runs);
    return ok;
}

bool served_create(lm_model *m, lm_expert_weights weights)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, inner = config_expert_inner(c), size = w * inner;
    if (weights == EXPERTS_TRAINED) return true;
    if (c->experts == 0) return failure("the checkpoint holds no experts: --experts trains some") == 0;
    m->served = calloc(1, sizeof *m->served);
    bool ok = m->served != NULL || failure("no memory for the experts") == 0;
    if (ok) m->served->weights = weights;
    for (int32_t l = 0; ok && l < c->layers; l++) {
        served_layer *s = &m->served->layer[l];
        s->shared = malloc((size_t)(3 * size) * 2);
        ok = s->shared != NULL || failure("no memory for the shared expert") == 0;
        if (!ok) break;
        transpose(layer_param(m, l, L_W1)->value, w, inner, s->shared);
        transpose(layer_param(m, l, L_W3)->value, w, inner, s->shared + size);
        transpose(layer_param(m, l, L_W2)->value, inner, w, s->shared + 2 * size);
        ok = weights == EXPERTS_BF16 ? to_bf16(m, l, s) : to_nvfp4(m, l, s);
    }
    return ok;
}

void served_free(lm_served *served, int32_t layers)
{
    for (int32_t l = 0; served != NULL && l < layers; l++) {
        served_layer *s = &served->layer[l];
        void *const all[] = {s->gate_up,     s->down,      s->up_codes,    s->up_scales, s->down_codes,
                             s->down_scales, s->up_global, s->down_global, s->shared};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    free(served);
}

bool served_forward(lm_model *m, int32_t layer, const float *h, float *x, int32_t n)
{
    const lm_config *c = &m->config;
    const served_layer *s = &m->served->layer[layer];
    const int64_t w = c->width, inner = config_expert_inner(c), size = w * inner, e = c->experts;
    float *y = m->scratch[0];
    const quern_tensor hidden = view(h, QUERN_F32, 2, n, w, 0, 0), out = view(y, QUERN_F32, 2, n, w, 0, 0),
                       weight = view(layer_param(m, layer, L_ROUTER)->value, QUERN_F32, 2, e, w, 0, 0),
                       bias = view(layer_param(m, layer, L_BALANCE)->value, QUERN_F32, 1, e, 0, 0, 0),
                       gate = view(s->shared, QUERN_BF16, 2, inner, w, 0, 0),
                       up = view(s->shared + size, QUERN_BF16, 2, inner, w, 0, 0),
                       back = view(s->shared + 2 * size, QUERN_BF16, 2, w, inner, 0, 0),
                       gate_up = view(s->gate_up, QUERN_BF16, 3, e, 2 * inner, w, 0),
                       down = view(s->down, QUERN_BF16, 3, e, w, inner, 0),
                       up_codes = view(s->up_codes, QUERN_U8, 3, e, w / 2, 2 * inner, 0),
                       up_scales = view(s->up_scales, QUERN_U8, 3, e, w / QUERN_NVFP4_BLOCK, 2 * inner, 0),
                       up_global = view(s->up_global, QUERN_F32, 1, e, 0, 0, 0),
                       down_codes = view(s->down_codes, QUERN_U8, 3, e, inner / 2, w, 0),
                       down_scales = view(s->down_scales, QUERN_U8, 3, e, inner / QUERN_NVFP4_BLOCK, w, 0),
                       down_global = view(s->down_global, QUERN_F32, 1, e, 0, 0, 0);
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    p.score = QUERN_MOE_SCORE_SQRT_SOFTPLUS;
    p.top_k = c->top;
    p.renormalize = true;
    quern_moe_tensors t = QUERN_MOE_TENSORS_INIT;
    t.hidden = &hidden;
    t.weight = &weight;
    t.bias = &bias;
    t.shared_gate = &gate;
    t.shared_up = &up;
    t.shared_down = &back;
    t.out = &out;
    if (m->served->weights == EXPERTS_BF16) {
        t.gate_up = &gate_up;
        t.down = &down;
    } else {
        t.gate_up_codes = &up_codes;
        t.gate_up_scales = &up_scales;
        t.gate_up_global = &up_global;
        t.down_codes = &down_codes;
        t.down_scales = &down_scales;
        t.down_global = &down_global;
    }
    size_t bytes;
    if (!done(quern_moe_forward_workspace(m->ctx, &p, &t, &bytes)) || !reserve(m, bytes) ||
        !done(quern_moe_forward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes)))
        return false;
    for (int64_t i = 0; i < n * w; i++) x[i] += y[i];
    return true;
}
