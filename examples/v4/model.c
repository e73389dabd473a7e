/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * model.c - a step of the model. First the calls of Quern, each with its parameters, its tensors and as
 * much workspace as it asks for; then what a layer makes of them, and embeddings, layers, logits.
 */
#include "v4.h"

#include <stdlib.h>

/* An operation's parameters or tensors: the fields that are named. */
#define WITH(fields, ...)                                                                                    \
    {                                                                                                        \
        .size = sizeof(fields), __VA_ARGS__                                                                  \
    }
/* The two functions of an operation: how many bytes it needs, and the call itself. */
#define RUN(m, call, p, t)                                                                                   \
    do {                                                                                                     \
        size_t bytes;                                                                                        \
        const int room = WORKSPACE + (int)((m)->lane++ % (m)->lanes);                                        \
        check(call##_workspace((m)->ctx, &(p), &(t), &bytes));                                               \
        check(call((m)->ctx, &(m)->exec, &(p), &(t), device_room(m, room, bytes), bytes));                   \
    } while (0)

static void op_linear(v4_model *m, const quern_tensor *x, const v4_matrix *w, int64_t groups,
                      const quern_tensor *y)
{
    const quern_tensor *scale = w->scale.data != NULL ? &w->scale : NULL;
    const quern_linear_params p = WITH(p, .groups = groups, .block = w->block);
    const quern_linear_tensors t = WITH(t, .x = x, .w = &w->w, .w_scale = scale, .y = y);
    RUN(m, quern_linear_forward, p, t);
}

static void op_norm(v4_model *m, const quern_tensor *x, const quern_tensor *weight, const quern_tensor *y)
{
    const quern_rms_norm_params p = WITH(p, .eps = (float)m->config.rms_eps);
    const quern_rms_norm_tensors t = WITH(t, .x = x, .weight = weight, .y = y);
    RUN(m, quern_rms_norm_forward, p, t);
}

static void op_rope(v4_model *m, const quern_tensor *x, const quern_tensor *cos_sin, const v4_step *step,
                    const quern_tensor *y)
{
    const quern_rope_params p = QUERN_ROPE_PARAMS_INIT;
    const quern_rope_tensors t = WITH(t, .x = x, .cos_sin = cos_sin, .positions = &step->position, .y = y);
    RUN(m, quern_rope_forward, p, t);
}

/* The sub-layer's input h; with its output f the next copies x_new, too. */
static void op_hyper(v4_model *m, const v4_hyper *w, const quern_tensor *x, const quern_tensor *f,
                     const quern_tensor *h, const quern_tensor *x_new)
{
    const v4_config *c = &m->config;
    const quern_dsv4_hyper_params p = WITH(p, .iters = c->iters, .eps = (float)c->hc_eps,
                                           .rms_eps = (float)c->rms_eps, .head = w == &m->head_hyper);
    const quern_dsv4_hyper_tensors t = WITH(t, .x = x, .fn = &w->fn, .base = &w->base, .scale = &w->scale,
                                            .norm_weight = &w->norm, .f = f, .h = h, .x_new = x_new);
    RUN(m, quern_dsv4_hyper, p, t);
}

static void op_experts(v4_model *m, const v4_layer *layer, const quern_tensor *ids, const quern_tensor *x,
                       const quern_tensor *out)
{
    const v4_config *c = &m->config;
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = layer->experts.tensors;
    p.score = c->score;
    p.top_k = c->top;
    p.renormalize = c->renormalize;
    p.route_scale = (float)c->route_scale;
    p.limit = (float)c->limit;
    if (t.gate_up_repacked != NULL) p.intermediate = c->inner;
    if (t.shared_gate_up_repacked != NULL) p.shared_intermediate = c->shared * c->inner;
    t.hidden = x;
    t.out = out;
    t.input_ids = t.tid2eid != NULL ? ids : NULL;
    RUN(m, quern_moe_forward, p, t);
}

void op_prepack(v4_model *m, const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *to)
{
    const quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    const quern_moe_prepack_tensors t = WITH(t, .b_codes = codes, .b_scales = scales, .b_repacked = to);
    RUN(m, quern_moe_prepack, p, t);
}

/* The step's raw rows, into their ring. */
static void keep(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *h)
{
    const int64_t n = h->shape[0], dim = m->config.dim;
    const quern_tensor kv = room(m, KV, SHAPE(n, dim)), normed = room(m, KV_NEXT, SHAPE(n, dim)),
                       turn = room(m, KV_NEXT, SHAPE(n, 1, dim)), turned = room(m, KV, SHAPE(n, 1, dim));
    const quern_dsv4_store_params p = WITH(p, .page = PAGE);
    const quern_dsv4_store_tensors t = WITH(t, .x = &kv, .slots = &step->raw_slot, .cache = &l->rows[0]);
    op_linear(m, h, &l->kv, 1, &kv);
    op_norm(m, &kv, &l->kv_norm, &normed);
    op_rope(m, &turn, &m->cos_sin[l->ratio > 0], step, &turned);
    RUN(m, quern_dsv4_store, p, t);
}

/* The entries that the step completes, and the indexer's keys of them, into their pages. */
static void compress(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *h)
{
    const v4_compressor *c = l->compressor, *index = &l->compressor[1];
    const quern_step *s = &step->books;
    const quern_dsv4_compress_params p = WITH(p, .kind = l->ratio == CSA ? QUERN_DSV4_CSA : QUERN_DSV4_HCA,
                                              .ratio = l->ratio, .eps = (float)m->config.rms_eps);
    quern_tensor proj[2];
    quern_dsv4_append_tensors t =
        WITH(t, .proj = proj, .b_a = &c->b_a, .norm_weight = &c->norm, .cos_sin = &m->cos_sin[1],
             .out = &l->rows[1], .table = &s->tables[l->pool], .states = &l->sums[0], .merged = &l->merged[0],
             .slots = &s->slots, .positions = &s->positions, .cu = &s->cu, .copies = &s->copies);
    for (int i = 0; i < l->compressors; i++) {
        proj[i] = room(m, PROJ + i, SHAPE(h->shape[0], c[i].w.w.shape[0]));
        op_linear(m, h, &c[i].w, 1, &proj[i]);
    }
    if (l->ratio == CSA) {
        t.b_b = &c->b_b;
        t.index_proj = &proj[1];
        t.index_b_a = &index->b_a;
        t.index_b_b = &index->b_b;
        t.index_norm_weight = &index->norm;
        t.index_out = &l->rows[2];
        t.index_table = t.table;
        t.index_states = &l->sums[1];
        t.index_merged = &l->merged[1];
    }
    RUN(m, quern_dsv4_append_step, p, t);
}

/* The entries that CSA's queries attend, chosen by the indexer. */
static void choose(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *h,
                   const quern_tensor *qr, const quern_tensor *idx, const quern_tensor *count)
{
    const int64_t n = h->shape[0], b = step->batch, heads = m->config.index_heads, dim = m->config.index_dim;
    const quern_tensor flat = room(m, IQ, SHAPE(n, heads * dim)), turn = room(m, IQ, SHAPE(n, heads, dim)),
                       turned = room(m, IQ_NEXT, SHAPE(n, heads, dim)), w = room(m, IW, SHAPE(n, heads)),
                       q = room(m, IQ_NEXT, SHAPE(b, n / b, heads, dim)),
                       weights = room(m, IW, SHAPE(b, n / b, heads));
    const quern_dsv4_index_params p = WITH(p, .ratio = CSA, .top_k = m->config.index_top, .page = PAGE);
    const quern_dsv4_index_tensors t =
        WITH(t, .q = &q, .w = &weights, .k = &l->rows[2], .k_table = &step->books.tables[l->pool],
             .start_positions = &step->books.positions, .idx = idx, .count = count);
    op_linear(m, qr, &l->index_q_b, 1, &flat);
    op_rope(m, &turn, &m->cos_sin[1], step, &turned);
    op_linear(m, h, &l->index_heads, 1, &w);
    RUN(m, quern_dsv4_index, p, t);
}

static void attention(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *h,
                      const quern_tensor *f)
{
    const v4_config *c = &m->config;
    const bool entries = l->ratio > 0, chosen = l->ratio == CSA;
    const int64_t n = h->shape[0], b = step->batch, heads = c->heads, dim = c->dim;
    const quern_tensor low = room(m, QR_RAW, SHAPE(n, c->q_lora)), qr = room(m, QR, SHAPE(n, c->q_lora)),
                       flat = room(m, Q, SHAPE(n, heads * dim)), each = room(m, Q, SHAPE(n * heads, dim)),
                       normed = room(m, Q_NEXT, SHAPE(n * heads, dim)),
                       turn = room(m, Q_NEXT, SHAPE(n, heads, dim)),
                       turned = room(m, Q, SHAPE(n, heads, dim)), q = room(m, Q, SHAPE(b, n / b, heads, dim)),
                       o = room(m, Q_NEXT, SHAPE(b, n / b, heads, dim)),
                       out = room(m, Q_NEXT, SHAPE(n, heads * dim)),
                       groups = room(m, GROUPS, SHAPE(n, c->groups * c->o_lora)),
                       idx = room(m, IDX, SHAPE(b, n / b, c->index_top)),
                       count = room(m, COUNT, SHAPE(b, n / b));
    const quern_dsv4_attention_params p =
        WITH(p, .ratio = l->ratio, .window = c->window, .start_abs_pos = -1, .page = PAGE);
    const quern_dsv4_attention_tensors t = WITH(
        t, .q = &q, .o = &o, .kv = &l->rows[0], .kv_table = &step->raw_table,
        .kv_cmp = entries ? &l->rows[1] : NULL, .kv_cmp_table = entries ? &step->books.tables[l->pool] : NULL,
        .idx = chosen ? &idx : NULL, .count = chosen ? &count : NULL,
        .start_positions = &step->books.positions, .sink = &l->sink, .cos_sin = &m->cos_sin[entries]);
    op_linear(m, h, &l->q_a, 1, &low);
    op_norm(m, &low, &l->q_norm, &qr);
    op_linear(m, &qr, &l->q_b, 1, &flat);
    op_norm(m, &each, NULL, &normed);
    op_rope(m, &turn, &m->cos_sin[entries], step, &turned);
    keep(m, l, step, h);
    if (entries) compress(m, l, step, h);
    if (chosen) choose(m, l, step, h, &qr, &idx, &count);
    RUN(m, quern_dsv4_attention, p, t);
    op_linear(m, &out, &l->o_a, c->groups, &groups);
    op_linear(m, &groups, &l->o_b, 1, f);
}

/* x -> x_new; ids: the tokens. */
static void layer_run(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *ids,
                      const quern_tensor *x, const quern_tensor *x_new)
{
    const int64_t n = x->shape[0], width = m->config.width;
    const quern_tensor h = room(m, H, SHAPE(n, width)), f = room(m, F, SHAPE(n, width)),
                       middle = room(m, X_MIDDLE, SHAPE(n, m->config.copies, width));
    op_hyper(m, &l->hyper[0], x, NULL, &h, NULL);
    attention(m, l, step, &h, &f);
    op_hyper(m, &l->hyper[0], x, &f, &h, &middle);
    op_hyper(m, &l->hyper[1], &middle, NULL, &h, NULL);
    op_experts(m, l, ids, &h, &f);
    op_hyper(m, &l->hyper[1], &middle, &f, &h, x_new);
}

/* The tokens' embeddings in the activations' dtype, of which every copy of the stream begins as a view. */
static quern_tensor embed(v4_model *m, const int32_t *tokens, int64_t n)
{
    const int64_t width = m->config.width;
    const quern_tensor *e = &m->embed, to = room(m, EMBEDDED, SHAPE(n, width));
    void *rows = host_take(tensor_bytes(&to));
    for (int64_t i = 0, at = 0; i < n; i++)
        for (int64_t c = 0; c < width; c++, at++) {
            const float value = number(e->data, e->dtype, tokens[i] * width + c);
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (m->act == QUERN_F32) ((float *)rows)[at] = value;
            else ((uint16_t *)rows)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* bf16 */
        }
    device_copy(m, to.data, rows, tensor_bytes(&to));
    free(rows);
    quern_tensor x = view(m, to.data, m->act, SHAPE(n, m->config.copies, width));
    x.strides[0] = width;
    x.strides[1] = 0;
    return x;
}

/* What a step computes, on a GPU its launches: layers, and the logits y of the last n rows, which are f32
 * whatever the activations are in. */
static void launch(v4_model *m, const v4_step *step, const quern_tensor *ids, const quern_tensor *embedded,
                   int64_t n, const quern_tensor *y)
{
    const v4_config *c = &m->config;
    const int64_t rows = ids->shape[0];
    const quern_tensor x[2] = {room(m, X, SHAPE(rows, c->copies, c->width)),
                               room(m, X_NEXT, SHAPE(rows, c->copies, c->width))};
    quern_tensor last = x[c->layers % 2];
    m->lane = 0;
    m->lanes = m->cuda && rows == step->batch ? LANES : 1;
    for (int64_t i = 0; i < c->layers; i++)
        layer_run(m, &m->layer[i], step, ids, i == 0 ? embedded : &x[i % 2], &x[1 - i % 2]);
    if (n == 0) return;
    const quern_tensor h = room(m, H, SHAPE(n, c->width)); /* as large as the layers', which are done */
    last.data = (char *)last.data + (size_t)(rows - n) * (tensor_bytes(&last) / (size_t)rows);
    last.shape[0] = n;
    op_hyper(m, &m->head_hyper, &last, NULL, &h, NULL);
    op_linear(m, &h, &m->head, 1, y);
}

void model_step(v4_model *m, int64_t first, int64_t batch, const int32_t *tokens, int64_t count, int64_t n,
                float *logits)
{
    const v4_config *c = &m->config;
    const int64_t rows = batch * count;
    const quern_tensor embedded = embed(m, tokens, rows), ids = room(m, IDS, SHAPE(rows)),
                       y = room(m, LOGITS, SHAPE(n > 0 ? n : 1, c->vocab));
    const bool again = n == batch && count == 1; /* a token of each sequence */
    v4_step step;
    device_copy(m, ids.data, tokens, tensor_bytes(&ids));
    cache_begin(m, first, batch, count, &step);
    if (again && m->recorded == batch) (void)graph(m, LAUNCH);
    else launch(m, &step, &ids, &embedded, n, &y);
    if (n > 0) device_read(m, logits, y.data, (size_t)(n * c->vocab) * sizeof *logits);
    if (again && m->recorded != batch && graph(m, BEGIN)) { /* memory is as large as it will be */
        launch(m, &step, &ids, &embedded, n, &y);
        m->recorded = graph(m, END) ? batch : 0;
    }
    check(quern_ledger_commit(m->cache.ledger));
}

/* A RoPE table for every position, made on the host. */
static quern_tensor make_table(const v4_model *m, int i, int64_t positions)
{
    const v4_config *c = &m->config;
    const quern_dsv4_rope_params p = WITH(p, .base = (float)c->base[i], .original_length = (float)c->length,
                                          .factor = i == 1 ? (float)c->factor : 0, /* with entries: YaRN */
                                          .beta_fast = (float)c->beta_fast, .beta_slow = (float)c->beta_slow);
    const quern_tensor t = make(m, QUERN_F32, SHAPE(positions, c->rope_dim)),
                       host = quern_tensor_contiguous(host_take(tensor_bytes(&t)), QUERN_F32, 2, t.shape);
    check(quern_dsv4_rope_table(&p, &host));
    device_copy(m, t.data, host.data, tensor_bytes(&t));
    free(host.data);
    return t;
}

void model_open(v4_model *m, const v4_options *o, int64_t sequences, int64_t capacity)
{
    const quern_context_params p = {.size = sizeof p, .threads = (int32_t)o->threads};
    *m = (v4_model){
        .quiet = o->quiet, .act = o->bf16 || o->cuda ? QUERN_BF16 : QUERN_F32, .cuda = o->cuda, .lanes = 1};
    m->exec.size = sizeof m->exec;
    if (o->cuda) check(quern_cuda_stream_create(0, &m->exec.stream));
    check(quern_context_create(&p, &m->ctx));
    weights_open(m, o->folder);
    experts_open(m, o->cache);
    for (int i = 0; i < 2; i++) m->cos_sin[i] = make_table(m, i, capacity + 1);
    cache_open(m, sequences, capacity, o->chunk);
}
