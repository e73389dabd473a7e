/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.c - the model's arrays: shapes, first values, how they are trained. */
#include "lm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* An array as it is declared; without rows the configuration has no use for it. */
typedef struct spec {
    const char *name;
    int64_t rows, cols, stack;
    lm_rule rule;
    float rate;
    float spread; /* of the normal distribution that it starts from; below 0: it starts from ones */
} spec;

static bool declare(lm_param *p, const spec *s, const char *prefix, uint64_t *seed)
{
    *p = (lm_param){.rows = s->rows, .cols = s->cols, .stack = s->stack, .rule = s->rule, .rate = s->rate};
    snprintf(p->name, sizeof p->name, "%s%s", prefix, s->name);
    const size_t n = (size_t)(s->rows * s->cols);
    const bool adamw = s->rule == RULE_ADAMW, moments = adamw || s->rule == RULE_MUON;
    if (n == 0) return true;
    p->value = malloc(n * 4);
    p->grad = calloc(n, 4);
    p->first = moments ? calloc(n, 4) : NULL;
    p->second = adamw ? calloc(n, 4) : NULL;
    if (!p->value || !p->grad || (moments && !p->first) || (adamw && !p->second)) return false;
    for (size_t i = 0; i < n; i++)
        p->value[i] = s->spread < 0.0f ? 1.0f : s->spread > 0.0f ? s->spread * random_normal(seed) : 0.0f;
    return true;
}

static void attention_specs(const lm_config *c, lm_kind kind, spec s[L_COUNT])
{
    const bool nsa = kind == KIND_NSA, v4 = kind >= KIND_WINDOW, csa = kind == KIND_CSA;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim, ratio = config_ratio(c, kind),
                  series = csa ? 2 : 1, compressed = ratio > 0;
    const float in_w = 1.0f / sqrtf((float)w);
    s[L_NORM1] = (spec){"norm1", 1, w, 1, RULE_ADAMW, 0.3f, -1.0f};
    s[L_Q] = (spec){"q", w, w, 1, RULE_MUON, 0.0f, in_w};
    s[L_K] = (spec){"k", w, kv, 1, RULE_MUON, 0.0f, in_w};
    s[L_V] = (spec){"v", v4 ? 0 : w, kv, 1, RULE_MUON, 0.0f, in_w};
    s[L_O] = (spec){"o", w, w, 1, RULE_MUON, 0.0f, 0.0f};
    s[L_GATE] = (spec){"gate", nsa ? c->heads * 3 : 0, dim, 1, RULE_ADAMW, 0.3f, 0.0f};
    s[L_KV_NORM] = (spec){"kv_norm", v4, dim, 1, RULE_ADAMW, 0.3f, -1.0f};
    s[L_SINK] = (spec){"sink", v4, c->heads, 1, RULE_ADAMW, 0.3f, 0.0f};
    s[L_CMP] = (spec){"compress", compressed * w, 2 * series * dim, 1, RULE_MUON, 0.0f, in_w};
    s[L_CMP_BIAS_A] = (spec){"compress.bias_a", ratio, dim, 1, RULE_ADAMW, 0.3f, 0.0f};
    s[L_CMP_BIAS_B] = (spec){"compress.bias_b", csa ? ratio : 0, dim, 1, RULE_ADAMW, 0.3f, 0.0f};
    s[L_CMP_NORM] = (spec){"compress.norm", compressed, dim, 1, RULE_ADAMW, 0.3f, -1.0f};
    s[L_INDEX_CMP] = (spec){"index.compress", csa ? w : 0, 4 * dim, 1, RULE_MUON, 0.0f, in_w};
    s[L_INDEX_BIAS_A] = (spec){"index.bias_a", csa ? ratio : 0, dim, 1, RULE_ADAMW, 0.3f, 0.0f};
    s[L_INDEX_BIAS_B] = (spec){"index.bias_b", csa ? ratio : 0, dim, 1, RULE_ADAMW, 0.3f, 0.0f};
    s[L_INDEX_NORM] = (spec){"index.norm", csa, dim, 1, RULE_ADAMW, 0.3f, -1.0f};
    s[L_INDEX_Q] = (spec){"index.q", csa ? w : 0, w, 1, RULE_MUON, 0.0f, in_w};
    s[L_INDEX_HEADS] = (spec){"index.heads", csa, c->heads, 1, RULE_ADAMW, 0.3f, -1.0f};
}

static void mlp_specs(const lm_config *c, spec s[L_COUNT])
{
    const int64_t w = c->width, inner = config_expert_inner(c), stack = 1 + c->experts;
    const float in_w = 1.0f / sqrtf((float)w), in_inner = 1.0f / sqrtf((float)inner);
    s[L_NORM2] = (spec){"norm2", 1, w, 1, RULE_ADAMW, 0.3f, -1.0f};
    s[L_W1] = (spec){"w1", stack * w, inner, stack, RULE_MUON, 0.0f, in_w};
    s[L_W3] = (spec){"w3", stack * w, inner, stack, RULE_MUON, 0.0f, in_w};
    s[L_W2] = (spec){"w2", stack * inner, w, stack, RULE_MUON, 0.0f, 0.1f * in_inner};
    s[L_ROUTER] = (spec){"router", c->experts, w, 1, RULE_ADAMW, 0.3f, in_w};
    s[L_BALANCE] = (spec){"balance", c->experts > 0, c->experts, 1, RULE_BALANCE, 0.003f, 0.0f};
}

bool params_create(lm_model *m, uint64_t seed)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width;
    const spec first[P_LAYERS] = {
        [P_BYTE] = {"embed.byte", BYTES, w, 1, RULE_ADAMW, 1.0f, 0.5f},
        [P_PAIR] = {"embed.pair", HASH_ROWS, w, 1, RULE_ADAMW, 1.0f, 0.1f},
        [P_TRIPLE] = {"embed.triple", HASH_ROWS, w, 1, RULE_ADAMW, 1.0f, 0.1f},
        [P_NORM] = {"norm", 1, w, 1, RULE_ADAMW, 0.3f, -1.0f},
        [P_HEAD] = {"head", w, BYTES, 1, RULE_ADAMW, 0.3f, 0.02f},
    };
    m->param_count = P_LAYERS + c->layers * L_COUNT;
    m->params = calloc((size_t)m->param_count, sizeof *m->params);
    bool ok = m->params != NULL;
    for (int i = 0; ok && i < P_LAYERS; i++) ok = declare(&m->params[i], &first[i], "", &seed);
    for (int32_t l = 0; ok && l < c->layers; l++) {
        spec list[L_COUNT];
        char prefix[24];
        snprintf(prefix, sizeof prefix, "layers.%d.", l);
        attention_specs(c, config_kind(c, l), list);
        mlp_specs(c, list);
        for (int i = 0; ok && i < L_COUNT; i++) ok = declare(layer_param(m, l, i), &list[i], prefix, &seed);
    }
    return ok;
}

void params_free(lm_model *m)
{
    for (int32_t i = 0; m->params != NULL && i < m->param_count; i++) {
        lm_param *p = &m->params[i];
        free(p->value), free(p->grad), free(p->first), free(p->second);
    }
    free(m->params);
}

lm_param *layer_param(const lm_model *m, int32_t layer, int which)
{
    return &m->params[P_LAYERS + layer * L_COUNT + which];
}
