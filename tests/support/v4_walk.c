/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "v4_model.h"

#include "cmocka_c11.h"
#include "oracle/dsv4_layer.h"
#include "oracle/hyper.h"
#include "oracle/linear.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const quern_tensor *tensor(const made_model *m, const char *name)
{
    for (int i = 0; i < m->count; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i].tensor;
    fail_msg("the model has no %s", name);
    return NULL;
}

static double e2m1(int code)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code];
}

double *v4_values(const made_model *m, const char *name)
{
    const quern_tensor *t = tensor(m, name);
    const bool fp4 = t->dtype == QUERN_I8;
    const int64_t columns = t->ndim > 1 ? t->shape[1] * (fp4 ? 2 : 1) : 1, n = t->shape[0] * columns;
    const uint8_t *bytes = t->data, *scales = NULL;
    double *values = malloc((size_t)n * sizeof *values);
    assert_non_null(values);
    if (fp4 || t->dtype == QUERN_E4M3) {
        char scale[160];
        snprintf(scale, sizeof scale, "%.*s.scale", (int)(strlen(name) - strlen(".weight")), name);
        scales = made_data(m, scale);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t r = i / columns, c = i % columns;
        if (t->dtype == QUERN_F32) {
            values[i] = (double)((const float *)t->data)[i];
        } else if (t->dtype == QUERN_BF16) {
            const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[i] << 16;
            float x;
            memcpy(&x, &bits, sizeof x);
            values[i] = (double)x;
        } else if (fp4) {
            values[i] =
                ldexp(e2m1(bytes[i / 2] >> (i % 2 * 4) & 15), scales[r * columns / 32 + c / 32] - 127);
        } else {
            values[i] = ldexp(oracle_e4m3_of_byte(bytes[i]),
                              scales[r / 128 * ((columns + 127) / 128) + c / 128] - 127);
        }
    }
    return values;
}

static double *part(const made_model *m, const char *prefix, const char *suffix)
{
    char name[160];
    snprintf(name, sizeof name, "%s%s", prefix, suffix);
    return v4_values(m, name);
}

/* Input h of a sub-layer, or with f the next copies in place of x. */
static void walk_hyper(const made_model *m, const char *prefix, const char *norm, bool head, int64_t count,
                       double *x, const double *f, double *h)
{
    double *fn = part(m, prefix, "_fn"), *base = part(m, prefix, "_base"), *scale = part(m, prefix, "_scale"),
           *weight = v4_values(m, norm),
           *next = malloc((size_t)(count * V4_COPIES * V4_WIDTH) * sizeof *next);
    const oracle_hyper o = {count, V4_COPIES, V4_WIDTH, head,  V4_ITERS, 1e-6, 1e-6,
                            x,     fn,        base,     scale, weight,   f,    NULL};
    const oracle_hyper_out out = {.h = h, .x_new = f != NULL ? next : NULL};
    oracle_hyper_forward(&o, &out);
    if (f != NULL) memcpy(x, next, (size_t)(count * V4_COPIES * V4_WIDTH) * sizeof *x);
    double *const all[] = {fn, base, scale, weight, next};
    for (int i = 0; i < 5; i++) free(all[i]);
}

static void walk_attention(const made_model *m, int layer, int64_t count, const double *h, double *f)
{
    static const char *const names[ORACLE_LAYER_WEIGHTS] = {"attn_sink",
                                                            "wq_a.weight",
                                                            "q_norm.weight",
                                                            "wq_b.weight",
                                                            "wkv.weight",
                                                            "kv_norm.weight",
                                                            "wo_a.weight",
                                                            "wo_b.weight",
                                                            "compressor.ape",
                                                            "compressor.wkv.weight",
                                                            "compressor.wgate.weight",
                                                            "compressor.norm.weight",
                                                            "indexer.compressor.ape",
                                                            "indexer.compressor.wkv.weight",
                                                            "indexer.compressor.wgate.weight",
                                                            "indexer.compressor.norm.weight",
                                                            "indexer.wq_b.weight",
                                                            "indexer.weights_proj.weight"};
    const int ratio = v4_ratios[layer];
    const oracle_layer l = {.kind = ratio == 4  ? ORACLE_CSA
                                    : ratio > 0 ? ORACLE_HCA
                                                : ORACLE_SWA,
                            .tokens = count,
                            .width = V4_WIDTH,
                            .q_lora = V4_Q_LORA,
                            .heads = V4_HEADS,
                            .dim = V4_DIM,
                            .groups = V4_GROUPS,
                            .o_lora = V4_O_LORA,
                            .rope_dim = V4_ROPE,
                            .window = V4_WINDOW,
                            .ratio = ratio,
                            .index_heads = V4_INDEX_HEADS,
                            .index_dim = V4_INDEX_DIM,
                            .top_k = V4_INDEX_TOP,
                            .eps = 1e-6};
    double *w[ORACLE_LAYER_WEIGHTS] = {NULL}, *table = malloc((size_t)(count * V4_ROPE) * sizeof *table);
    char prefix[64];
    snprintf(prefix, sizeof prefix, "layers.%d.attn.", layer);
    for (int i = 0; i < ORACLE_LAYER_WEIGHTS; i++)
        if (oracle_layer_count(&l, (oracle_layer_weight)i) > 0) w[i] = part(m, prefix, names[i]);
    if (ratio > 0) oracle_dsv4_rope_table(count, V4_ROPE, 160000, 16, 65536, 32, 1, table);
    else oracle_dsv4_rope_table(count, V4_ROPE, 10000, 0, 0, 0, 0, table);
    oracle_dsv4_layer(&l, h, w, table, NULL, &(oracle_layer_results){.out = f});
    for (int i = 0; i < ORACLE_LAYER_WEIGHTS; i++) free(w[i]);
    free(table);
}

void v4_walk(const made_model *m, const int32_t *tokens, int64_t count, double *logits)
{
    const int64_t row = V4_COPIES * V4_WIDTH;
    double *embed = v4_values(m, "embed.weight"), *head = v4_values(m, "head.weight"),
           *x = malloc((size_t)(count * row) * sizeof *x),
           *h = malloc((size_t)(count * V4_WIDTH) * sizeof *h),
           *f = malloc((size_t)(count * V4_WIDTH) * sizeof *f),
           *unused = malloc((size_t)(count * V4_WIDTH) * sizeof *f);
    for (int64_t i = 0; i < count * row; i++) x[i] = embed[tokens[i / row] * V4_WIDTH + i % V4_WIDTH];
    for (int l = 0; l < V4_LAYERS; l++) {
        char hyper[64], norm[64];
        for (int s = 0; s < 2; s++) {
            snprintf(hyper, sizeof hyper, "layers.%d.hc_%s", l, s == 0 ? "attn" : "ffn");
            snprintf(norm, sizeof norm, "layers.%d.%s_norm.weight", l, s == 0 ? "attn" : "ffn");
            walk_hyper(m, hyper, norm, false, count, x, NULL, h);
            if (s == 0) walk_attention(m, l, count, h, f);
            else v4_walk_experts(m, l, tokens, count, h, f);
            walk_hyper(m, hyper, norm, false, count, x, f, unused);
        }
    }
    walk_hyper(m, "hc_head", "norm.weight", true, count, x, NULL, h);
    const oracle_linear last = {count, 1, V4_VOCABULARY, V4_WIDTH, h, head, NULL};
    oracle_linear_forward(&last, logits, NULL);
    double *const all[] = {embed, head, x, h, f, unused};
    for (int i = 0; i < 6; i++) free(all[i]);
}
