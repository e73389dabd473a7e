/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "v4_model.h"

#include "cmocka_c11.h"
#include "random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int v4_ratios[V4_LAYERS] = {0, 4, 8, 4, 0};

static test_random random_state;

/* mean + scale * normal */
static void floats(made_model *m, const char *prefix, const char *suffix, quern_dtype dtype, int64_t a,
                   int64_t b, double scale, double mean)
{
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, suffix);
    void *data = made_add(m, dtype, name, b > 0 ? 2 : 1, (const int64_t[]){a, b});
    for (int64_t i = 0; i < a * (b > 0 ? b : 1); i++) {
        const float x = (float)(mean + scale * test_random_normal(&random_state));
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (dtype == QUERN_F32) ((float *)data)[i] = x;
        else ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    }
}

/* A linear whose outputs are about as large as its inputs. */
static void linear(made_model *m, const char *prefix, const char *suffix, int64_t n, int64_t k, bool fp4)
{
    char module[128], name[160];
    snprintf(module, sizeof module, "%s%s", prefix, suffix);
    if (fp4) made_mxfp4(m, module, n, k);
    else made_fp8(m, module, n, k, 128);
    snprintf(name, sizeof name, "%s.scale", module);
    uint8_t *scale = made_data(m, name);
    const int64_t count = fp4 ? n * k / 32 : (n + 127) / 128 * ((k + 127) / 128);
    for (int64_t i = 0; i < count; i++)
        scale[i] = (uint8_t)((fp4 ? 121 : 116) + test_random_int(&random_state, 0, 2));
}

static void compressor(made_model *m, const char *prefix, int ratio, int64_t width)
{
    const int64_t columns = ratio == 4 ? 2 * width : width;
    floats(m, prefix, "wkv.weight", QUERN_BF16, columns, V4_WIDTH, 0.12, 0);
    floats(m, prefix, "wgate.weight", QUERN_BF16, columns, V4_WIDTH, 0.12, 0);
    floats(m, prefix, "ape", QUERN_F32, ratio, columns, 1, 0);
    floats(m, prefix, "norm.weight", QUERN_BF16, width, 0, 0.2, 1);
}

static void hyper(made_model *m, const char *prefix, int64_t rows, int64_t scales)
{
    floats(m, prefix, "_fn", QUERN_F32, rows, V4_COPIES * V4_WIDTH, 0.06, 0);
    floats(m, prefix, "_base", QUERN_F32, rows, 0, 0.5, 0);
    floats(m, prefix, "_scale", QUERN_F32, scales, 0, 0.3, 1);
}

static void attention(made_model *m, const char *layer, int ratio)
{
    char a[64], c[96];
    snprintf(a, sizeof a, "%sattn.", layer);
    linear(m, a, "wq_a", V4_Q_LORA, V4_WIDTH, false);
    linear(m, a, "wq_b", V4_HEADS * V4_DIM, V4_Q_LORA, false);
    linear(m, a, "wkv", V4_DIM, V4_WIDTH, false);
    linear(m, a, "wo_a", V4_GROUPS * V4_O_LORA, V4_HEADS / V4_GROUPS * V4_DIM, false);
    linear(m, a, "wo_b", V4_WIDTH, V4_GROUPS * V4_O_LORA, false);
    floats(m, a, "q_norm.weight", QUERN_BF16, V4_Q_LORA, 0, 0.2, 1);
    floats(m, a, "kv_norm.weight", QUERN_F32, V4_DIM, 0, 0.2, 1);
    floats(m, a, "attn_sink", QUERN_F32, V4_HEADS, 0, 1, 0);
    snprintf(c, sizeof c, "%scompressor.", a);
    if (ratio > 0) compressor(m, c, ratio, V4_DIM);
    if (ratio != 4) return;
    linear(m, a, "indexer.wq_b", V4_INDEX_HEADS * V4_INDEX_DIM, V4_Q_LORA, false);
    floats(m, a, "indexer.weights_proj.weight", QUERN_BF16, V4_INDEX_HEADS, V4_WIDTH, 0.12, 0);
    snprintf(c, sizeof c, "%sindexer.compressor.", a);
    compressor(m, c, ratio, V4_INDEX_DIM);
}

static void experts(made_model *m, const char *layer, bool hash, bool fp4)
{
    static const char *const parts[] = {"w1", "w2", "w3"};
    char f[64], e[96];
    snprintf(f, sizeof f, "%sffn.", layer);
    floats(m, f, "gate.weight", QUERN_BF16, V4_EXPERTS, V4_WIDTH, 0.2, 0);
    if (!hash) floats(m, f, "gate.bias", QUERN_F32, V4_EXPERTS, 0, 0.1, 0);
    snprintf(e, sizeof e, "%sgate.tid2eid", f);
    int64_t *table = hash ? made_add(m, QUERN_I64, e, 2, (const int64_t[]){V4_VOCABULARY, V4_TOP}) : NULL;
    for (int t = 0; hash && t < V4_VOCABULARY; t++) {
        table[2 * t] = test_random_int(&random_state, 0, V4_EXPERTS - 1);
        table[2 * t + 1] = (table[2 * t] + test_random_int(&random_state, 1, V4_EXPERTS - 1)) % V4_EXPERTS;
    }
    for (int i = 0; i <= V4_EXPERTS; i++) /* the last is shared */
        for (int p = 0; p < 3; p++) {
            if (i < V4_EXPERTS) snprintf(e, sizeof e, "%sexperts.%d.%s", f, i, parts[p]);
            else snprintf(e, sizeof e, "%sshared_experts.%s", f, parts[p]);
            linear(m, e, "", p == 1 ? V4_WIDTH : V4_INNER, p == 1 ? V4_INNER : V4_WIDTH,
                   fp4 && i < V4_EXPERTS);
        }
}

void v4_make(made_model *m, uint64_t seed, bool fp8_experts)
{
    random_state.state = seed;
    floats(m, "embed", ".weight", QUERN_BF16, V4_VOCABULARY, V4_WIDTH, 1, 0);
    floats(m, "head", ".weight", QUERN_BF16, V4_VOCABULARY, V4_WIDTH, 0.12, 0);
    floats(m, "norm", ".weight", QUERN_BF16, V4_WIDTH, 0, 0.2, 1);
    hyper(m, "hc_head", V4_COPIES, 1);
    for (int i = 0; i < V4_LAYERS; i++) {
        char layer[32], name[64];
        snprintf(layer, sizeof layer, "layers.%d.", i);
        floats(m, layer, "attn_norm.weight", QUERN_F32, V4_WIDTH, 0, 0.2, 1);
        floats(m, layer, "ffn_norm.weight", QUERN_BF16, V4_WIDTH, 0, 0.2, 1);
        snprintf(name, sizeof name, "%shc_attn", layer);
        hyper(m, name, V4_COPIES * (V4_COPIES + 2), 3);
        snprintf(name, sizeof name, "%shc_ffn", layer);
        hyper(m, name, V4_COPIES * (V4_COPIES + 2), 3);
        attention(m, layer, v4_ratios[i]);
        experts(m, layer, i < V4_HASH_LAYERS, !fp8_experts);
    }
    floats(m, "mtp.0.", "enorm.weight", QUERN_BF16, V4_WIDTH, 0, 0.2, 1);
}

/* Prints `text`, the first `from` in it as `to`. */
static void print_changed(FILE *f, const char *text, const char *from, const char *to)
{
    const char *at = from != NULL ? strstr(text, from) : NULL;
    assert_true(from == NULL || at != NULL);
    if (at == NULL) fputs(text, f);
    else fprintf(f, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
}

void v4_write(const made_model *m, const char *folder, const char *from, const char *to)
{
    char path[512], text[4096];
    int n = snprintf(
        text, sizeof text,
        "{\"model_type\": \"deepseek_v4\", \"hidden_size\": %d, \"num_hidden_layers\": %d,\n"
        "\"vocab_size\": %d, \"num_attention_heads\": %d, \"head_dim\": %d, \"qk_rope_head_dim\": %d,\n"
        "\"q_lora_rank\": %d, \"o_groups\": %d, \"o_lora_rank\": %d, \"moe_intermediate_size\": %d,\n"
        "\"n_routed_experts\": %d, \"n_shared_experts\": 1, \"num_experts_per_tok\": %d,\n"
        "\"scoring_func\": \"sqrtsoftplus\", \"norm_topk_prob\": true, \"routed_scaling_factor\": 1.5,\n"
        "\"num_hash_layers\": %d, \"index_n_heads\": %d, \"index_head_dim\": %d, \"index_topk\": %d,\n"
        "\"sliding_window\": %d, \"swiglu_limit\": 2.0, \"hc_mult\": %d, \"hc_sinkhorn_iters\": %d,\n"
        "\"hc_eps\": 1e-6, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000, "
        "\"compress_rope_theta\": 160000,\n\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, "
        "\"original_max_position_embeddings\": 65536,\n\"beta_fast\": 32, \"beta_slow\": 1}, "
        "\"num_nextn_predict_layers\": 1,\n\"compress_ratios\": [",
        V4_WIDTH, V4_LAYERS, V4_VOCABULARY, V4_HEADS, V4_DIM, V4_ROPE, V4_Q_LORA, V4_GROUPS, V4_O_LORA,
        V4_INNER, V4_EXPERTS, V4_TOP, V4_HASH_LAYERS, V4_INDEX_HEADS, V4_INDEX_DIM, V4_INDEX_TOP, V4_WINDOW,
        V4_COPIES, V4_ITERS);
    for (int i = 0; i < V4_LAYERS; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%d, ", v4_ratios[i]);
    snprintf(text + n, sizeof text - (size_t)n, "0]}\n");
    snprintf(path, sizeof path, "mkdir -p '%s'", folder);
    assert_int_equal(system(path), 0);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    print_changed(f, text, from, to);
    assert_int_equal(fclose(f), 0);
    made_write_shards(m, folder, 3);
}
