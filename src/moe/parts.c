/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parts.c - the layer's parts as stages: the router, and the products and gradients of routed and shared
 * experts. */
#include "moe/call.h"

#include "core/view.h"

static quern_tensor view(const moe_call *c, int32_t tensor)
{
    return op_view(&c->head, tensor, false);
}

/* Experts' matrices [E, ..]: the shared expert's, which is one matrix, as a stack of one. */
static quern_tensor stacked(const moe_call *c, int32_t tensor)
{
    const quern_tensor t = view(c, tensor);
    const bool one = tensor >= M(shared_gate) && tensor <= M(shared_down_repacked);
    return one && t.ndim > 0 ? view_with_batch(&t) : t;
}

/* Token ids [..] as [T]. */
static quern_tensor flat_ids(op_build *b)
{
    const moe_call *c = moe_call_of(b);
    const quern_tensor ids = view(c, M(input_ids));
    const int64_t tokens = c->head.symbol[MS_T], last = ids.ndim > 1 ? ids.shape[ids.ndim - 1] : 0;
    if (ids.ndim < 2) return ids;
    const quern_tensor flat = op_matrix(b, ids.dtype, last > 0 ? tokens / last : 0, last);
    op_copy(b, &ids, &flat);
    return view_on(&ids, flat.data, ids.dtype, 1, &tokens);
}

moe_routing moe_route(op_build *b, const quern_tensor *x)
{
    const moe_call *c = moe_call_of(b);
    const int64_t *s = c->head.symbol;
    const bool handed = moe_is_routed(&c->head);
    const quern_tensor logits = op_rows(b, M(logits)), ids = flat_ids(b);
    const int64_t chosen[] = {s[MS_T], s[MS_K]};
    moe_routing r = {.ends = op_result(b, M(offsets), QUERN_I32, 1, &s[MS_E]),
                     .slots = op_result(b, M(permutation), QUERN_I32, 1, &s[MS_TK])};
    r.experts = handed ? op_room(b, QUERN_I32, 2, chosen) : op_result(b, M(experts), QUERN_I32, 2, chosen);
    r.weights = handed ? op_room(b, QUERN_F32, 2, chosen) : op_result(b, M(weights), QUERN_F32, 2, chosen);
    route_args *args = OP_ADD(b, route_forward);
    *args = (route_args){.score = (route_score)c->params.score,
                         .top_k = c->params.top_k,
                         .renormalize = c->params.renormalize,
                         .scale = c->params.route_scale,
                         .logits = logits,
                         .bias = view(c, M(bias)),
                         .input_ids = ids,
                         .tid2eid = view(c, M(tid2eid)),
                         .experts = r.experts,
                         .weights = r.weights,
                         .offsets = r.ends,
                         .permutation = r.slots};
    if (handed) {
        args->given_experts = view(c, M(experts));
        args->given_weights = view(c, M(weights));
    } else if (logits.ndim == 0) {
        args->hidden = *x;
        args->weight = view(c, M(weight));
    }
    return r;
}

moe_rows moe_quantised(op_build *b, const quern_tensor *x, const quern_tensor *slots, int64_t rows,
                       const quern_tensor *ends, const quern_tensor *given)
{
    const moe_call *c = moe_call_of(b);
    const int64_t k = x->shape[1];
    moe_rows q = {.codes = op_matrix(b, QUERN_U8, rows, k / 2),
                  .scales = op_matrix(b, QUERN_U8, rows, k / QUERN_NVFP4_BLOCK),
                  .global = *given,
                  .per = given->ndim > 0 ? QUANTISE_GLOBAL_EXPERT : QUANTISE_GLOBAL_ROW};
    if (given->ndim == 0) q.global = op_matrix(b, QUERN_F32, rows, 1);
    quantise_args *args = OP_ADD(b, quantise);
    args->per = q.per;
    args->x = *x;
    args->codes = q.codes;
    args->scales = q.scales;
    args->offsets = *ends;
    args->given = *given;
    if (given->ndim == 0) args->global = q.global;
    if (slots != NULL) {
        args->slots = *slots;
        args->slots_a_row = c->params.top_k;
    }
    return q;
}

moe_rows moe_gather(op_build *b, const quern_tensor *x, const moe_routing *r)
{
    const moe_call *c = moe_call_of(b);
    const int64_t rows = c->head.symbol[MS_TK];
    if (c->params.a4) return moe_quantised(b, x, &r->slots, rows, &r->ends, &c->up_input);
    if (c->head.symbol[MS_T] == 1 && c->head.operation == MOE_FORWARD && !op_uses(&c->head, M(gate_up))) {
        moe_rows all = {.x = *x}; /* one token's, of which all rows are the same */
        all.x.shape[0] = rows;
        all.x.strides[0] = 0;
        return all;
    }
    moe_rows gathered = {.x = op_matrix(b, x->dtype, rows, x->shape[1])};
    permute_args *args = OP_ADD(b, permute);
    args->per = c->params.top_k;
    args->x = *x;
    args->permutation = r->slots;
    args->out = gathered.x;
    return gathered;
}

int64_t moe_runs(const moe_call *c, bool shared)
{
    if (shared) return op_uses(&c->head, M(shared_gate)) ? c->head.symbol[MS_IS] : c->params.granularity;
    return op_uses(&c->head, M(gate_up)) ? c->head.symbol[MS_I] : c->params.granularity;
}

swiglu_rule moe_rule(const moe_call *c, int64_t granularity)
{
    const quern_moe_params *p = &c->params;
    return (swiglu_rule){granularity > 0 ? granularity : 1, p->limit, p->alpha, p->beta};
}

quern_tensor moe_activate(op_build *b, const quern_tensor *h, int64_t granularity, quern_dtype dtype)
{
    const moe_call *c = moe_call_of(b);
    const quern_tensor act = op_matrix(b, dtype, h->shape[0], h->shape[1] / 2);
    swiglu_args *args = OP_ADD(b, swiglu_forward);
    args->rule = moe_rule(c, granularity);
    args->h = *h;
    return args->act = act;
}

/* A matrix of each expert, [n, k] in files: floats [E, n, k], or NVFP4. */
typedef struct moe_weight {
    int64_t n, k;
    quern_tensor floats, codes, scales, repacked, global, bias;
} moe_weight;

static moe_weight weight_of(const moe_call *c, int32_t floats, int32_t codes, const quern_tensor *global,
                            int64_t n, int64_t k)
{
    return (moe_weight){.n = n,
                        .k = k,
                        .floats = stacked(c, floats),
                        .codes = stacked(c, codes),
                        .scales = stacked(c, codes + 1),
                        .repacked = stacked(c, codes + 2),
                        .global = *global};
}

static moe_weight up_weight(const moe_call *c)
{
    const int64_t *s = c->head.symbol;
    moe_weight w = weight_of(c, M(gate_up), M(gate_up_codes), &c->up_global, s[MS_2I], s[MS_D]);
    w.bias = view(c, M(gate_up_bias));
    return w;
}

static moe_weight down_weight(const moe_call *c)
{
    const int64_t *s = c->head.symbol;
    moe_weight w = weight_of(c, M(down), M(down_codes), &c->down_global, s[MS_D], s[MS_I]);
    w.bias = view(c, M(down_bias));
    return w;
}

/* In floats gate and up have matrices of their own: this is the first. */
static moe_weight shared_up_weight(const moe_call *c)
{
    const int64_t *s = c->head.symbol;
    return weight_of(c, M(shared_gate), M(shared_gate_up_codes), &c->shared_up_global, s[MS_2IS], s[MS_D]);
}

static moe_weight shared_down_weight(const moe_call *c)
{
    const int64_t *s = c->head.symbol;
    return weight_of(c, M(shared_down), M(shared_down_codes), &c->shared_down_global, s[MS_D], s[MS_IS]);
}

/* to = a w^T + bias, or with `transposed` false to = a w, by a weight in floats. */
static void dense(op_build *b, const quern_tensor *a, const quern_tensor *w, bool transposed,
                  const quern_tensor *ends, const quern_tensor *bias, const quern_tensor *to)
{
    grouped_dense_args *args = OP_ADD(b, grouped_dense);
    args->a = *a;
    args->b = *w;
    args->b_transposed = transposed;
    if (ends != NULL) args->offsets = *ends;
    if (bias != NULL) args->bias = *bias;
    args->c = *to;
}

static grouped_gemm_args packed(const moe_call *c, const moe_weight *w, int64_t rows,
                                const quern_tensor *ends)
{
    return (grouped_gemm_args){.tokens = rows,
                               .n = w->n,
                               .k = w->k,
                               .rule = moe_rule(c, c->params.granularity),
                               .b_codes = w->codes,
                               .b_scales = w->scales,
                               .b_repacked = w->repacked,
                               .b_global = w->global,
                               .offsets = ends != NULL ? *ends : (quern_tensor){0}};
}

/* rows w^T + bias as f32 [R, n], or with the activation in `dtype` [R, n/2]. */
static quern_tensor product(op_build *b, const moe_rows *rows, const moe_weight *w, const quern_tensor *ends,
                            bool activate, quern_dtype dtype)
{
    const moe_call *c = moe_call_of(b);
    const int64_t r = rows->codes.ndim > 0 ? rows->codes.shape[0] : rows->x.shape[0];
    if (w->floats.ndim > 0) {
        const quern_tensor h = op_matrix(b, QUERN_F32, r, w->n);
        dense(b, &rows->x, &w->floats, true, ends, &w->bias, &h);
        return activate ? moe_activate(b, &h, w->n / 2, dtype) : h;
    }
    const quern_tensor to = op_matrix(b, activate ? dtype : QUERN_F32, r, activate ? w->n / 2 : w->n);
    grouped_gemm_args *args = OP_ADD(b, grouped_gemm);
    *args = packed(c, w, r, ends);
    args->a = rows->x;
    args->a_codes = rows->codes;
    args->a_scales = rows->scales;
    args->a_global = rows->global;
    args->a_per = rows->per;
    args->bias = w->bias;
    args->swiglu = activate;
    args->c = to;
    return to;
}

/* d w in f32, [R, k]. */
static quern_tensor gradient(op_build *b, const quern_tensor *d, const moe_weight *w,
                             const quern_tensor *ends)
{
    const quern_tensor to = op_matrix(b, QUERN_F32, d->shape[0], w->k);
    if (w->floats.ndim > 0) {
        dense(b, d, &w->floats, false, ends, NULL, &to);
        return to;
    }
    grouped_gemm_args *args = OP_ADD(b, grouped_gemm_backward);
    *args = packed(moe_call_of(b), w, d->shape[0], ends);
    args->d_c = *d;
    args->d_a = to;
    return to;
}

quern_tensor moe_up(op_build *b, const moe_rows *rows, const quern_tensor *ends, bool activate,
                    quern_dtype dtype)
{
    const moe_weight w = up_weight(moe_call_of(b));
    return product(b, rows, &w, ends, activate, dtype);
}

quern_tensor moe_down(op_build *b, const moe_rows *rows, const quern_tensor *ends)
{
    const moe_weight w = down_weight(moe_call_of(b));
    return product(b, rows, &w, ends, false, QUERN_F32);
}

bool moe_has_shared(const op_call *call)
{
    return op_uses(call, M(shared_gate)) || op_uses(call, M(shared_gate_up_codes)) ||
           op_uses(call, M(shared_gate_up_repacked));
}

/* The half of [T, 2 Is] that holds gate or up. */
static quern_tensor half(const quern_tensor *t, bool up)
{
    const int64_t width = t->shape[1] / 2;
    quern_tensor h = *t;
    view_narrow(&h, 1, up ? width : 0, width);
    return h;
}

quern_tensor moe_shared_up(op_build *b, const quern_tensor *x, bool activate)
{
    const moe_call *c = moe_call_of(b);
    const moe_weight w = shared_up_weight(c);
    const quern_dtype between = op_between_dtype(x->dtype);
    const moe_rows rows = {.x = *x};
    if (w.floats.ndim == 0) return product(b, &rows, &w, NULL, activate, between);
    const quern_tensor h = op_matrix(b, QUERN_F32, x->shape[0], w.n), gate = half(&h, false),
                       up = half(&h, true), up_floats = stacked(c, M(shared_up));
    dense(b, x, &w.floats, true, NULL, NULL, &gate);
    dense(b, x, &up_floats, true, NULL, NULL, &up);
    return activate ? moe_activate(b, &h, w.n / 2, between) : h;
}

quern_tensor moe_shared_down(op_build *b, const quern_tensor *act)
{
    const moe_weight w = shared_down_weight(moe_call_of(b));
    const moe_rows rows = {.x = *act};
    return product(b, &rows, &w, NULL, false, QUERN_F32);
}

quern_tensor moe_up_gradient(op_build *b, const quern_tensor *d_h, const quern_tensor *ends)
{
    const moe_weight w = up_weight(moe_call_of(b));
    return gradient(b, d_h, &w, ends);
}

quern_tensor moe_down_gradient(op_build *b, const quern_tensor *d_y, const quern_tensor *ends)
{
    const moe_weight w = down_weight(moe_call_of(b));
    return gradient(b, d_y, &w, ends);
}

quern_tensor moe_shared_up_gradient(op_build *b, const quern_tensor *d_h)
{
    const moe_call *c = moe_call_of(b);
    const moe_weight w = shared_up_weight(c);
    if (w.floats.ndim == 0) return gradient(b, d_h, &w, NULL);
    const quern_tensor to = op_matrix(b, QUERN_F32, d_h->shape[0], w.k), gate = half(d_h, false),
                       up = half(d_h, true);
    dense(b, &gate, &w.floats, false, NULL, NULL, &to);
    grouped_dense_args *args = OP_ADD(b, grouped_dense);
    args->a = up;
    args->b = stacked(c, M(shared_up));
    args->accumulate = true;
    args->c = to;
    return to;
}

quern_tensor moe_shared_down_gradient(op_build *b, const quern_tensor *d_y)
{
    const moe_weight w = shared_down_weight(moe_call_of(b));
    return gradient(b, d_y, &w, NULL);
}
