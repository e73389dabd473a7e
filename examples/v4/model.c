/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* model.c - a step of the model: embeddings, layers, logits. */
#include "v4.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A RoPE table for every position, made on the host. */
static bool make_table(v4_model *m, int i, int64_t positions)
{
    const v4_config *c = &m->config;
    quern_dsv4_rope_params p = {.size = sizeof p, .base = (float)c->base[i]};
    if (i == 1) { /* layers with entries: YaRN */
        p.factor = (float)c->factor;
        p.original_length = (float)c->length;
        p.beta_fast = (float)c->beta_fast;
        p.beta_slow = (float)c->beta_slow;
    }
    quern_tensor *t = &m->cos_sin[i];
    if (!make(&m->device, QUERN_F32, SHAPE(positions, c->rope_dim), t)) return false;
    const size_t bytes = tensor_bytes(t);
    void *table = malloc(bytes);
    const quern_tensor host = quern_tensor_contiguous(table, QUERN_F32, 2, t->shape);
    const bool ok = (table != NULL || fail("no memory for angles of %lld positions", (long long)positions)) &&
                    done(quern_dsv4_rope_table(&p, &host)) && device_copy(&m->device, t->data, table, bytes);
    free(table);
    return ok;
}

bool model_open(v4_model *m, const v4_options *o, int64_t sequences, int64_t capacity)
{
    const quern_context_params p = {.size = sizeof p, .threads = (int32_t)o->threads};
    *m = (v4_model){.quiet = o->quiet, .act = o->bf16 ? QUERN_BF16 : QUERN_F32, .device.cuda = o->cuda};
    return (!o->cuda || done(quern_cuda_check(0))) && done(quern_context_create(&p, &m->device.ctx)) &&
           weights_open(m, o->folder) && experts_open(m, o->cache) && make_table(m, 0, capacity + 1) &&
           make_table(m, 1, capacity + 1) && cache_open(m, sequences, capacity, o->chunk);
}

void model_close(v4_model *m)
{
    free(m->cache.books);
    free(m->cache.host);
    free(m->cache.ids);
    free(m->cache.counts);
    free(m->layer);
    device_close(&m->device);
    quern_checkpoint_close(m->checkpoint);
    if (m->mapped != NULL) munmap(m->mapped, m->mapped_bytes);
}

static void put_number(float x, void *data, quern_dtype dtype, int64_t i)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    if (dtype == QUERN_F32) memcpy((char *)data + 4 * i, &x, sizeof x);
    else memcpy((char *)data + 2 * i, &half, sizeof half);
}

/* Every copy of the residual stream starts as the token's embedding. */
static bool embed(v4_model *m, const int32_t *tokens, const quern_tensor *x)
{
    const int64_t width = m->config.width, copies = m->config.copies;
    char *rows = malloc(tensor_bytes(x));
    if (rows == NULL) return fail("no memory for the embeddings of %lld tokens", (long long)x->shape[0]);
    for (int64_t i = 0; i < x->shape[0] * copies * width; i++)
        put_number(number(m->embed.data, m->embed.dtype, tokens[i / (copies * width)] * width + i % width),
                   rows, m->act, i);
    const bool ok = device_copy(&m->device, x->data, rows, tensor_bytes(x));
    free(rows);
    return ok;
}

/* Logits of the last n rows, in f32 whatever the activations are in. */
static bool head(v4_model *m, const quern_tensor *x, int64_t n, float *logits)
{
    const v4_config *c = &m->config;
    const quern_tensor h = room(m, H, SHAPE(n, c->width)), wide = room(m, WIDE, SHAPE(n, c->width)),
                       y = room(m, LOGITS, SHAPE(n, c->vocab));
    quern_tensor last = *x;
    last.shape[0] = n;
    last.data = (char *)x->data + tensor_bytes(x) - tensor_bytes(&last);
    return op_hyper(m, &m->head_hyper, &last, NULL, &h, NULL) && widen(&m->device, &h, &wide) &&
           op_linear(m, &wide, &m->head, 1, &y) && device_copy(&m->device, logits, y.data, tensor_bytes(&y));
}

bool model_step(v4_model *m, int64_t first, int64_t batch, const int32_t *tokens, int64_t count, int64_t n,
                float *logits)
{
    const v4_config *c = &m->config;
    const int64_t rows = batch * count;
    const quern_tensor x[2] = {room(m, X, SHAPE(rows, c->copies, c->width)),
                               room(m, X_NEXT, SHAPE(rows, c->copies, c->width))},
                       ids = room(m, IDS, SHAPE(rows));
    v4_step step;
    if (!device_copy(&m->device, ids.data, tokens, (size_t)rows * sizeof *tokens) ||
        !embed(m, tokens, &x[0]) || !cache_begin(m, first, batch, count, &step))
        return false;
    for (int64_t i = 0; i < c->layers; i++)
        if (!layer_run(m, &m->layer[i], &step, &ids, &x[i % 2], &x[1 - i % 2])) return false;
    return (n == 0 || head(m, &x[c->layers % 2], n, logits)) && done(quern_ledger_commit(m->cache.ledger));
}
