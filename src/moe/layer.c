/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer.c - the layer's public functions, and the steps that each takes.
 *
 *   forward:  route, gather (a4: quantise), gate_up with SwiGLU, (quantise,) down, shared expert, combine
 *   backward: route, gather, gate_up, SwiGLU, then from d_out: down's gradient g of the activation,
 *             SwiGLU's gradient with each row's routing weight, gate_up's gradient, the router's, combine
 *
 * A routing weight's gradient is d_out . y of its slot. With y = act down + bias that is g . act + d_out .
 * bias, which needs no second product. Routing that is handed in is copied and sorted where the router would
 * choose it.
 */
#include "moe/call.h"

#include "core/view.h"

/* The operand of down: the activation, quantised if the call quantises operands. */
static moe_rows between(op_build *b, const quern_tensor *act, const moe_routing *r)
{
    const moe_call *c = moe_call_of(b);
    if (c->params.a4) return moe_quantised(b, act, NULL, act->shape[0], &r->ends, &c->down_input);
    return (moe_rows){.x = *act};
}

static quern_dtype between_dtype(const moe_call *c)
{
    return c->params.a4 ? QUERN_F32 : op_between_dtype(c->head.like.dtype);
}

static void build_forward(op_build *b)
{
    const moe_call *c = moe_call_of(b);
    /* Few rows do not fill a GPU. */
    if (moe_has_shared(&c->head) && c->head.symbol[MS_T] <= MOE_TOKENS_BESIDE) (void)op_beside(b);
    const quern_tensor x = op_rows(b, M(hidden));
    const moe_routing r = moe_route(b, &x);
    const moe_rows rows = moe_gather(b, &x, &r);
    const quern_tensor act = moe_up(b, &rows, &r.ends, true, between_dtype(c));
    const moe_rows middle = between(b, &act, &r);
    const quern_tensor y = moe_down(b, &middle, &r.ends);
    quern_tensor shared = {0};
    if (moe_has_shared(&c->head)) {
        const quern_tensor shared_act = moe_shared_up(b, &x, true);
        shared = moe_shared_down(b, &shared_act);
    }
    *OP_ADD(b, combine) = (combine_args){.per = c->params.top_k,
                                         .y = y,
                                         .permutation = r.slots,
                                         .weights = r.weights,
                                         .plus = shared,
                                         .out = op_view(&c->head, M(out), false)};
    if (!moe_is_routed(&c->head)) {
        op_give(b, M(experts), &r.experts);
        op_give(b, M(weights), &r.weights);
    }
    op_give(b, M(offsets), &r.ends);
    op_give(b, M(permutation), &r.slots);
}

static swiglu_args *add_swiglu_backward(op_build *b, const quern_tensor *h, const quern_tensor *d_act,
                                        int64_t granularity)
{
    const moe_call *c = moe_call_of(b);
    const quern_tensor d_h = op_matrix(b, op_between_dtype(c->head.like.dtype), h->shape[0], h->shape[1]);
    swiglu_args *args = OP_ADD(b, swiglu_backward);
    *args = (swiglu_args){.rule = moe_rule(c, granularity), .h = *h, .d_act = *d_act, .d_h = d_h};
    return args;
}

/* The activation as the down product took it. */
static quern_tensor activation_taken(op_build *b, const quern_tensor *h, const moe_routing *r)
{
    const moe_call *c = moe_call_of(b);
    const quern_tensor act = moe_activate(b, h, moe_runs(c, false), between_dtype(c));
    if (!c->params.a4) return act;
    const moe_rows rows = between(b, &act, r);
    const quern_tensor values = op_matrix(b, QUERN_F32, act.shape[0], act.shape[1]);
    *OP_ADD(b, dequantise) = (dequantise_args){.per = rows.per,
                                               .codes = rows.codes,
                                               .scales = rows.scales,
                                               .global = rows.global,
                                               .offsets = r->ends,
                                               .out = values};
    return values;
}

/* The part of the gradient of x that goes through the shared expert. */
static quern_tensor shared_gradient(op_build *b, const quern_tensor *x, const quern_tensor *d_out)
{
    const moe_call *c = moe_call_of(b);
    if (!moe_has_shared(&c->head)) return (quern_tensor){0};
    const quern_tensor h = moe_shared_up(b, x, false), d_act = moe_shared_down_gradient(b, d_out);
    const swiglu_args *args = add_swiglu_backward(b, &h, &d_act, moe_runs(c, true));
    return moe_shared_up_gradient(b, &args->d_h);
}

static void add_bias_gradients(op_build *b, const moe_routing *r, const quern_tensor *d_y,
                               const quern_tensor *d_h, const quern_tensor *d_weights)
{
    const moe_call *c = moe_call_of(b);
    const quern_tensor d_down = op_view(&c->head, M(d_down_bias), false),
                       d_up = op_view(&c->head, M(d_gate_up_bias), false);
    if (op_uses(&c->head, M(down_bias)))
        *OP_ADD(b, expert_sums) = (expert_sums_args){.x = *d_y,
                                                     .offsets = r->ends,
                                                     .permutation = r->slots,
                                                     .weights = r->weights,
                                                     .sums = d_down,
                                                     .bias = op_view(&c->head, M(down_bias), false),
                                                     .d_weights = *d_weights};
    if (d_up.ndim > 0)
        *OP_ADD(b, expert_sums) =
            (expert_sums_args){.x = *d_h, .offsets = r->ends, .permutation = r->slots, .sums = d_up};
}

/* The gradients of experts in floats: down's by d_out and activations, gate_up's by d_h and rows. */
static void add_weight_gradients(op_build *b, const moe_routing *r, const quern_tensor *x,
                                 const quern_tensor *act, const quern_tensor *d_y, const quern_tensor *d_h)
{
    const moe_call *c = moe_call_of(b);
    const quern_tensor d_down = op_view(&c->head, M(d_down), false),
                       d_up = op_view(&c->head, M(d_gate_up), false);
    if (d_down.ndim > 0)
        *OP_ADD(b, grouped_outer) = (grouped_outer_args){.a = *d_y,
                                                         .b = *act,
                                                         .offsets = r->ends,
                                                         .permutation = r->slots,
                                                         .weights = r->weights,
                                                         .c = d_down};
    if (d_up.ndim > 0)
        *OP_ADD(b, grouped_outer) = (grouped_outer_args){.a = *d_h, .b = *x, .offsets = r->ends, .c = d_up};
}

/* The router's gradients from those of its weights; returns that of the hidden states, if it is wanted. */
static quern_tensor router_gradient(op_build *b, const quern_tensor *x, const moe_routing *r,
                                    const quern_tensor *d_weights)
{
    const moe_call *c = moe_call_of(b);
    const bool from_hidden = op_uses(&c->head, M(weight)),
               wants_x = from_hidden && op_uses(&c->head, M(d_hidden));
    const bool wants_logits = op_uses(&c->head, M(d_logits));
    if (!wants_x && !wants_logits && !op_uses(&c->head, M(d_weight))) return (quern_tensor){0};
    const int64_t *s = c->head.symbol;
    const quern_tensor logits = op_rows(b, M(logits)), none = {0};
    const quern_tensor d_logits = wants_logits ? op_matrix(b, logits.dtype, s[MS_T], s[MS_E]) : none;
    const quern_tensor d_x = wants_x ? op_matrix(b, QUERN_F32, s[MS_T], s[MS_D]) : none;
    *OP_ADD(b, route_backward) = (route_args){.score = (route_score)c->params.score,
                                              .top_k = c->params.top_k,
                                              .renormalize = c->params.renormalize,
                                              .scale = c->params.route_scale,
                                              .logits = logits,
                                              .hidden = from_hidden ? *x : none,
                                              .weight = op_view(&c->head, M(weight), false),
                                              .experts = r->experts,
                                              .d_weights = *d_weights,
                                              .d_logits = d_logits,
                                              .d_hidden = d_x,
                                              .d_weight = op_view(&c->head, M(d_weight), false)};
    if (wants_logits) op_give(b, M(d_logits), &d_logits);
    return d_x;
}

static void build_backward(op_build *b)
{
    const moe_call *c = moe_call_of(b);
    const int64_t *s = c->head.symbol;
    const quern_tensor x = op_rows(b, M(hidden)), d_out = op_rows(b, M(d_out));
    const moe_routing r = moe_route(b, &x);
    const moe_rows rows = moe_gather(b, &x, &r);
    const quern_tensor h = moe_up(b, &rows, &r.ends, false, QUERN_F32), act = activation_taken(b, &h, &r);
    const quern_tensor d_y = op_matrix(b, d_out.dtype, s[MS_TK], s[MS_D]);
    *OP_ADD(b, permute) = (permute_args){c->params.top_k, d_out, r.slots, d_y};
    const quern_tensor d_act = moe_down_gradient(b, &d_y, &r.ends),
                       d_weights = op_matrix(b, QUERN_F32, s[MS_T], s[MS_K]);
    const quern_tensor shared =
        op_uses(&c->head, M(d_hidden)) ? shared_gradient(b, &x, &d_out) : (quern_tensor){0};
    swiglu_args *step = add_swiglu_backward(b, &h, &d_act, moe_runs(c, false));
    step->act = act;
    step->permutation = r.slots;
    step->weights = r.weights;
    step->d_weights = d_weights;
    const quern_tensor d_h = step->d_h;
    add_bias_gradients(b, &r, &d_y, &d_h, &d_weights);
    add_weight_gradients(b, &r, &rows.x, &act, &d_y, &d_h);
    const quern_tensor routed = router_gradient(b, &x, &r, &d_weights);
    op_give(b, M(d_weights), &d_weights);
    if (!op_uses(&c->head, M(d_hidden))) return;
    const quern_tensor d_rows = moe_up_gradient(b, &d_h, &r.ends);
    *OP_ADD(b, combine) = (combine_args){.per = c->params.top_k,
                                         .y = d_rows,
                                         .permutation = r.slots,
                                         .plus = shared,
                                         .plus_too = routed,
                                         .out = op_view(&c->head, M(d_hidden), false)};
}

/* Experts' globals: [], [E] and [E, 2] become [1, 1], [E, 1] and [E, 2]. */
static quern_tensor global_view(const op_call *call, int32_t tensor)
{
    quern_tensor g = op_view(call, tensor, false);
    if (g.ndim != 1) return g;
    g.shape[1] = 1;
    g.strides[1] = 1;
    g.ndim = 2;
    return g;
}

/* One for each expert's rows, of which one number is that of all. */
static quern_tensor input_global_view(const op_call *call, int32_t tensor)
{
    quern_tensor g = global_view(call, tensor);
    if (g.ndim == 0 || g.shape[0] == call->symbol[MS_E]) return g;
    g.shape[0] = call->symbol[MS_E];
    g.strides[0] = 0;
    return g;
}

/* The shared expert's globals: [] and [2] become [1, 1] and [1, 2]. */
static quern_tensor shared_global_view(const op_call *call, int32_t tensor)
{
    const quern_tensor g = op_view(call, tensor, false);
    return g.ndim == 1 ? view_with_batch(&g) : g;
}

void moe_build(op_build *b)
{
    op_call *call = b->call;
    moe_call *c = moe_call_of(b);
    c->up_global = global_view(call, M(gate_up_global));
    c->down_global = global_view(call, M(down_global));
    c->up_input = input_global_view(call, M(gate_up_input_global));
    c->down_input = input_global_view(call, M(down_input_global));
    c->shared_up_global = shared_global_view(call, M(shared_gate_up_global));
    c->shared_down_global = shared_global_view(call, M(shared_down_global));
    if (call->operation == MOE_FORWARD) build_forward(b);
    else build_backward(b);
}

quern_status quern_moe_forward_workspace(quern_context *ctx, const quern_moe_params *params,
                                         const quern_moe_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&moe_family, MOE_FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_moe_forward(quern_context *ctx, const quern_exec *exec, const quern_moe_params *params,
                               const quern_moe_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&moe_family, MOE_FORWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_moe_backward_workspace(quern_context *ctx, const quern_moe_params *params,
                                          const quern_moe_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&moe_family, MOE_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_moe_backward(quern_context *ctx, const quern_exec *exec, const quern_moe_params *params,
                                const quern_moe_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&moe_family, MOE_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}
