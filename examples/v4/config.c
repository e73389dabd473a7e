/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* config.c - config.json: the model's numbers, each within what Quern's calls take. */
#include "v4.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

#define AT(member) offsetof(v4_config, member)
static const struct {
    const char *group, *key; /* group: an object that holds the key; NULL: config.json's own */
    size_t at;               /* of a double, or with `whole` of an int64_t, in v4_config */
    bool whole;
    double least, most, otherwise; /* otherwise: where it is missing; NAN: it may not be */
} numbers[] = {
    {NULL, "hidden_size", AT(width), true, 1, 1 << 20, NAN},
    {NULL, "num_hidden_layers", AT(layers), true, 1, LAYERS_MOST, NAN},
    {NULL, "vocab_size", AT(vocab), true, 1, INT32_MAX, NAN},
    {NULL, "num_attention_heads", AT(heads), true, 1, 128, NAN},
    {NULL, "head_dim", AT(dim), true, 8, 512, NAN},
    {NULL, "qk_rope_head_dim", AT(rope_dim), true, 2, 512, NAN},
    {NULL, "q_lora_rank", AT(q_lora), true, 1, 1 << 20, NAN},
    {NULL, "o_groups", AT(groups), true, 1, 128, NAN},
    {NULL, "o_lora_rank", AT(o_lora), true, 1, 1 << 20, NAN},
    {NULL, "sliding_window", AT(window), true, 1, 1 << 20, NAN},
    {NULL, "index_n_heads", AT(index_heads), true, 1, 1 << 16, NAN},
    {NULL, "index_head_dim", AT(index_dim), true, 8, 256, NAN},
    {NULL, "index_topk", AT(index_top), true, 1, 2048, NAN},
    {NULL, "n_routed_experts", AT(experts), true, 1, 1 << 16, NAN},
    {NULL, "num_experts_per_tok", AT(top), true, 1, 1 << 16, NAN},
    {NULL, "moe_intermediate_size", AT(inner), true, 1, 1 << 20, NAN},
    {NULL, "n_shared_experts", AT(shared), true, 0, 1 << 10, NAN},
    {NULL, "num_hash_layers", AT(hash_layers), true, 0, LAYERS_MOST, 0},
    {NULL, "hc_mult", AT(copies), true, 1, 8, NAN},
    {NULL, "hc_sinkhorn_iters", AT(iters), true, 1, 64, NAN},
    {NULL, "hc_eps", AT(hc_eps), false, 1e-30, 1, NAN},
    {NULL, "rms_norm_eps", AT(rms_eps), false, 1e-30, 1, NAN},
    {NULL, "swiglu_limit", AT(limit), false, 0, 1e30, 0},
    {NULL, "routed_scaling_factor", AT(route_scale), false, 0, 1e30, 1},
    {NULL, "rope_theta", AT(base[0]), false, 1, 1e30, 10000},
    {NULL, "compress_rope_theta", AT(base[1]), false, 1, 1e30, 160000},
    {"rope_scaling", "factor", AT(factor), false, 0, 1e30, 0},
    {"rope_scaling", "original_max_position_embeddings", AT(length), false, 1, 1e30, 65536},
    {"rope_scaling", "beta_fast", AT(beta_fast), false, 0, 1e30, 32},
    {"rope_scaling", "beta_slow", AT(beta_slow), false, 0, 1e30, 1},
};
#undef AT

static void read_numbers(const json_t *config, v4_config *c)
{
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const char *group = numbers[i].group, *key = numbers[i].key;
        const json_t *from = json_object_get(group != NULL ? json_object_get(config, group) : config, key);
        const bool given = from != NULL && !json_is_null(from);
        const double x = !given ? numbers[i].otherwise : json_is_number(from) ? json_number_value(from) : NAN;
        if (!(x >= numbers[i].least && x <= numbers[i].most) || (numbers[i].whole && x != floor(x)))
            fail("config.json: %s is %s: a%s number from %g to %g is accepted", key,
                 given ? "none" : "missing", numbers[i].whole ? " whole" : "", numbers[i].least,
                 numbers[i].most);
        const int64_t whole = (int64_t)x;
        memcpy((char *)c + numbers[i].at, numbers[i].whole ? (const void *)&whole : &x, 8);
    }
}

/* One a layer; those past the layers are of multi-token prediction. */
static void read_ratios(const json_t *config, v4_config *c)
{
    const json_t *list = json_object_get(config, "compress_ratios");
    for (int64_t i = 0; i < c->layers; i++) {
        const json_t *from = json_array_get(list, (size_t)i);
        const int64_t ratio = c->ratio[i] = json_is_integer(from) ? json_integer_value(from) : -1;
        int at = 0;
        while (ratio > 0 && at < RATIOS && c->ratios[at] != ratio && c->ratios[at] != 0) at++;
        if (ratio < 0 || ratio > 4096 || at == RATIOS)
            fail("config.json: compress_ratios[%lld] is missing or out of place: whole numbers from 0 to "
                 "4096, of which up to %d differ, are accepted",
                 (long long)i, RATIOS);
        c->pool[i] = 1 + at;
        if (ratio > 0) c->ratios[at] = ratio;
    }
}

void config_read(const char *folder, v4_config *c)
{
    static const char *const scores[] = {"softmax", "sqrtsoftplus", "sigmoid"};
    char path[4096];
    json_error_t error;
    snprintf(path, sizeof path, "%s/config.json", folder);
    json_t *config = json_load_file(path, 0, &error);
    if (config == NULL) fail("%s: %s", path, error.text);
    const char *type = json_string_value(json_object_get(config, "model_type")),
               *score = json_string_value(json_object_get(config, "scoring_func"));
    const json_t *renormalize = json_object_get(config, "norm_topk_prob");
    int chosen = 0;
    if (type == NULL || strcmp(type, "deepseek_v4") != 0)
        fail("config.json: model_type %s: deepseek_v4 is accepted", type != NULL ? type : "is missing");
    while (chosen < 3 && (score == NULL || strcmp(score, scores[chosen]) != 0)) chosen++;
    if (chosen == 3)
        fail("config.json: scoring_func %s: softmax, sqrtsoftplus and sigmoid are accepted",
             score != NULL ? score : "is missing");
    c->score = (quern_moe_score)chosen;
    c->renormalize = renormalize == NULL || json_is_true(renormalize);
    read_numbers(config, c);
    read_ratios(config, c);
    if (c->heads % c->groups != 0 || c->rope_dim % 2 != 0 || c->rope_dim > c->dim ||
        c->rope_dim > c->index_dim || c->top > c->experts)
        fail("config.json: o_groups must divide num_attention_heads, qk_rope_head_dim be even and within "
             "head_dim and index_head_dim, num_experts_per_tok within n_routed_experts");
    json_decref(config);
}
