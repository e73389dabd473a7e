/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * decode.c - native sparse attention of the newest tokens over a cache: checks, then the nsa_decode stage.
 *
 * The selection's own check (params.c) decides which parameters are legal. It runs on a call of the
 * selection's shapes: one sequence as long as the cache's capacity.
 */
#include "cache/cache.h"
#include "nsa/call.h"

#include "core/error.h"

#include <math.h>

static quern_status accepts(const char *what, const char *accepted)
{
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: a decoding call accepts %s", what, accepted);
}

static quern_nsa_params *params_of(const op_call *call)
{
    return &((cache_call *)(uintptr_t)call)->params.sparse;
}

/* What a decoding call takes of what NSA has. */
static quern_status check_params(op_call *call)
{
    const quern_nsa_params *p = params_of(call);
    if (!p->causal) return accepts("causal is false", "true");
    if (p->tile != 1)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "tile is %lld: a decoding call accepts 1",
                         (long long)p->tile);
    if (p->compressed_visibility != QUERN_NSA_VISIBLE_COMPLETE)
        return accepts("compressed_visibility is started", "complete");
    if (p->max_compressed_groups != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "max_compressed_groups is %lld: a decoding call accepts 0",
                         (long long)p->max_compressed_groups);
    if (p->compress == QUERN_NSA_COMPRESS_GIVEN) return accepts("compress is given", "mean or linear");
    if (p->selection == QUERN_NSA_LIST_INDEXED) return accepts("selection is indexed", "computed");
    if (p->selection != QUERN_NSA_LIST_COMPUTED) return accepts("selection is given", "computed");
    if (p->ungated) return accepts("ungated is true", "false");
    if (p->groups != QUERN_NSA_LIST_COMPUTED) return accepts("groups is given", "computed");
    return QUERN_OK;
}

/* Checks that the cache holds what the parameters ask for. */
static quern_status check_cache(const quern_cache_params *has, const quern_nsa_params *p)
{
    if (has->block_size != p->block_size || has->stride != p->stride)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "block_size is %lld, stride %lld: those of the cache, %lld and %lld, are accepted",
                         (long long)p->block_size, (long long)p->stride, (long long)has->block_size,
                         (long long)has->stride);
    if (has->compress != p->compress)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "compress is %d: that of the cache, %d, is accepted",
                         (int)p->compress, (int)has->compress);
    if (has->separate_win && p->window > has->window)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "window is %lld: at most that of the cache's ring, %lld, is accepted",
                         (long long)p->window, (long long)has->window);
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const quern_nsa_params *p = params_of(call);
    const bool given = p->gate == QUERN_NSA_GATE_GIVEN, slc = (p->branches & QUERN_NSA_BRANCH_SLC) != 0;
    uint8_t *r = call->role;
    r[DD(q)] = OP_NEEDED;
    r[DD(o)] = OP_RESULT;
    r[DD(lse)] = r[DD(sink)] = OP_REFUSED;
    r[DD(w_gate)] = p->gate == QUERN_NSA_GATE_WEIGHTS ? OP_NEEDED : OP_REFUSED;
    r[DD(gates)] = given ? OP_NEEDED : OP_OPTIONAL_RESULT;
    r[DD(block_idx)] = r[DD(block_count)] = slc ? OP_OPTIONAL_RESULT : OP_REFUSED;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    const char *why = "without the selected branch NULL is accepted";
    if (tensor == DD(lse) || tensor == DD(sink)) why = "sparse attention accepts NULL";
    if (tensor == DD(w_gate)) why = "gate weights takes it, else NULL is accepted";
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: %s", call->family->tensors[tensor].field, why);
}

/* Checks the parameters by the selection's own rules, on a call of its shapes; resolves defaults. */
static quern_status derive(op_call *call)
{
    quern_status status = cache_derive_decode(call);
    if (status != QUERN_OK) return status;
    const quern_cache_params *has = cache_params_of(call);
    quern_nsa_params *p = params_of(call), chosen = *p;
    int64_t *s = call->symbol;
    s[DECODE_HS] = quern_nsa_list_heads(p, s[DECODE_H], has->kv_heads);
    s[DECODE_K] = p->num_selected;
    const int64_t q_shape[] = {1, has->capacity, s[DECODE_H], has->dim},
                  entries = quern_nsa_entries(p, has->capacity),
                  key_shape[] = {1, entries > 0 ? entries : 0, has->kv_heads, has->dim},
                  idx_shape[] = {1, s[DECODE_HS], has->capacity, s[DECODE_K]};
    const quern_tensor q = quern_tensor_contiguous(NULL, has->dtype, 4, q_shape),
                       k = quern_tensor_contiguous(NULL, has->dtype, 4, key_shape);
    const quern_tensor idx = quern_tensor_contiguous(NULL, QUERN_I32, 4, idx_shape),
                       count = quern_tensor_contiguous(NULL, QUERN_I32, 3, idx_shape);
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k_cmp = &k;
    t.block_idx = &idx;
    t.block_count = &count;
    if (!(p->branches & QUERN_NSA_BRANCH_SLC)) { /* no selected branch: the selection's rules do not count */
        chosen.forced_first = chosen.forced_local = 0;
        chosen.metric = QUERN_NSA_METRIC_SOFTMAX;
    }
    nsa_call select;
    op_tensors own;
    status = op_begin(&select.head, &nsa_family, NSA_SELECT, &chosen, &t, &own);
    if (status == QUERN_OK) status = op_derive(&select.head);
    if (status != QUERN_OK) return status;
    p->stride = select.params.stride;
    p->select_block = select.params.select_block;
    if (p->scale == 0.0f) p->scale = 1.0f / sqrtf((float)has->dim);
    return check_cache(has, p);
}

/* Lists that the caller did not ask for are in the workspace. */
static void build(op_build *b)
{
    const op_call *call = b->call;
    const cache_call *c = cache_call_of(call);
    const quern_cache_params *has = cache_params_of(call);
    const quern_nsa_params *p = params_of(call);
    const int64_t *s = call->symbol, lists[] = {1, s[DECODE_HS], s[DECODE_T], s[DECODE_K]};
    const stage_step step = cache_step(b);
    if (s[DECODE_T] == 0 || s[DECODE_H] == 0) return;
    nsa_decode_args *d = OP_ADD(b, nsa_decode);
    d->step = step;
    d->capacity = has->capacity;
    d->window = p->window;
    d->branches = p->branches;
    d->gate = (gate_kind)p->gate;
    d->q = op_view(call, DD(q), true);
    d->o = op_view(call, DD(o), true);
    d->gates = op_view(call, DD(gates), true);
    d->blocks = op_view(call, DD(block_idx), true);
    d->block_count = op_view(call, DD(block_count), true);
    d->w_gate = op_view(call, DD(w_gate), false);
    d->plane[NSA_CMP] = cache_steps_plane(c, CACHE_ENTRIES);
    d->plane[NSA_SLC] = cache_steps_plane(c, has->separate_slc ? CACHE_SLC : CACHE_TOKENS);
    d->plane[NSA_WIN] = cache_steps_plane(c, has->separate_win ? CACHE_WIN : CACHE_TOKENS);
    d->rule = nsa_select_rule(p);
    if (d->blocks.ndim == 0 && (p->branches & QUERN_NSA_BRANCH_SLC))
        d->blocks = op_room(b, QUERN_I32, 4, lists);
}

static const char *const operations[] = {"nsa_decode"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .tensors = cache_decode_tensors,
    .tensor_count = DECODE_TENSORS,
    .varlen_by = OP_NONE,
    .params = nsa_param_rows,
    .param_count = NSA_PARAMS,
    .defaults = &nsa_defaults,
    .params_init = "QUERN_NSA_PARAMS_INIT",
    .tensors_init = "QUERN_DECODE_TENSORS_INIT",
    .call_size = offsetof(cache_call, cache),
    .params_at = offsetof(cache_call, params),
    .program_at = offsetof(cache_call, program),
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = cache_check_data,
    .build = build,
    .begin = cache_write_step,
};

quern_status quern_nsa_decode_workspace(quern_context *ctx, const quern_nsa_params *params,
                                        const quern_cache *cache, const quern_cache_batch *batch,
                                        const quern_decode_tensors *tensors, size_t *bytes)
{
    cache_call c;
    const quern_status status = cache_take_batch(&c, cache, batch, false);
    return status == QUERN_OK ? op_workspace_of(&c.head, &family, 0, ctx, params, tensors, bytes) : status;
}

quern_status quern_nsa_decode(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                              const quern_cache *cache, const quern_cache_batch *batch,
                              const quern_decode_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    cache_call c;
    const quern_status status = cache_take_batch(&c, cache, batch, false);
    if (status != QUERN_OK) return status;
    return op_run(&c.head, &family, 0, ctx, exec, params, tensors, workspace, workspace_bytes);
}
