/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * weights.c - config.json, and the model's tensors in the checkpoint. Projections are copied as they are; the
 * small tensors become f32.
 */
#include "v4.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

/* config.json: the numbers, each within what Quern's calls take. */
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
            fail("config.json: %s is %s: %g to %g is accepted", key, given ? "another" : "missing",
                 numbers[i].least, numbers[i].most);
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
            fail("config.json: compress_ratios[%lld]: 0 to 4096, of which up to %d differ, is accepted",
                 (long long)i, RATIOS);
        c->pool[i] = 1 + at;
        if (ratio > 0) c->ratios[at] = ratio;
    }
}

static void read_config(const char *folder, v4_config *c)
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
        fail("config.json: o_groups, qk_rope_head_dim or num_experts_per_tok do not fit the other numbers");
    json_decref(config);
}

/* A tensor [n, k], or [n] with k 0, and where it goes: one of the two. */
typedef struct weight {
    const char *name;
    int64_t n, k;
    quern_tensor *small;
    v4_matrix *matrix;
} weight;

/* A tensor as the file has it, [n, k] or [n], with n 0 of any shape; of floats, or of any numbers. */
static quern_tensor find(const v4_model *m, const char *name, int64_t n, int64_t k, bool any)
{
    const int64_t at = quern_checkpoint_find(m->checkpoint, name);
    quern_tensor t;
    if (at < 0) fail("the checkpoint has no tensor %s", name);
    if (quern_checkpoint_view(m->checkpoint, (size_t)at, &t) != QUERN_OK)
        fail("%s: %s", name, quern_last_error(NULL));
    if (!any && t.dtype != QUERN_F32 && t.dtype != QUERN_BF16)
        fail("%s is %s: f32 and bf16 are accepted here", name, quern_dtype_name(t.dtype));
    if (n == 0 || (t.ndim == (k > 0 ? 2 : 1) && t.shape[0] == n && (k == 0 || t.shape[1] == k))) return t;
    fail("%s is [%lld%s], by config.json it has %lld rows of %lld", name, (long long)t.shape[0],
         t.ndim > 1 ? ", ..." : "", (long long)n, (long long)(k > 0 ? k : 1));
}

quern_tensor place(const v4_model *m, quern_tensor from)
{
    const quern_tensor t = make(m, from.dtype, from.shape);
    device_copy(m, t.data, from.data, tensor_bytes(&t));
    return t;
}

/* FP8's scales: one number, or one for each block of 128, or of 32 where there are as many. */
static void read_scales(const v4_model *m, const char *name, int64_t n, int64_t k, v4_matrix *w)
{
    static const char *const suffixes[] = {"weight_scale_inv", "weight_scale", "scale"};
    char beside[NAME];
    int i = 0;
    do snprintf(beside, sizeof beside, "%.*s%s", (int)(strlen(name) - strlen("weight")), name, suffixes[i]);
    while (quern_checkpoint_find(m->checkpoint, beside) < 0 && ++i < 3);
    quern_tensor t = find(m, beside, 0, 0, true);
    if (t.ndim > 1 && (t.shape[0] != (n + 127) / 128 || t.shape[1] != (k + 127) / 128)) w->block = 32;
    if (t.ndim > 1) t = find(m, beside, (n + w->block - 1) / w->block, (k + w->block - 1) / w->block, true);
    w->scale = place(m, t);
}

/* Those of a list, whose names go on behind the prefix. */
static void read(const v4_model *m, const char *prefix, const weight *list, size_t count)
{
    for (const weight *w = list; w < list + count; w++) {
        char name[NAME - 16]; /* a scale's is longer */
        snprintf(name, sizeof name, "%s%s", prefix, w->name);
        quern_tensor t = find(m, name, w->n, w->k, true);
        if (w->matrix == NULL || t.dtype != QUERN_E4M3) t = find(m, name, w->n, w->k, false);
        if (w->matrix != NULL) {
            *w->matrix = (v4_matrix){.w = place(m, t), .block = 128};
            if (t.dtype == QUERN_E4M3) read_scales(m, name, w->n, w->k, w->matrix);
        } else {
            *w->small = make(m, QUERN_F32, t.shape);
            widen(m, &t, w->small);
        }
    }
}

/* The file has values and gates apart, and in both CSA's series b before a. */
static void read_compressor(const v4_model *m, const char *prefix, int64_t ratio, int64_t dim,
                            v4_compressor *c)
{
    const int64_t series = ratio == CSA ? 2 : 1, width = m->config.width;
    quern_tensor from[2];
    const weight small[] = {{"ape", ratio, series * dim, &c->b_b, NULL},
                            {"norm.weight", dim, 0, &c->norm, NULL}};
    for (int i = 0; i < 2; i++) {
        char name[NAME];
        snprintf(name, sizeof name, "%s%s", prefix, i == 0 ? "wkv.weight" : "wgate.weight");
        from[i] = find(m, name, series * dim, width, false);
    }
    if (from[0].dtype != from[1].dtype) fail("%swkv and wgate are of two dtypes", prefix);
    c->w = (v4_matrix){.w = make(m, from[0].dtype, SHAPE(2 * series * dim, width)), .block = 128};
    const size_t part = tensor_bytes(&c->w.w) / (size_t)(2 * series);
    for (int64_t i = 0; i < 2 * series; i++)
        device_copy(m, (char *)c->w.w.data + (size_t)i * part,
                    (const char *)from[i % 2].data + (size_t)(series - 1 - i / 2) * part, part);
    read(m, prefix, small, 2);
    c->b_b.shape[1] = dim; /* columns of the bias */
    c->b_a = c->b_b;
    c->b_a.data = (float *)c->b_b.data + (series - 1) * dim;
}

static void read_layer(const v4_model *m, int64_t number, v4_layer *l)
{
    const v4_config *c = &m->config;
    const int64_t mixes = c->copies * (c->copies + 2), stream = c->copies * c->width,
                  channels = c->heads * c->dim, low = c->groups * c->o_lora;
    v4_hyper *first = &l->hyper[0], *second = &l->hyper[1];
    const weight all[] = {
        {"hc_attn_fn", mixes, stream, &first->fn, NULL},
        {"hc_attn_base", mixes, 0, &first->base, NULL},
        {"hc_attn_scale", 3, 0, &first->scale, NULL},
        {"attn_norm.weight", c->width, 0, &first->norm, NULL},
        {"hc_ffn_fn", mixes, stream, &second->fn, NULL},
        {"hc_ffn_base", mixes, 0, &second->base, NULL},
        {"hc_ffn_scale", 3, 0, &second->scale, NULL},
        {"ffn_norm.weight", c->width, 0, &second->norm, NULL},
        {"attn.wq_a.weight", c->q_lora, c->width, NULL, &l->q_a},
        {"attn.q_norm.weight", c->q_lora, 0, &l->q_norm, NULL},
        {"attn.wq_b.weight", channels, c->q_lora, NULL, &l->q_b},
        {"attn.wkv.weight", c->dim, c->width, NULL, &l->kv},
        {"attn.kv_norm.weight", c->dim, 0, &l->kv_norm, NULL},
        {"attn.attn_sink", c->heads, 0, &l->sink, NULL},
        {"attn.wo_a.weight", low, channels / c->groups, NULL, &l->o_a},
        {"attn.wo_b.weight", c->width, low, NULL, &l->o_b},
        /* of CSA alone */
        {"attn.indexer.wq_b.weight", c->index_heads * c->index_dim, c->q_lora, NULL, &l->index_q_b},
        {"attn.indexer.weights_proj.weight", c->index_heads, c->width, NULL, &l->index_heads},
    };
    char name[NAME - 64];
    l->ratio = c->ratio[number];
    l->pool = c->pool[number];
    l->compressors = l->ratio == 0 ? 0 : l->ratio == CSA ? 2 : 1;
    for (int i = 0; i < l->compressors; i++) {
        snprintf(name, sizeof name, "layers.%lld.attn.%scompressor.", (long long)number,
                 i == 1 ? "indexer." : "");
        read_compressor(m, name, l->ratio, i == 1 ? c->index_dim : c->dim, &l->compressor[i]);
    }
    snprintf(name, sizeof name, "layers.%lld.", (long long)number);
    read(m, name, all, sizeof all / sizeof *all - (l->ratio == CSA ? 0 : 2));
}

void weights_open(v4_model *m, const char *folder)
{
    v4_config *c = &m->config;
    v4_hyper *h = &m->head_hyper;
    read_config(folder, c);
    check(quern_checkpoint_open(folder, &m->checkpoint));
    const weight all[] = {{"head.weight", c->vocab, c->width, NULL, &m->head},
                          {"hc_head_fn", c->copies, c->copies * c->width, &h->fn, NULL},
                          {"hc_head_base", c->copies, 0, &h->base, NULL},
                          {"hc_head_scale", 1, 0, &h->scale, NULL},
                          {"norm.weight", c->width, 0, &h->norm, NULL}};
    m->embed = find(m, "embed.weight", c->vocab, c->width, false);
    read(m, "", all, sizeof all / sizeof *all);
    m->layer = host_take((size_t)c->layers * sizeof *m->layer);
    for (int64_t i = 0; i < c->layers; i++) read_layer(m, i, &m->layer[i]);
    if (quern_checkpoint_find(m->checkpoint, "mtp.0.norm.weight") >= 0)
        note(m, false, "the layers of multi-token prediction (mtp) are skipped");
}
