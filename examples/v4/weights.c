/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * weights.c - finds the model's tensors in the checkpoint. Projections are copied as they are; the small
 * tensors become f32.
 */
#include "v4.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A name in turn for each of the last few calls. */
static const char *join(const char *a, const char *b)
{
    static char names[8][NAME];
    static int next;
    char *to = names[next++ % 8];
    snprintf(to, NAME, "%s%s", a, b);
    return to;
}

/* The tensor [a, b], or [a] with b 0, or with a 0 of any shape. */
static bool find(const v4_model *m, const char *name, int64_t a, int64_t b, quern_tensor *t)
{
    const int64_t at = quern_checkpoint_find(m->checkpoint, name);
    char text[96] = "";
    if (at < 0) return fail("the checkpoint has no tensor %s", name);
    if (quern_checkpoint_view(m->checkpoint, (size_t)at, t) != QUERN_OK)
        return fail("%s: %s", name, quern_last_error(NULL));
    if (a == 0 || (t->ndim == (b > 0 ? 2 : 1) && t->shape[0] == a && (b == 0 || t->shape[1] == b)))
        return true;
    for (int32_t i = 0; i < t->ndim; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", i > 0 ? ", " : "",
                 (long long)t->shape[i]);
    return b > 0
               ? fail("%s is [%s], by config.json it is [%lld, %lld]", name, text, (long long)a, (long long)b)
               : fail("%s is [%s], by config.json it is [%lld]", name, text, (long long)a);
}

static bool is_float(const char *name, const quern_tensor *t)
{
    return t->dtype == QUERN_F32 || t->dtype == QUERN_BF16 ||
           fail("%s is %s: f32 and bf16 are accepted here", name, quern_dtype_name(t->dtype));
}

/* The same, copied to the device. */
static bool place(v4_model *m, const char *name, int64_t a, int64_t b, quern_tensor *t)
{
    quern_tensor from = {0};
    if (!find(m, name, a, b, &from)) return false;
    *t = from;
    t->data = device_take(&m->device, tensor_bytes(t));
    t->device = m->device.cuda ? QUERN_CUDA : QUERN_CPU;
    return t->data != NULL && device_copy(&m->device, t->data, from.data, tensor_bytes(t));
}

/* A small tensor in f32. */
static bool small(v4_model *m, const char *name, int64_t a, int64_t b, quern_tensor *t)
{
    const int64_t n = a * (b > 0 ? b : 1);
    quern_tensor from = {0};
    if (!find(m, name, a, b, &from) || !is_float(name, &from)) return false;
    float *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; values != NULL && i < n; i++) values[i] = number(&from, i);
    const bool ok = (values != NULL || fail("no memory for %s", name)) &&
                    make(&m->device, QUERN_F32, b > 0 ? 2 : 1, a, b, 1, t) &&
                    device_copy(&m->device, t->data, values, (size_t)n * sizeof *values);
    free(values);
    return ok;
}

/* FP8's scales: one number, or one for each block of 128, or of 32 where there are as many. */
static bool find_scales(v4_model *m, const char *module, int64_t n, int64_t k, v4_matrix *w)
{
    static const char *const suffixes[] = {".weight_scale_inv", ".weight_scale", ".scale"};
    int i = 0;
    while (i < 2 && quern_checkpoint_find(m->checkpoint, join(module, suffixes[i])) < 0) i++;
    const char *name = join(module, suffixes[i]);
    if (!find(m, name, 0, 0, &w->scale)) return false;
    if (w->scale.ndim < 2) return place(m, name, 0, 0, &w->scale);
    if (w->scale.shape[0] != (n + 127) / 128 || w->scale.shape[1] != (k + 127) / 128) w->block = 32;
    return place(m, name, (n + w->block - 1) / w->block, (k + w->block - 1) / w->block, &w->scale);
}

static bool matrix(v4_model *m, const char *prefix, const char *suffix, int64_t n, int64_t k, v4_matrix *w)
{
    char module[NAME - 32];
    snprintf(module, sizeof module, "%s%s", prefix, suffix);
    const char *name = join(module, ".weight");
    *w = (v4_matrix){.block = 128};
    return place(m, name, n, k, &w->w) &&
           (w->w.dtype == QUERN_E4M3 ? find_scales(m, module, n, k, w) : is_float(name, &w->w));
}

static bool compressor(v4_model *m, const char *prefix, int64_t ratio, int64_t dim, v4_compressor *c)
{
    const int64_t columns = ratio == CSA ? 2 * dim : dim, width = m->config.width;
    return place(m, join(prefix, "wkv.weight"), columns, width, &c->kv) && is_float(prefix, &c->kv) &&
           place(m, join(prefix, "wgate.weight"), columns, width, &c->gate) && is_float(prefix, &c->gate) &&
           small(m, join(prefix, "ape"), ratio, columns, &c->bias) &&
           small(m, join(prefix, "norm.weight"), dim, 0, &c->norm);
}

static bool hyper(v4_model *m, const char *prefix, int64_t rows, int64_t scales, const char *norm,
                  v4_hyper *h)
{
    return small(m, join(prefix, "_fn"), rows, m->config.copies * m->config.width, &h->fn) &&
           small(m, join(prefix, "_base"), rows, 0, &h->base) &&
           small(m, join(prefix, "_scale"), scales, 0, &h->scale) &&
           small(m, norm, m->config.width, 0, &h->norm);
}

static bool attention(v4_model *m, const char *prefix, int64_t ratio, v4_layer *l)
{
    const v4_config *c = &m->config;
    const int64_t channels = c->heads * c->dim, low = c->groups * c->o_lora;
    char main[NAME], indexer[NAME], index[NAME];
    snprintf(main, sizeof main, "%scompressor.", prefix);
    snprintf(indexer, sizeof indexer, "%sindexer.", prefix);
    snprintf(index, sizeof index, "%sindexer.compressor.", prefix);
    return matrix(m, prefix, "wq_a", c->q_lora, c->width, &l->q_a) &&
           small(m, join(prefix, "q_norm.weight"), c->q_lora, 0, &l->q_norm) &&
           matrix(m, prefix, "wq_b", channels, c->q_lora, &l->q_b) &&
           matrix(m, prefix, "wkv", c->dim, c->width, &l->kv) &&
           small(m, join(prefix, "kv_norm.weight"), c->dim, 0, &l->kv_norm) &&
           small(m, join(prefix, "attn_sink"), c->heads, 0, &l->sink) &&
           matrix(m, prefix, "wo_a", low, channels / c->groups, &l->o_a) &&
           matrix(m, prefix, "wo_b", c->width, low, &l->o_b) &&
           (ratio == 0 || compressor(m, main, ratio, c->dim, &l->main)) &&
           (ratio != CSA ||
            (matrix(m, indexer, "wq_b", c->index_heads * c->index_dim, c->q_lora, &l->index_q_b) &&
             matrix(m, indexer, "weights_proj", c->index_heads, c->width, &l->index_heads) &&
             compressor(m, index, ratio, c->index_dim, &l->index)));
}

static bool layer(v4_model *m, int64_t i, v4_layer *l)
{
    const v4_config *c = &m->config;
    const int64_t mixes = c->copies * (c->copies + 2);
    char prefix[32], attn[48];
    snprintf(prefix, sizeof prefix, "layers.%lld.", (long long)i);
    snprintf(attn, sizeof attn, "%sattn.", prefix);
    return hyper(m, join(prefix, "hc_attn"), mixes, 3, join(prefix, "attn_norm.weight"), &l->hyper[0]) &&
           hyper(m, join(prefix, "hc_ffn"), mixes, 3, join(prefix, "ffn_norm.weight"), &l->hyper[1]) &&
           attention(m, attn, c->ratio[i], l);
}

bool weights_open(v4_model *m, const char *folder)
{
    v4_config *c = &m->config;
    if (!config_read(folder, c) || !done(quern_checkpoint_open(folder, &m->checkpoint)) ||
        !find(m, "embed.weight", 0, 0, &m->embed))
        return false;
    if (c->vocab == 0) c->vocab = m->embed.shape[0];
    m->layer = calloc((size_t)c->layers, sizeof *m->layer);
    if (m->layer == NULL) return fail("no memory for %lld layers", (long long)c->layers);
    if (!find(m, "embed.weight", c->vocab, c->width, &m->embed) || !is_float("embed.weight", &m->embed) ||
        !matrix(m, "head", "", c->vocab, c->width, &m->head) ||
        !hyper(m, "hc_head", c->copies, 1, "norm.weight", &m->head_hyper))
        return false;
    for (int64_t i = 0; i < c->layers; i++)
        if (!layer(m, i, &m->layer[i])) return false;
    for (size_t i = 0; i < quern_checkpoint_count(m->checkpoint); i++) {
        quern_checkpoint_tensor t = QUERN_CHECKPOINT_TENSOR_INIT;
        if (!done(quern_checkpoint_info(m->checkpoint, i, &t))) return false;
        if (strncmp(t.name, "mtp.", 4) != 0) continue;
        note(m, false, "the layers of multi-token prediction (mtp) are skipped");
        break;
    }
    return true;
}
