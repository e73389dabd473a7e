/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parts.c - the layer's parts as stages: the router, and the products and gradients of routed and shared
 * experts. */
#include "moe/call.h"

#include "core/view.h"

static quern_tensor view(const moe_call *c, moe_tensor tensor)
{
    return op_view(&c->head, tensor, false);
}

/* The shared expert's matrix as a stack of one. */
static quern_tensor stacked(const moe_call *c, moe_tensor tensor)
{
    const quern_tensor t = view(c, tensor);
    return t.ndim > 0 ? view_with_batch(&t) : t;
}

/* Token ids [..] as [T]. */
static quern_tensor flat_ids(moe_call *c)
{
    const quern_tensor ids = view(c, M_INPUT_IDS);
    const int64_t tokens = c->head.symbol[MS_T], last = ids.ndim > 1 ? ids.shape[ids.ndim - 1] : 0;
    if (ids.ndim < 2) return ids;
    permute_args *copy = moe_add_permute(c);
    copy->x = ids;
    copy->out = moe_room(c, QUERN_I32, last > 0 ? tokens / last : 0, last);
    return view_on(&ids, copy->out.data, QUERN_I32, 1, &tokens);
}

moe_routing moe_route(moe_call *c, const quern_tensor *x)
{
    const int64_t *s = c->head.symbol;
    const quern_tensor logits = moe_flat(c, M_LOGITS), ids = flat_ids(c);
    const moe_routing r = {
        moe_room(c, QUERN_I32, s[MS_T], s[MS_K]), moe_room(c, QUERN_F32, s[MS_T], s[MS_K]),
        view_on(&c->head.like, arena_take(&c->a, (size_t)s[MS_E] * 4), QUERN_I32, 1, &s[MS_E]),
        view_on(&c->head.like, arena_take(&c->a, (size_t)s[MS_TK] * 4), QUERN_I32, 1, &s[MS_TK])};
    route_args *args = moe_add_route_forward(c);
    *args = (route_args){.score = (route_score)c->params.score,
                         .top_k = c->params.top_k,
                         .renormalize = c->params.renormalize,
                         .scale = c->params.route_scale,
                         .logits = logits,
                         .bias = view(c, M_BIAS),
                         .input_ids = ids,
                         .tid2eid = view(c, M_TID2EID),
                         .experts = r.experts,
                         .weights = r.weights,
                         .offsets = r.ends,
                         .permutation = r.slots};
    if (logits.ndim == 0) {
        args->hidden = *x;
        args->weight = view(c, M_WEIGHT);
    }
    return r;
}

moe_rows moe_quantised(moe_call *c, const char *name, const quern_tensor *x, const quern_tensor *slots,
                       int64_t rows, const quern_tensor *ends, const quern_tensor *given)
{
    const int64_t k = x->shape[1];
    moe_rows q = {.codes = moe_room(c, QUERN_U8, rows, k / 2),
                  .scales = moe_room(c, QUERN_U8, rows, k / QUERN_NVFP4_BLOCK),
                  .global = *given,
                  .per = given->ndim > 0 ? QUANTISE_GLOBAL_EXPERT : QUANTISE_GLOBAL_ROW};
    if (given->ndim == 0) q.global = moe_room(c, QUERN_F32, rows, 1);
    quantise_args *args = moe_add_quantise(c);
    args->per = q.per;
    args->name = name;
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

moe_rows moe_gather(moe_call *c, const quern_tensor *x, const moe_routing *r)
{
    const int64_t rows = c->head.symbol[MS_TK];
    if (c->params.a4) return moe_quantised(c, "hidden", x, &r->slots, rows, &r->ends, &c->up_input);
    moe_rows gathered = {.x = moe_room(c, x->dtype, rows, x->shape[1])};
    permute_args *args = moe_add_permute(c);
    args->per = c->params.top_k;
    args->x = *x;
    args->permutation = r->slots;
    args->out = gathered.x;
    return gathered;
}

int64_t moe_runs(const moe_call *c, bool shared)
{
    if (shared) return op_uses(&c->head, M_SHARED_GATE) ? c->head.symbol[MS_IS] : c->params.granularity;
    return op_uses(&c->head, M_GATE_UP) ? c->head.symbol[MS_I] : c->params.granularity;
}

quern_tensor moe_activate(moe_call *c, const quern_tensor *h, int64_t granularity, quern_dtype dtype)
{
    const quern_tensor act = moe_room(c, dtype, h->shape[0], h->shape[1] / 2);
    swiglu_args *args = moe_add_swiglu_forward(c);
    args->granularity = granularity > 0 ? granularity : 1;
    args->limit = c->params.limit;
    args->alpha = c->params.alpha;
    args->beta = c->params.beta;
    args->h = *h;
    return args->act = act;
}

/* Adds a product with NVFP4 weights; the caller fills in its operands. */
static grouped_gemm_args product(const moe_call *c, int64_t rows, int64_t n, int64_t k,
                                 const quern_tensor *global, const quern_tensor *ends)
{
    return (grouped_gemm_args){.tokens = rows,
                               .n = n,
                               .k = k,
                               .granularity = c->params.granularity,
                               .b_global = *global,
                               .offsets = ends != NULL ? *ends : (quern_tensor){0}};
}

static void take_rows(grouped_gemm_args *args, const moe_rows *rows)
{
    args->a = rows->x;
    args->a_codes = rows->codes;
    args->a_scales = rows->scales;
    args->a_global = rows->global;
    args->a_per = rows->per;
}

static void activate_within(const moe_call *c, grouped_gemm_args *args)
{
    args->swiglu = true;
    args->limit = c->params.limit;
    args->alpha = c->params.alpha;
    args->beta = c->params.beta;
}

static int64_t count(const moe_rows *rows)
{
    return rows->codes.ndim > 0 ? rows->codes.shape[0] : rows->x.shape[0];
}

/* Adds a product with weights in floats. */
static quern_tensor dense(moe_call *c, const quern_tensor *a, quern_tensor b, bool transposed,
                          const quern_tensor *ends, quern_tensor bias, quern_tensor to)
{
    grouped_dense_args *args = moe_add_grouped_dense(c);
    args->a = *a;
    args->b = b;
    args->b_transposed = transposed;
    if (ends != NULL) args->offsets = *ends;
    args->bias = bias;
    return args->c = to;
}

quern_tensor moe_up(moe_call *c, const moe_rows *rows, const quern_tensor *ends, bool activate,
                    quern_dtype dtype)
{
    const int64_t *s = c->head.symbol, r = count(rows);
    if (op_uses(&c->head, M_GATE_UP)) {
        const quern_tensor h = dense(c, &rows->x, view(c, M_GATE_UP), true, ends, view(c, M_UP_BIAS),
                                     moe_room(c, QUERN_F32, r, s[MS_2I]));
        return activate ? moe_activate(c, &h, s[MS_I], dtype) : h;
    }
    const quern_tensor to = moe_room(c, activate ? dtype : QUERN_F32, r, activate ? s[MS_I] : s[MS_2I]);
    grouped_gemm_args *args = moe_add_grouped_gemm(c);
    *args = product(c, r, s[MS_2I], s[MS_D], &c->up_global, ends);
    take_rows(args, rows);
    if (activate) activate_within(c, args);
    args->b_codes = view(c, M_UP_CODES);
    args->b_scales = view(c, M_UP_SCALES);
    args->b_repacked = view(c, M_UP_REPACKED);
    args->bias = view(c, M_UP_BIAS);
    return args->c = to;
}

quern_tensor moe_down(moe_call *c, const moe_rows *rows, const quern_tensor *ends)
{
    const int64_t *s = c->head.symbol, r = count(rows);
    const quern_tensor to = moe_room(c, QUERN_F32, r, s[MS_D]);
    if (op_uses(&c->head, M_DOWN))
        return dense(c, &rows->x, view(c, M_DOWN), true, ends, view(c, M_DOWN_BIAS), to);
    grouped_gemm_args *args = moe_add_grouped_gemm(c);
    *args = product(c, r, s[MS_D], s[MS_I], &c->down_global, ends);
    take_rows(args, rows);
    args->b_codes = view(c, M_DOWN_CODES);
    args->b_scales = view(c, M_DOWN_SCALES);
    args->b_repacked = view(c, M_DOWN_REPACKED);
    args->bias = view(c, M_DOWN_BIAS);
    return args->c = to;
}

bool moe_has_shared(const op_call *call)
{
    return op_uses(call, M_SHARED_GATE) || op_uses(call, M_SHARED_UP_CODES) ||
           op_uses(call, M_SHARED_UP_REPACKED);
}

/* The half of [T, 2 Is] that holds gate or up. */
static quern_tensor half(const quern_tensor *t, int64_t width, bool up)
{
    quern_tensor h = *t;
    view_narrow(&h, 1, up ? width : 0, width);
    return h;
}

quern_tensor moe_shared_up(moe_call *c, const quern_tensor *x, bool activate)
{
    const int64_t *s = c->head.symbol;
    const moe_rows rows = {.x = *x};
    const quern_tensor none = {0};
    if (op_uses(&c->head, M_SHARED_GATE)) {
        const quern_tensor h = moe_room(c, QUERN_F32, s[MS_T], s[MS_2IS]);
        dense(c, x, stacked(c, M_SHARED_GATE), true, NULL, none, half(&h, s[MS_IS], false));
        dense(c, x, stacked(c, M_SHARED_UP), true, NULL, none, half(&h, s[MS_IS], true));
        return activate ? moe_activate(c, &h, s[MS_IS], x->dtype) : h;
    }
    const quern_tensor to =
        moe_room(c, activate ? x->dtype : QUERN_F32, s[MS_T], activate ? s[MS_IS] : s[MS_2IS]);
    grouped_gemm_args *args = moe_add_grouped_gemm(c);
    *args = product(c, s[MS_T], s[MS_2IS], s[MS_D], &c->shared_up_global, NULL);
    take_rows(args, &rows);
    if (activate) activate_within(c, args);
    args->b_codes = stacked(c, M_SHARED_UP_CODES);
    args->b_scales = stacked(c, M_SHARED_UP_SCALES);
    args->b_repacked = stacked(c, M_SHARED_UP_REPACKED);
    return args->c = to;
}

quern_tensor moe_shared_down(moe_call *c, const quern_tensor *act)
{
    const int64_t *s = c->head.symbol;
    const moe_rows rows = {.x = *act};
    const quern_tensor to = moe_room(c, QUERN_F32, s[MS_T], s[MS_D]), none = {0};
    if (op_uses(&c->head, M_SHARED_DOWN))
        return dense(c, act, stacked(c, M_SHARED_DOWN), true, NULL, none, to);
    grouped_gemm_args *args = moe_add_grouped_gemm(c);
    *args = product(c, s[MS_T], s[MS_D], s[MS_IS], &c->shared_down_global, NULL);
    take_rows(args, &rows);
    args->b_codes = stacked(c, M_SHARED_DOWN_CODES);
    args->b_scales = stacked(c, M_SHARED_DOWN_SCALES);
    args->b_repacked = stacked(c, M_SHARED_DOWN_REPACKED);
    return args->c = to;
}

quern_tensor moe_up_gradient(moe_call *c, const quern_tensor *d_h, const quern_tensor *ends)
{
    const int64_t *s = c->head.symbol;
    const quern_tensor to = moe_room(c, QUERN_F32, d_h->shape[0], s[MS_D]), none = {0};
    if (op_uses(&c->head, M_GATE_UP)) return dense(c, d_h, view(c, M_GATE_UP), false, ends, none, to);
    grouped_gemm_args *args = moe_add_grouped_gemm_backward(c);
    *args = product(c, d_h->shape[0], s[MS_2I], s[MS_D], &c->up_global, ends);
    args->b_codes = view(c, M_UP_CODES);
    args->b_scales = view(c, M_UP_SCALES);
    args->b_repacked = view(c, M_UP_REPACKED);
    args->d_c = *d_h;
    return args->d_a = to;
}

quern_tensor moe_down_gradient(moe_call *c, const quern_tensor *d_y, const quern_tensor *ends)
{
    const int64_t *s = c->head.symbol;
    const quern_tensor to = moe_room(c, QUERN_F32, d_y->shape[0], s[MS_I]), none = {0};
    if (op_uses(&c->head, M_DOWN)) return dense(c, d_y, view(c, M_DOWN), false, ends, none, to);
    grouped_gemm_args *args = moe_add_grouped_gemm_backward(c);
    *args = product(c, d_y->shape[0], s[MS_D], s[MS_I], &c->down_global, ends);
    args->b_codes = view(c, M_DOWN_CODES);
    args->b_scales = view(c, M_DOWN_SCALES);
    args->b_repacked = view(c, M_DOWN_REPACKED);
    args->d_c = *d_y;
    return args->d_a = to;
}

quern_tensor moe_shared_up_gradient(moe_call *c, const quern_tensor *d_h)
{
    const int64_t *s = c->head.symbol;
    const quern_tensor to = moe_room(c, QUERN_F32, s[MS_T], s[MS_D]), none = {0};
    if (op_uses(&c->head, M_SHARED_GATE)) {
        const quern_tensor gate = half(d_h, s[MS_IS], false), up = half(d_h, s[MS_IS], true);
        dense(c, &gate, stacked(c, M_SHARED_GATE), false, NULL, none, to);
        dense(c, &up, stacked(c, M_SHARED_UP), false, NULL, none, to);
        c->grouped_dense[c->used[MOE_grouped_dense] - 1].accumulate = true;
        return to;
    }
    grouped_gemm_args *args = moe_add_grouped_gemm_backward(c);
    *args = product(c, s[MS_T], s[MS_2IS], s[MS_D], &c->shared_up_global, NULL);
    args->b_codes = stacked(c, M_SHARED_UP_CODES);
    args->b_scales = stacked(c, M_SHARED_UP_SCALES);
    args->b_repacked = stacked(c, M_SHARED_UP_REPACKED);
    args->d_c = *d_h;
    return args->d_a = to;
}

quern_tensor moe_shared_down_gradient(moe_call *c, const quern_tensor *d_y)
{
    const int64_t *s = c->head.symbol;
    const quern_tensor to = moe_room(c, QUERN_F32, s[MS_T], s[MS_IS]), none = {0};
    if (op_uses(&c->head, M_SHARED_DOWN))
        return dense(c, d_y, stacked(c, M_SHARED_DOWN), false, NULL, none, to);
    grouped_gemm_args *args = moe_add_grouped_gemm_backward(c);
    *args = product(c, s[MS_T], s[MS_D], s[MS_IS], &c->shared_down_global, NULL);
    args->b_codes = stacked(c, M_SHARED_DOWN_CODES);
    args->b_scales = stacked(c, M_SHARED_DOWN_SCALES);
    args->b_repacked = stacked(c, M_SHARED_DOWN_REPACKED);
    args->d_c = *d_y;
    return args->d_a = to;
}
