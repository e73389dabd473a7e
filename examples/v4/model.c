/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * model.c - a step of the model. First the calls of Quern, a function each: its parameters, its tensors, as
 * much workspace as it asks for. Then what a layer makes of them, and embeddings, layers, logits.
 */
#include "v4.h"

#include <stdlib.h>
#include <string.h>

/* The two functions of an operation: how many bytes it needs, and the call itself. */
#define RUN(m, need, call, p, t)                                                                             \
    do {                                                                                                     \
        size_t bytes;                                                                                        \
        check(need((m)->ctx, p, t, &bytes));                                                                 \
        check(call((m)->ctx, NULL, p, t, device_room(m, WORKSPACE, bytes), bytes));                          \
    } while (0)

static void op_linear(v4_model *m, const quern_tensor *x, const v4_matrix *w, int64_t groups,
                      const quern_tensor *y)
{
    quern_linear_params p = QUERN_LINEAR_PARAMS_INIT;
    quern_linear_tensors t = {.size = sizeof t, .x = x, .y = y};
    p.groups = groups;
    p.block = w->block;
    t.w = &w->w;
    t.w_scale = w->scale.data != NULL ? &w->scale : NULL;
    RUN(m, quern_linear_forward_workspace, quern_linear_forward, &p, &t);
}

static void op_norm(v4_model *m, const quern_tensor *x, const quern_tensor *weight, const quern_tensor *y)
{
    const quern_rms_norm_params p = {.size = sizeof p, .eps = (float)m->config.rms_eps};
    const quern_rms_norm_tensors t = {.size = sizeof t, .x = x, .weight = weight, .y = y};
    RUN(m, quern_rms_norm_forward_workspace, quern_rms_norm_forward, &p, &t);
}

static void op_rope(v4_model *m, const quern_tensor *x, const quern_tensor *cos_sin, const v4_step *step,
                    const quern_tensor *y)
{
    const quern_rope_params p = QUERN_ROPE_PARAMS_INIT;
    const quern_rope_tensors t = {
        .size = sizeof t, .x = x, .cos_sin = cos_sin, .positions = &step->position, .y = y};
    RUN(m, quern_rope_forward_workspace, quern_rope_forward, &p, &t);
}

static void op_store(v4_model *m, const quern_tensor *x, const quern_tensor *slots, const quern_tensor *pool)
{
    const quern_dsv4_store_params p = {.size = sizeof p, .page = PAGE};
    const quern_dsv4_store_tensors t = {.size = sizeof t, .x = x, .slots = slots, .cache = pool};
    RUN(m, quern_dsv4_store_workspace, quern_dsv4_store, &p, &t);
}

/* Appends to the layer's compressors: projections in, entries that become whole into their pages. */
static void op_append(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *proj)
{
    const v4_compressor *main = &l->compressor[0], *index = &l->compressor[1];
    const bool csa = l->ratio == CSA;
    const quern_dsv4_compress_params p = {.size = sizeof p,
                                          .kind = csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA,
                                          .ratio = l->ratio,
                                          .eps = (float)m->config.rms_eps};
    quern_dsv4_append_tensors t = {.size = sizeof t,
                                   .proj = proj,
                                   .b_a = &main->b_a,
                                   .norm_weight = &main->norm,
                                   .cos_sin = &m->cos_sin[1],
                                   .out = &l->rows[1],
                                   .table = &step->books.tables[l->pool],
                                   .states = &l->sums[0],
                                   .merged = &l->merged[0],
                                   .slots = &step->books.slots,
                                   .positions = &step->books.positions,
                                   .cu = &step->books.cu,
                                   .copies = &step->books.copies};
    if (csa) {
        t.b_b = &main->b_b;
        t.index_proj = proj + 1;
        t.index_b_a = &index->b_a;
        t.index_b_b = &index->b_b;
        t.index_norm_weight = &index->norm;
        t.index_out = &l->rows[2];
        t.index_table = t.table;
        t.index_states = &l->sums[1];
        t.index_merged = &l->merged[1];
    }
    RUN(m, quern_dsv4_append_step_workspace, quern_dsv4_append_step, &p, &t);
}

static void op_index(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *q,
                     const quern_tensor *weights, const quern_tensor *idx, const quern_tensor *count)
{
    const quern_dsv4_index_params p = {
        .size = sizeof p, .ratio = CSA, .top_k = m->config.index_top, .page = PAGE};
    const quern_dsv4_index_tensors t = {.size = sizeof t,
                                        .q = q,
                                        .w = weights,
                                        .k = &l->rows[2],
                                        .k_table = &step->books.tables[l->pool],
                                        .start_positions = &step->books.positions,
                                        .idx = idx,
                                        .count = count};
    RUN(m, quern_dsv4_index_workspace, quern_dsv4_index, &p, &t);
}

static void op_attend(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *q,
                      const quern_tensor *idx, const quern_tensor *count, const quern_tensor *o)
{
    const bool entries = l->ratio > 0, chosen = l->ratio == CSA;
    const quern_dsv4_attention_params p = {
        .size = sizeof p, .ratio = l->ratio, .window = m->config.window, .start_abs_pos = -1, .page = PAGE};
    const quern_dsv4_attention_tensors t = {.size = sizeof t,
                                            .q = q,
                                            .o = o,
                                            .kv = &l->rows[0],
                                            .kv_table = &step->raw_table,
                                            .kv_cmp = entries ? &l->rows[1] : NULL,
                                            .kv_cmp_table = entries ? &step->books.tables[l->pool] : NULL,
                                            .idx = chosen ? idx : NULL,
                                            .count = chosen ? count : NULL,
                                            .start_positions = &step->books.positions,
                                            .sink = &l->sink,
                                            .cos_sin = &m->cos_sin[entries]};
    RUN(m, quern_dsv4_attention_workspace, quern_dsv4_attention, &p, &t);
}

static void op_hyper(v4_model *m, const v4_hyper *w, const quern_tensor *x, const quern_tensor *f,
                     const quern_tensor *h, const quern_tensor *x_new)
{
    const quern_dsv4_hyper_params p = {.size = sizeof p,
                                       .iters = m->config.iters,
                                       .eps = (float)m->config.hc_eps,
                                       .rms_eps = (float)m->config.rms_eps,
                                       .head = w == &m->head_hyper};
    const quern_dsv4_hyper_tensors t = {.size = sizeof t,
                                        .x = x,
                                        .fn = &w->fn,
                                        .base = &w->base,
                                        .scale = &w->scale,
                                        .norm_weight = &w->norm,
                                        .f = f,
                                        .h = h,
                                        .x_new = x_new};
    RUN(m, quern_dsv4_hyper_workspace, quern_dsv4_hyper, &p, &t);
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
    RUN(m, quern_moe_forward_workspace, quern_moe_forward, &p, &t);
}

void op_prepack(v4_model *m, const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *to)
{
    const quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    const quern_moe_prepack_tensors t = {
        .size = sizeof t, .b_codes = codes, .b_scales = scales, .b_repacked = to};
    RUN(m, quern_moe_prepack_workspace, quern_moe_prepack, &p, &t);
}

/* The entries that CSA's queries attend, chosen by the indexer. */
static void choose(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *h,
                   const quern_tensor *qr, const quern_tensor *idx, const quern_tensor *count)
{
    const int64_t n = h->shape[0], b = step->batch, heads = m->config.index_heads, dim = m->config.index_dim;
    const quern_tensor flat = room(m, IQ, SHAPE(n, heads * dim)), q = room(m, IQ, SHAPE(n, heads, dim)),
                       turned = room(m, IQ_NEXT, SHAPE(n, heads, dim)), w = room(m, IW, SHAPE(n, heads)),
                       queries = room(m, IQ_NEXT, SHAPE(b, n / b, heads, dim)),
                       weights = room(m, IW, SHAPE(b, n / b, heads));
    op_linear(m, qr, &l->index_q_b, 1, &flat);
    op_rope(m, &q, &m->cos_sin[1], step, &turned);
    op_linear(m, h, &l->index_heads, 1, &w);
    op_index(m, l, step, &queries, &weights, idx, count);
}

static void attention(v4_model *m, const v4_layer *l, const v4_step *step, const quern_tensor *h,
                      const quern_tensor *f)
{
    const v4_config *c = &m->config;
    const quern_tensor *cos_sin = &m->cos_sin[l->ratio > 0];
    const int64_t n = h->shape[0], b = step->batch, heads = c->heads, dim = c->dim;
    const quern_tensor low = room(m, QR_RAW, SHAPE(n, c->q_lora)), qr = room(m, QR, SHAPE(n, c->q_lora)),
                       flat = room(m, Q, SHAPE(n, heads * dim)), each = room(m, Q, SHAPE(n * heads, dim)),
                       normed = room(m, Q_NEXT, SHAPE(n * heads, dim)),
                       turn = room(m, Q_NEXT, SHAPE(n, heads, dim)),
                       turned = room(m, Q, SHAPE(n, heads, dim)), q = room(m, Q, SHAPE(b, n / b, heads, dim)),
                       kv = room(m, KV, SHAPE(n, dim)), kv_normed = room(m, KV_NEXT, SHAPE(n, dim)),
                       kv_turn = room(m, KV_NEXT, SHAPE(n, 1, dim)),
                       kv_turned = room(m, KV, SHAPE(n, 1, dim)),
                       o = room(m, Q_NEXT, SHAPE(b, n / b, heads, dim)),
                       out = room(m, Q_NEXT, SHAPE(n, heads * dim)),
                       groups = room(m, GROUPS, SHAPE(n, c->groups * c->o_lora)),
                       idx = room(m, IDX, SHAPE(b, n / b, c->index_top)),
                       count = room(m, COUNT, SHAPE(b, n / b));
    quern_tensor proj[2];
    op_linear(m, h, &l->q_a, 1, &low);
    op_norm(m, &low, &l->q_norm, &qr);
    op_linear(m, &qr, &l->q_b, 1, &flat);
    op_norm(m, &each, NULL, &normed);
    op_rope(m, &turn, cos_sin, step, &turned);
    /* The step's raw rows, into their ring. */
    op_linear(m, h, &l->kv, 1, &kv);
    op_norm(m, &kv, &l->kv_norm, &kv_normed);
    op_rope(m, &kv_turn, cos_sin, step, &kv_turned);
    op_store(m, &kv, &step->raw_slot, &l->rows[0]);
    /* The entries that the step completes, and the indexer's keys of them, into their pools. */
    for (int i = 0; i < l->compressors; i++) {
        const v4_matrix *w = &l->compressor[i].w;
        proj[i] = room(m, PROJ + i, SHAPE(n, w->w.shape[0]));
        op_linear(m, h, w, 1, &proj[i]);
    }
    if (l->compressors > 0) op_append(m, l, step, proj);
    if (l->ratio == CSA) choose(m, l, step, h, &qr, &idx, &count);
    op_attend(m, l, step, &q, &idx, &count, &o);
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

static void put_number(float x, void *data, quern_dtype dtype, int64_t i)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    if (dtype == QUERN_F32) memcpy((char *)data + 4 * i, &x, sizeof x);
    else memcpy((char *)data + 2 * i, &half, sizeof half);
}

/* Every copy of the residual stream starts as the token's embedding. */
static void embed(v4_model *m, const int32_t *tokens, const quern_tensor *x)
{
    const int64_t width = m->config.width, copies = m->config.copies;
    const quern_tensor *e = &m->embed;
    char *rows = host_take(tensor_bytes(x));
    for (int64_t i = 0; i < x->shape[0] * copies * width; i++)
        put_number(number(e->data, e->dtype, tokens[i / (copies * width)] * width + i % width), rows, m->act,
                   i);
    device_copy(m, x->data, rows, tensor_bytes(x));
    free(rows);
}

/* Logits of the last n rows, in f32 whatever the activations are in. */
static void head(v4_model *m, const quern_tensor *x, int64_t n, float *logits)
{
    const v4_config *c = &m->config;
    const quern_tensor h = room(m, H, SHAPE(n, c->width)), wide = room(m, WIDE, SHAPE(n, c->width)),
                       y = room(m, LOGITS, SHAPE(n, c->vocab));
    quern_tensor last = *x;
    last.shape[0] = n;
    last.data = (char *)x->data + tensor_bytes(x) - tensor_bytes(&last);
    op_hyper(m, &m->head_hyper, &last, NULL, &h, NULL);
    widen(m, &h, &wide);
    op_linear(m, &wide, &m->head, 1, &y);
    device_copy(m, logits, y.data, tensor_bytes(&y));
}

void model_step(v4_model *m, int64_t first, int64_t batch, const int32_t *tokens, int64_t count, int64_t n,
                float *logits)
{
    const v4_config *c = &m->config;
    const int64_t rows = batch * count;
    const quern_tensor x[2] = {room(m, X, SHAPE(rows, c->copies, c->width)),
                               room(m, X_NEXT, SHAPE(rows, c->copies, c->width))},
                       ids = room(m, IDS, SHAPE(rows));
    v4_step step;
    device_copy(m, ids.data, tokens, tensor_bytes(&ids));
    embed(m, tokens, &x[0]);
    cache_begin(m, first, batch, count, &step);
    for (int64_t i = 0; i < c->layers; i++) layer_run(m, &m->layer[i], &step, &ids, &x[i % 2], &x[1 - i % 2]);
    if (n > 0) head(m, &x[c->layers % 2], n, logits);
    check(quern_ledger_commit(m->cache.ledger));
}

/* A RoPE table for every position, made on the host. */
static quern_tensor make_table(const v4_model *m, int i, int64_t positions)
{
    const v4_config *c = &m->config;
    const quern_dsv4_rope_params p = {.size = sizeof p,
                                      .base = (float)c->base[i],
                                      .factor = i == 1 ? (float)c->factor : 0, /* layers with entries: YaRN */
                                      .original_length = (float)c->length,
                                      .beta_fast = (float)c->beta_fast,
                                      .beta_slow = (float)c->beta_slow};
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
    *m = (v4_model){.quiet = o->quiet, .act = o->bf16 ? QUERN_BF16 : QUERN_F32, .cuda = o->cuda};
    if (o->cuda) check(quern_cuda_check(0));
    check(quern_context_create(&p, &m->ctx));
    weights_open(m, o->folder);
    experts_open(m, o->cache);
    for (int i = 0; i < 2; i++) m->cos_sin[i] = make_table(m, i, capacity + 1);
    cache_open(m, sequences, capacity, o->chunk);
}
