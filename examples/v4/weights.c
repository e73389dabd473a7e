/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * weights.c - finds the model's tensors in the checkpoint. Projections are copied as they are; the small
 * tensors become f32.
 */
#include "v4.h"

#include <stdlib.h>
#include <string.h>

/* A tensor [n, k], or [n] with k 0, and where it goes: one of the two. */
typedef struct weight {
    const char *name;
    int64_t n, k;
    quern_tensor *small;
    v4_matrix *matrix;
} weight;

static const char *text_of(const quern_tensor *t, char text[96])
{
    *text = '\0';
    for (int32_t i = 0; i < t->ndim; i++)
        snprintf(text + strlen(text), 96 - strlen(text), "%s%lld", i > 0 ? ", " : "", (long long)t->shape[i]);
    return text;
}

/* A tensor as the file has it, [n, k] or [n]; with n 0 of any shape. */
static bool find(const v4_model *m, const char *name, int64_t n, int64_t k, quern_tensor *t)
{
    const int64_t at = quern_checkpoint_find(m->checkpoint, name);
    const quern_tensor want = {.ndim = k > 0 ? 2 : 1, .shape = {n, k}};
    char is[96], wanted[96];
    if (at < 0) return fail("the checkpoint has no tensor %s", name);
    if (quern_checkpoint_view(m->checkpoint, (size_t)at, t) != QUERN_OK)
        return fail("%s: %s", name, quern_last_error(NULL));
    if (n == 0 || (t->ndim == want.ndim && t->shape[0] == n && (k == 0 || t->shape[1] == k))) return true;
    return fail("%s is [%s], by config.json it is [%s]", name, text_of(t, is), text_of(&want, wanted));
}

static bool is_float(const char *name, const quern_tensor *t)
{
    return t->dtype == QUERN_F32 || t->dtype == QUERN_BF16 ||
           fail("%s is %s: f32 and bf16 are accepted here", name, quern_dtype_name(t->dtype));
}

static bool place(v4_model *m, const quern_tensor *from, quern_tensor *t)
{
    return make(&m->device, from->dtype, from->ndim, from->shape, t) &&
           device_copy(&m->device, t->data, from->data, tensor_bytes(t));
}

/* FP8's scales: one number, or one for each block of 128, or of 32 where there are as many. */
static bool scales(v4_model *m, const char *name, int64_t n, int64_t k, v4_matrix *w)
{
    static const char *const suffixes[] = {"weight_scale_inv", "weight_scale", "scale"};
    char beside[NAME];
    quern_tensor t;
    int i = 0;
    do snprintf(beside, sizeof beside, "%.*s%s", (int)(strlen(name) - strlen("weight")), name, suffixes[i]);
    while (quern_checkpoint_find(m->checkpoint, beside) < 0 && ++i < 3);
    if (!find(m, beside, 0, 0, &t)) return false;
    if (t.ndim > 1 && (t.shape[0] != (n + 127) / 128 || t.shape[1] != (k + 127) / 128)) w->block = 32;
    const int64_t b = w->block;
    return (t.ndim < 2 || find(m, beside, (n + b - 1) / b, (k + b - 1) / b, &t)) && place(m, &t, &w->scale);
}

/* Those of a list, whose names go on behind the prefix. */
static bool read(v4_model *m, const char *prefix, const weight *list, size_t count)
{
    for (const weight *w = list; w < list + count; w++) {
        char name[NAME - 16]; /* a scale's is longer */
        quern_tensor from;
        snprintf(name, sizeof name, "%s%s", prefix, w->name);
        if (!find(m, name, w->n, w->k, &from)) return false;
        if (w->matrix != NULL) {
            *w->matrix = (v4_matrix){.block = 128};
            if (from.dtype == QUERN_E4M3 ? !scales(m, name, w->n, w->k, w->matrix) : !is_float(name, &from))
                return false;
            if (!place(m, &from, &w->matrix->w)) return false;
        } else if (!is_float(name, &from) || !make(&m->device, QUERN_F32, from.ndim, from.shape, w->small) ||
                   !widen(&m->device, &from, w->small)) {
            return false;
        }
    }
    return true;
}

/* The file has values and gates apart, and in both CSA's series b before a. */
static bool compressor(v4_model *m, const char *prefix, int64_t ratio, int64_t dim, v4_compressor *c)
{
    const int64_t series = ratio == CSA ? 2 : 1, width = m->config.width;
    quern_tensor from[2], bias;
    const weight small[] = {{"ape", ratio, series * dim, &bias, NULL},
                            {"norm.weight", dim, 0, &c->norm, NULL}};
    for (int i = 0; i < 2; i++) {
        char name[NAME];
        snprintf(name, sizeof name, "%s%s", prefix, i == 0 ? "wkv.weight" : "wgate.weight");
        if (!find(m, name, series * dim, width, &from[i]) || !is_float(name, &from[i])) return false;
    }
    if (from[0].dtype != from[1].dtype) return fail("%swkv and wgate are of two dtypes", prefix);
    if (!read(m, prefix, small, 2) ||
        !make(&m->device, from[0].dtype, SHAPE(2 * series * dim, width), &c->w.w))
        return false;
    const size_t part = (size_t)(dim * width) * quern_dtype_size(from[0].dtype);
    for (int64_t i = 0; i < 2 * series; i++)
        if (!device_copy(&m->device, (char *)c->w.w.data + (size_t)i * part,
                         (const char *)from[i % 2].data + (size_t)(series - 1 - i / 2) * part, part))
            return false;
    c->w.block = 128;
    c->b_a = c->b_b = bias;
    c->b_a.shape[1] = c->b_b.shape[1] = dim;
    c->b_a.data = (float *)bias.data + (series - 1) * dim;
    return true;
}

static bool read_layer(v4_model *m, int64_t number, v4_layer *l)
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
        if (!compressor(m, name, l->ratio, i == 1 ? c->index_dim : c->dim, &l->compressor[i])) return false;
    }
    snprintf(name, sizeof name, "layers.%lld.", (long long)number);
    return read(m, name, all, sizeof all / sizeof *all - (l->ratio == CSA ? 0 : 2));
}

bool weights_open(v4_model *m, const char *folder)
{
    v4_config *c = &m->config;
    v4_hyper *h = &m->head_hyper;
    if (!config_read(folder, c) || !done(quern_checkpoint_open(folder, &m->checkpoint)) ||
        !find(m, "embed.weight", 0, 0, &m->embed) || !is_float("embed.weight", &m->embed))
        return false;
    if (c->vocab == 0) c->vocab = m->embed.shape[0];
    const weight all[] = {{"head.weight", c->vocab, c->width, NULL, &m->head},
                          {"hc_head_fn", c->copies, c->copies * c->width, &h->fn, NULL},
                          {"hc_head_base", c->copies, 0, &h->base, NULL},
                          {"hc_head_scale", 1, 0, &h->scale, NULL},
                          {"norm.weight", c->width, 0, &h->norm, NULL}};
    m->layer = calloc((size_t)c->layers, sizeof *m->layer);
    if (m->layer == NULL) return fail("no memory for %lld layers", (long long)c->layers);
    if (!find(m, "embed.weight", c->vocab, c->width, &m->embed) || !read(m, "", all, 5)) return false;
    for (int64_t i = 0; i < c->layers; i++)
        if (!read_layer(m, i, &m->layer[i])) return false;
    for (size_t i = 0; i < quern_checkpoint_count(m->checkpoint); i++) {
        quern_checkpoint_tensor t = QUERN_CHECKPOINT_TENSOR_INIT;
        if (!done(quern_checkpoint_info(m->checkpoint, i, &t))) return false;
        if (strncmp(t.name, "mtp.", 4) != 0) continue;
        note(m, false, "the layers of multi-token prediction (mtp) are skipped");
        break;
    }
    return true;
}
