/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* route.c - the router and its gradient: checks, then one stage. */
#include <quern/moe.h>

#include "backend.h"
#include "core/arena.h"
#include "core/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"

#include <math.h>

typedef struct route_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_tensor like;
    route_args args;
} route_call;

static quern_status check_params(const quern_moe_route_params *p)
{
    if (p->score < QUERN_MOE_SCORE_SOFTMAX || p->score > QUERN_MOE_SCORE_SIGMOID)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "score is %d: 0 (softmax), 1 (sqrt_softplus) or 2 (sigmoid) is accepted",
                         (int)p->score);
    if (!isfinite(p->route_scale))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "route_scale is %g: a finite number is accepted",
                         (double)p->route_scale);
    return QUERN_OK;
}

static quern_status check_presence(const quern_moe_route_tensors *t, bool backward)
{
    if ((t->logits != NULL) == (t->hidden != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "logits and hidden: exactly one of them is accepted");
    if ((t->hidden != NULL) != (t->weight != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "hidden and weight: both or neither are accepted");
    if (backward) {
        if ((t->d_hidden != NULL || t->d_weight != NULL) && t->hidden == NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "%s is given without hidden: with logits, d_logits is accepted",
                             t->d_hidden != NULL ? "d_hidden" : "d_weight");
        return QUERN_OK;
    }
    if ((t->input_ids != NULL) != (t->tid2eid != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "input_ids and tid2eid: both or neither are accepted");
    if (t->bias != NULL && t->tid2eid != NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "bias is given with tid2eid: one or the other is accepted");
    return QUERN_OK;
}

/* T, E and D (0 with logits), from the inputs. */
static quern_status read_shape(const quern_moe_route_params *p, const quern_moe_route_tensors *t, bool run,
                               int64_t shape[3])
{
    quern_status status;
    const view_rule logits = {"logits", t->logits, VIEW_F32, 2, {VIEW_ANY, VIEW_ANY}, true, false};
    const view_rule hidden = {"hidden", t->hidden, VIEW_ACTIVATION, 2, {VIEW_ANY, VIEW_ANY}, true, false};
    const view_rule weight = {"weight", t->weight, VIEW_ACTIVATION, 2, {VIEW_ANY, VIEW_ANY}, true, false};
    if ((status = view_check(&logits, NULL, run)) != QUERN_OK ||
        (status = view_check(&hidden, NULL, run)) != QUERN_OK ||
        (status = view_check(&weight, t->hidden, run)) != QUERN_OK)
        return status;
    shape[0] = t->logits != NULL ? t->logits->shape[0] : t->hidden->shape[0];
    shape[1] = t->logits != NULL ? t->logits->shape[1] : t->weight->shape[0];
    shape[2] = t->logits != NULL ? 0 : t->hidden->shape[1];
    if (p->top_k < 1 || p->top_k > shape[1])
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "top_k is %lld: 1 to the %lld experts is accepted",
                         (long long)p->top_k, (long long)shape[1]);
    if (shape[1] > INT32_MAX || shape[0] > INT32_MAX / p->top_k)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld tokens of %lld experts each: at most %d slots are accepted",
                         (long long)shape[0], (long long)p->top_k, INT32_MAX);
    return QUERN_OK;
}

static quern_status check_tensors(const quern_moe_route_params *p, const quern_moe_route_tensors *t,
                                  const int64_t shape[3], bool backward, bool run)
{
    const int64_t tokens = shape[0], experts = shape[1], dim = shape[2], k = p->top_k;
    const quern_tensor *like = t->logits != NULL ? t->logits : t->hidden;
    const uint32_t act = 1u << like->dtype;
    const bool forward = !backward;
    const view_rule rules[] = {
        {"logits", t->logits, VIEW_F32, 2, {tokens, experts}, true, false},
        {"hidden", t->hidden, VIEW_ACTIVATION, 2, {tokens, dim}, true, false},
        {"weight", t->weight, VIEW_ACTIVATION, 2, {experts, dim}, true, false},
        {"bias", forward ? t->bias : NULL, VIEW_F32, 1, {experts}, true, false},
        {"input_ids", forward ? t->input_ids : NULL, VIEW_I32, 1, {tokens}, true, false},
        {"tid2eid", forward ? t->tid2eid : NULL, VIEW_I32, 2, {VIEW_ANY, k}, true, false},
        {"experts", t->experts, VIEW_I32, 2, {tokens, k}, false, forward},
        {"weights", forward ? t->weights : NULL, VIEW_F32, 2, {tokens, k}, backward, true},
        {"offsets", forward ? t->offsets : NULL, VIEW_I32, 1, {experts}, backward, true},
        {"permutation", forward ? t->permutation : NULL, VIEW_I32, 1, {tokens * k}, backward, true},
        {"d_weights", backward ? t->d_weights : NULL, VIEW_F32, 2, {tokens, k}, forward, false},
        {"d_logits", backward ? t->d_logits : NULL, VIEW_F32, 2, {tokens, experts}, true, true},
        {"d_hidden", backward ? t->d_hidden : NULL, act, 2, {tokens, dim}, true, true},
        {"d_weight", backward ? t->d_weight : NULL, VIEW_F32, 2, {experts, dim}, true, true},
    };
    return view_check_all(rules, sizeof rules / sizeof *rules, like, run);
}

static void fill(const quern_moe_route_params *p, const quern_moe_route_tensors *t, bool backward,
                 route_args *args)
{
    *args = (route_args){.score = (route_score)p->score,
                         .top_k = p->top_k,
                         .renormalize = p->renormalize,
                         .scale = p->route_scale};
    args->logits = view_or_absent(t->logits);
    args->hidden = view_or_absent(t->hidden);
    args->weight = view_or_absent(t->weight);
    args->experts = *t->experts;
    if (backward) {
        args->d_weights = *t->d_weights;
        args->d_logits = view_or_absent(t->d_logits);
        args->d_hidden = view_or_absent(t->d_hidden);
        args->d_weight = view_or_absent(t->d_weight);
        return;
    }
    args->bias = view_or_absent(t->bias);
    args->input_ids = view_or_absent(t->input_ids);
    args->tid2eid = view_or_absent(t->tid2eid);
    args->weights = *t->weights;
    args->offsets = *t->offsets;
    args->permutation = *t->permutation;
}

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_moe_route_params *params,
                         const quern_moe_route_tensors *tensors, bool backward, bool run, route_call *call)
{
    quern_status status;
    quern_exec how;
    int64_t shape[3];
    quern_moe_route_params p = QUERN_MOE_ROUTE_PARAMS_INIT;
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    *call = (route_call){0};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = op_struct(&p, params, "params", "QUERN_MOE_ROUTE_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_MOE_ROUTE_TENSORS_INIT")) != QUERN_OK ||
        (status = op_exec(exec, &how)) != QUERN_OK || (status = check_params(&p)) != QUERN_OK ||
        (status = check_presence(&t, backward)) != QUERN_OK ||
        (status = read_shape(&p, &t, run, shape)) != QUERN_OK ||
        (status = check_tensors(&p, &t, shape, backward, run)) != QUERN_OK)
        return status;
    call->like = t.logits != NULL ? *t.logits : *t.hidden;
    call->backend = context_backend(ctx, call->like.device, call->like.device_id, how.stream, &call->exec);
    if (call->backend == NULL) return error_status();
    if (call->backend->route_forward.run == NULL)
        return error_set(QUERN_ERR_UNSUPPORTED, "routing on device %s: cpu is accepted", call->backend->name);
    fill(&p, &t, backward, &call->args);
    return QUERN_OK;
}

static const route_stage *stage_of(const route_call *call, bool backward)
{
    return backward ? &call->backend->route_backward : &call->backend->route_forward;
}

static size_t bytes_of(const route_call *call, bool backward)
{
    arena a = arena_on(NULL);
    arena_take(&a, stage_of(call, backward)->workspace(&call->exec, &call->args));
    return arena_size(&a);
}

static quern_status workspace_of(quern_context *ctx, const quern_moe_route_params *params,
                                 const quern_moe_route_tensors *tensors, bool backward, size_t *bytes)
{
    route_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, backward, false, &call);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = bytes_of(&call, backward);
    return QUERN_OK;
}

static quern_status run(quern_context *ctx, const quern_exec *exec, const quern_moe_route_params *params,
                        const quern_moe_route_tensors *tensors, bool backward, void *workspace,
                        size_t workspace_bytes)
{
    route_call call;
    quern_status status = plan(ctx, exec, params, tensors, backward, true, &call);
    if (status == QUERN_OK)
        status = view_check_workspace(workspace, workspace_bytes, bytes_of(&call, backward), &call.like);
    return status != QUERN_OK
               ? status
               : stage_of(&call, backward)->run(&call.exec, &call.args, arena_on(workspace).base);
}

quern_status quern_moe_route_workspace(quern_context *ctx, const quern_moe_route_params *params,
                                       const quern_moe_route_tensors *tensors, size_t *bytes)
{
    return workspace_of(ctx, params, tensors, false, bytes);
}

quern_status quern_moe_route(quern_context *ctx, const quern_exec *exec, const quern_moe_route_params *params,
                             const quern_moe_route_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    return run(ctx, exec, params, tensors, false, workspace, workspace_bytes);
}

quern_status quern_moe_route_backward_workspace(quern_context *ctx, const quern_moe_route_params *params,
                                                const quern_moe_route_tensors *tensors, size_t *bytes)
{
    return workspace_of(ctx, params, tensors, true, bytes);
}

quern_status quern_moe_route_backward(quern_context *ctx, const quern_exec *exec,
                                      const quern_moe_route_params *params,
                                      const quern_moe_route_tensors *tensors, void *workspace,
                                      size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    return run(ctx, exec, params, tensors, true, workspace, workspace_bytes);
}
