/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer.c - a layer: attention and experts, each between hyper-connections. */
#include "v4.h"

/* Rows first ... first + n - 1 of a projection. FP8 can be cut between its blocks alone. */
static bool rows_of(const v4_matrix *w, int64_t first, int64_t n, v4_matrix *part)
{
    const int64_t block = w->codes ? 1 : w->block;
    *part = *w;
    part->w.data = (char *)w->w.data + (size_t)first * (tensor_bytes(&w->w) / (size_t)w->w.shape[0]);
    part->w.shape[0] = n;
    if (w->scale.ndim != 2) return true;
    if (first % block != 0 || (n % block != 0 && first + n < w->w.shape[0]))
        return fail("a compressor's FP8 scales are of %lld rows, its series of %lld", (long long)block,
                    (long long)n);
    const size_t row = tensor_bytes(&w->scale) / (size_t)w->scale.shape[0];
    part->scale.data = (char *)w->scale.data + (size_t)(first / block) * row;
    part->scale.shape[0] = (n + block - 1) / block;
    return true;
}

/* Values and logits of a compressor: [R, C_a Z_a C_b Z_b], in HCA [R, C Z]. The checkpoint's rows begin with
 * series b. */
static bool project(v4_model *m, int64_t ratio, const v4_compressor *c, const quern_tensor *h,
                    const quern_tensor *proj)
{
    const int64_t width = c->norm.shape[0], series = ratio == CSA ? 2 : 1;
    for (int64_t i = 0; i < 2 * series; i++) {
        v4_matrix w;
        quern_tensor y = *proj;
        y.data = (char *)proj->data + (size_t)(i * width) * quern_dtype_size(m->act);
        y.shape[1] = width;
        if (!rows_of(i % 2 == 0 ? &c->kv : &c->gate, (series - 1 - i / 2) * width, width, &w) ||
            !op_linear(m, h, &w, 1, &y))
            return false;
    }
    return true;
}

/* The entries that the step completes, into a pool. */
static bool compress(v4_model *m, int64_t ratio, const v4_step *step, const v4_compressor *c,
                     const quern_tensor *h, const v4_state *state, const quern_tensor *pool)
{
    const quern_tensor *slots = &step->entry_slot[cache_ratio(&m->config, ratio)];
    const int64_t width = c->norm.shape[0], columns = (ratio == CSA ? 4 : 2) * width;
    const quern_tensor proj = room(m, PROJ, 2, h->shape[0], columns, 1, 1),
                       entries = room(m, ENTRIES, 2, slots->shape[0], width, 1, 1);
    return project(m, ratio, c, h, &proj) && op_append(m, ratio, step, c, &proj, state, &entries) &&
           op_store(m, &entries, slots, pool);
}

/* The entries that CSA's queries attend, chosen by the indexer. */
static bool choose(v4_model *m, const v4_layer *l, const v4_rows *rows, const v4_step *step,
                   const quern_tensor *h, const quern_tensor *qr, const quern_tensor *idx,
                   const quern_tensor *count)
{
    const int64_t n = h->shape[0], b = step->batch, heads = m->config.index_heads, dim = m->config.index_dim;
    const quern_tensor flat = room(m, IQ, 2, n, heads * dim, 1, 1), q = room(m, IQ, 3, n, heads, dim, 1),
                       turned = room(m, IQ_NEXT, 3, n, heads, dim, 1), w = room(m, IW, 2, n, heads, 1, 1),
                       queries = room(m, IQ_NEXT, 4, b, n / b, heads, dim),
                       weights = room(m, IW, 3, b, n / b, heads, 1);
    return compress(m, CSA, step, &l->index, h, &rows->index, &rows->keys) &&
           op_linear(m, qr, &l->index_q_b, 1, &flat) && op_rope(m, &q, &m->cos_sin[1], step, &turned) &&
           op_linear(m, h, &l->index_heads, 1, &w) &&
           op_index(m, step, &queries, &weights, &rows->keys, idx, count);
}

/* The step's raw rows, into their ring. */
static bool keep(v4_model *m, const v4_layer *l, const v4_rows *rows, const v4_step *step,
                 const quern_tensor *cos_sin, const quern_tensor *h)
{
    const int64_t n = h->shape[0], dim = m->config.dim;
    const quern_tensor kv = room(m, KV, 2, n, dim, 1, 1), normed = room(m, KV_NEXT, 2, n, dim, 1, 1),
                       head = room(m, KV_NEXT, 3, n, 1, dim, 1), turned = room(m, KV, 3, n, 1, dim, 1);
    return op_linear(m, h, &l->kv, 1, &kv) && op_norm(m, &kv, &l->kv_norm, &normed) &&
           op_rope(m, &head, cos_sin, step, &turned) && op_store(m, &kv, &step->raw_slot, &rows->raw);
}

static bool attention(v4_model *m, int64_t number, const v4_step *step, const quern_tensor *h,
                      const quern_tensor *f)
{
    const v4_config *c = &m->config;
    const v4_layer *l = &m->layer[number];
    const v4_rows *rows = &m->cache.layer[number];
    const int64_t n = h->shape[0], b = step->batch, ratio = c->ratio[number], heads = c->heads, dim = c->dim;
    const quern_tensor *cos_sin = &m->cos_sin[ratio > 0];
    const quern_tensor low = room(m, QR_RAW, 2, n, c->q_lora, 1, 1), qr = room(m, QR, 2, n, c->q_lora, 1, 1),
                       flat = room(m, Q, 2, n, heads * dim, 1, 1), each = room(m, Q, 2, n * heads, dim, 1, 1),
                       normed = room(m, Q_NEXT, 2, n * heads, dim, 1, 1),
                       turn = room(m, Q_NEXT, 3, n, heads, dim, 1), turned = room(m, Q, 3, n, heads, dim, 1),
                       q = room(m, Q, 4, b, n / b, heads, dim), o = room(m, Q_NEXT, 4, b, n / b, heads, dim),
                       out = room(m, Q_NEXT, 2, n, heads * dim, 1, 1),
                       groups = room(m, GROUPS, 2, n, c->groups * c->o_lora, 1, 1),
                       idx = room(m, IDX, 3, b, n / b, c->index_top, 1),
                       count = room(m, COUNT, 2, b, n / b, 1, 1);
    return op_linear(m, h, &l->q_a, 1, &low) && op_norm(m, &low, &l->q_norm, &qr) &&
           op_linear(m, &qr, &l->q_b, 1, &flat) && op_norm(m, &each, NULL, &normed) &&
           op_rope(m, &turn, cos_sin, step, &turned) && keep(m, l, rows, step, cos_sin, h) &&
           (ratio == 0 || compress(m, ratio, step, &l->main, h, &rows->main, &rows->entries)) &&
           (ratio != CSA || choose(m, l, rows, step, h, &qr, &idx, &count)) &&
           op_attend(m, step, ratio, &l->sink, rows, &q, &idx, &count, &o) &&
           op_linear(m, &out, &l->o_a, c->groups, &groups) && op_linear(m, &groups, &l->o_b, 1, f);
}

bool layer_run(v4_model *m, int64_t number, const v4_step *step, const quern_tensor *ids,
               const quern_tensor *x, const quern_tensor *x_new)
{
    const v4_layer *l = &m->layer[number];
    const int64_t n = x->shape[0], width = m->config.width;
    const quern_tensor h = room(m, H, 2, n, width, 1, 1), f = room(m, F, 2, n, width, 1, 1),
                       middle = room(m, X_MIDDLE, 3, n, m->config.copies, width, 1);
    return op_hyper(m, &l->hyper[0], x, NULL, &h, NULL) && attention(m, number, step, &h, &f) &&
           op_hyper(m, &l->hyper[0], x, &f, &h, &middle) &&
           op_hyper(m, &l->hyper[1], &middle, NULL, &h, NULL) && op_experts(m, l, ids, &h, &f) &&
           op_hyper(m, &l->hyper[1], &middle, &f, &h, x_new);
}
