/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.c - dense attention's public functions: validate, plan, call stages.
 *
 *   forward:  attend_forward
 *   backward: rowdot (delta = d_o . o)  ->  attend_backward
 */
#include <quern/attention.h>

#include "core/arena.h"
#include "core/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"

#include <math.h>

typedef struct attention_call {
    const quern_backend *backend;
    stage_exec exec;
    attend_args attend;
    rowdot_args rowdot; /* backward */
    check_args check;   /* its status is absent where the caller does not ask */
} attention_call;

static quern_status check_params(const quern_attention_params *params)
{
    if (params->window < 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "window is %lld: 0 (none) or more is accepted", (long long)params->window);
    if (!(params->scale >= 0.0f) || isinf(params->scale))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "scale is %g: 0 (1/sqrt(D)) or a finite positive number is accepted", (double)params->scale);
    if (params->query_offset < -1 || params->query_offset > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "query_offset is %lld: -1 (the last positions) to %d is accepted",
                         (long long)params->query_offset, INT32_MAX);
    return QUERN_OK;
}

/* `run`: data pointers count too. */
static quern_status check_tensors(const quern_attention_tensors *t, const quern_tensor *asked, bool backward, bool run)
{
    quern_status status;
    const bool packed = t->cu_seqlens_q != NULL;
    const int32_t ndim = packed ? 3 : 4, n_at = packed ? 0 : 1;
    if (!packed && t->cu_seqlens_kv != NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "cu_seqlens_kv is given without cu_seqlens_q: both or cu_seqlens_q alone are accepted");
    const view_rule inputs[] = {{"q", t->q, VIEW_ACTIVATION, ndim, {VIEW_ANY, VIEW_ANY, VIEW_ANY, VIEW_ANY}, false, false},
                                {"k", t->k, VIEW_ACTIVATION, ndim, {VIEW_ANY, VIEW_ANY, VIEW_ANY, VIEW_ANY}, false, false},
                                {"v", t->v, VIEW_ACTIVATION, ndim, {VIEW_ANY, VIEW_ANY, VIEW_ANY, VIEW_ANY}, false, false}};
    for (int i = 0; i < 3; i++)
        if ((status = view_check(&inputs[i], t->q, run)) != QUERN_OK) return status;
    const int64_t batch = packed ? 0 : t->q->shape[0], n_q = t->q->shape[n_at], n_kv = t->k->shape[n_at];
    const int64_t heads = t->q->shape[n_at + 1], kv_heads = t->k->shape[n_at + 1];
    const int64_t dim_k = t->q->shape[n_at + 2], dim_v = t->v->shape[n_at + 2];
    if ((status = view_check_head_dim("q", dim_k)) != QUERN_OK || (status = view_check_head_dim("v", dim_v)) != QUERN_OK ||
        (status = view_check_heads(heads, kv_heads)) != QUERN_OK)
        return status;
    if (n_q > INT32_MAX || n_kv > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%lld query and %lld key tokens: at most %d each are accepted", (long long)n_q,
                         (long long)n_kv, INT32_MAX);
    const int64_t cu = packed ? t->cu_seqlens_q->shape[0] : 0;
#define LIKE(n, h, d) ndim, {packed ? (n) : batch, packed ? (h) : (n), packed ? (d) : (h), (d)}
    const uint32_t act = 1u << t->q->dtype;
    const view_rule rules[] = {
        {"q", t->q, act, LIKE(n_q, heads, dim_k), false, false},
        {"k", t->k, act, LIKE(n_kv, kv_heads, dim_k), false, false},
        {"v", t->v, act, LIKE(n_kv, kv_heads, dim_v), false, false},
        {"cu_seqlens_q", t->cu_seqlens_q, VIEW_I32, 1, {VIEW_ANY}, true, false},
        {"cu_seqlens_kv", t->cu_seqlens_kv, VIEW_I32, 1, {cu}, true, false},
        {"o", t->o, act, LIKE(n_q, heads, dim_v), false, !backward},
        {"lse", t->lse, VIEW_F32, packed ? 2 : 3, {packed ? heads : batch, packed ? n_q : heads, n_q}, !backward, !backward},
        {"d_o", backward ? t->d_o : NULL, act, LIKE(n_q, heads, dim_v), !backward, false},
        {"d_q", backward ? t->d_q : NULL, act, LIKE(n_q, heads, dim_k), !backward, true},
        {"d_k", backward ? t->d_k : NULL, act, LIKE(n_kv, kv_heads, dim_k), !backward, true},
        {"d_v", backward ? t->d_v : NULL, act, LIKE(n_kv, kv_heads, dim_v), !backward, true},
        {"exec.status", asked, VIEW_I32, 1, {1}, true, true},
    };
#undef LIKE
    const int32_t count = (int32_t)(sizeof rules / sizeof *rules);
    if ((status = view_check_all(rules, count, t->q, run)) != QUERN_OK) return status;
    if (packed) {
        if (cu < 1) return error_set(QUERN_ERR_INVALID_ARGUMENT, "cu_seqlens_q has 0 entries: batch + 1 are accepted");
        const quern_tensor *kv = t->cu_seqlens_kv != NULL ? t->cu_seqlens_kv : t->cu_seqlens_q;
        if (run && ((status = view_check_borders(t->cu_seqlens_q, "cu_seqlens_q", n_q)) != QUERN_OK ||
                    (status = view_check_borders(kv, t->cu_seqlens_kv != NULL ? "cu_seqlens_kv" : "cu_seqlens_q", n_kv)) != QUERN_OK))
            return status;
    }
    return QUERN_OK;
}

/* The attention stage's arguments, from tensors that were checked. */
static attend_args attend_of(const quern_attention_params *params, const quern_attention_tensors *t, bool backward)
{
    const bool packed = t->cu_seqlens_q != NULL;
    quern_tensor (*const view)(const quern_tensor *) = packed ? view_with_batch : view_or_absent;
    attend_args a = {.mask = ATTEND_RANGE, .causal = params->causal, .window = params->window, .query_offset = params->query_offset, .tile = 1};
    a.q = view(t->q), a.k = view(t->k), a.v = view(t->v), a.o = view(t->o), a.lse = view(t->lse);
    if (backward) a.d_o = view(t->d_o), a.d_q = view(t->d_q), a.d_k = view(t->d_k), a.d_v = view(t->d_v);
    a.seqs = (stage_seqs){packed ? t->cu_seqlens_q->shape[0] - 1 : t->q->shape[0], a.q.shape[1], a.k.shape[1],
                          view_or_absent(t->cu_seqlens_q), view_or_absent(t->cu_seqlens_kv)};
    a.scale = params->scale > 0.0f ? params->scale : 1.0f / sqrtf((float)a.q.shape[3]);
    return a;
}

/* Checks everything visible to the host and fills the stages' arguments. */
static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_attention_params *given, const quern_attention_tensors *tensors,
                         bool backward, bool run, attention_call *call)
{
    quern_status status;
    quern_exec how;
    quern_attention_params own = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors all = QUERN_ATTENTION_TENSORS_INIT;
    const quern_attention_params *const params = &own;
    const quern_attention_tensors *const t = &all;
    *call = (attention_call){0};
    if (ctx == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = op_struct(&own, given, "params", "QUERN_ATTENTION_PARAMS_INIT")) != QUERN_OK || (status = check_params(params)) != QUERN_OK ||
        (status = op_struct(&all, tensors, "tensors", "QUERN_ATTENTION_TENSORS_INIT")) != QUERN_OK || (status = op_exec(exec, &how)) != QUERN_OK ||
        (status = check_tensors(t, how.status, backward, run)) != QUERN_OK)
        return status;
    call->backend = context_backend(ctx, t->q->device, t->q->device_id, how.stream, &call->exec);
    if (call->backend == NULL) return error_status();
    call->attend = attend_of(params, t, backward);
    call->check = (check_args){.seqs = call->attend.seqs, .status = view_or_absent(how.status)};
    char why[STAGE_WHY_BYTES] = "";
    const bool supported = backward ? call->backend->attend_backward.supports(&call->exec, &call->attend, why)
                                    : call->backend->attend_forward.supports(&call->exec, &call->attend, why);
    return supported ? QUERN_OK : error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
}

/* What the offsets turn out to be goes into the caller's status word. */
static quern_status report(const attention_call *call)
{
    return call->check.status.ndim > 0 ? call->backend->check.run(&call->exec, &call->check, NULL) : QUERN_OK;
}

/* The backward's workspace: delta, then what the stages need, one after the other in the same place. */
static void *carve_backward(attention_call *call, arena *a)
{
    attend_args *attend = &call->attend;
    const int64_t shape[] = {attend->q.shape[0], attend->q.shape[2], attend->q.shape[1]};
    void *delta = arena_take(a, (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float));
    attend->delta = view_on(&attend->q, delta, QUERN_F32, 3, shape);
    call->rowdot = (rowdot_args){attend->seqs, attend->d_o, attend->o, attend->delta};
    size_t bytes = call->backend->attend_backward.workspace(&call->exec, attend);
    const size_t other = call->backend->rowdot.workspace(&call->exec, &call->rowdot);
    if (other > bytes) bytes = other;
    return arena_take(a, bytes);
}

quern_status quern_attention_forward_workspace(quern_context *ctx, const quern_attention_params *params, const quern_attention_tensors *tensors,
                                               size_t *bytes)
{
    attention_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, false, false, &call);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = call.backend->attend_forward.workspace(&call.exec, &call.attend);
    return QUERN_OK;
}

quern_status quern_attention_forward(quern_context *ctx, const quern_exec *exec, const quern_attention_params *params,
                                     const quern_attention_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    attention_call call;
    quern_status status = plan(ctx, exec, params, tensors, false, true, &call);
    if (status != QUERN_OK) return status;
    status = view_check_workspace(workspace, workspace_bytes, call.backend->attend_forward.workspace(&call.exec, &call.attend), &call.attend.q);
    if (status == QUERN_OK) status = report(&call);
    return status != QUERN_OK ? status : call.backend->attend_forward.run(&call.exec, &call.attend, workspace);
}

quern_status quern_attention_backward_workspace(quern_context *ctx, const quern_attention_params *params, const quern_attention_tensors *tensors,
                                                size_t *bytes)
{
    attention_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, true, false, &call);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    arena a = {NULL, 0};
    carve_backward(&call, &a);
    *bytes = arena_size(&a);
    return QUERN_OK;
}

quern_status quern_attention_backward(quern_context *ctx, const quern_exec *exec, const quern_attention_params *params,
                                     const quern_attention_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    attention_call call;
    quern_status status = plan(ctx, exec, params, tensors, true, true, &call);
    if (status != QUERN_OK) return status;
    arena size = {NULL, 0}, a = arena_on(workspace);
    carve_backward(&call, &size);
    if ((status = view_check_workspace(workspace, workspace_bytes, arena_size(&size), &call.attend.q)) != QUERN_OK) return status;
    void *scratch = carve_backward(&call, &a);
    status = report(&call);
    if (status == QUERN_OK) status = call.backend->rowdot.run(&call.exec, &call.rowdot, scratch);
    return status != QUERN_OK ? status : call.backend->attend_backward.run(&call.exec, &call.attend, scratch);
}
