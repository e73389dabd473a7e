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
#include "core/float_state.h"
#include "core/view.h"

typedef struct decode_call {
    cache_call call;
    quern_nsa_params params; /* defaults resolved */
    quern_decode_tensors t;
    int64_t heads, list_heads;
    _Alignas(op_step) char program[OP_STEP_BYTES(nsa_decode)];
} decode_call;

static quern_status refuse(const char *what, const char *accepted)
{
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: a decoding call accepts %s", what, accepted);
}

/* What a decoding call takes of what NSA has. */
static quern_status check_kind(const quern_nsa_params *p)
{
    if (!p->causal) return refuse("causal is false", "true");
    if (p->tile != 1)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "tile is %lld: a decoding call accepts 1",
                         (long long)p->tile);
    if (p->compressed_visibility != QUERN_NSA_VISIBLE_COMPLETE)
        return refuse("compressed_visibility is started", "complete");
    if (p->max_compressed_groups != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "max_compressed_groups is %lld: a decoding call accepts 0",
                         (long long)p->max_compressed_groups);
    if (p->compress == QUERN_NSA_COMPRESS_GIVEN) return refuse("compress is given", "mean or linear");
    if (p->selection == QUERN_NSA_LIST_INDEXED) return refuse("selection is indexed", "computed");
    if (p->selection != QUERN_NSA_LIST_COMPUTED) return refuse("selection is given", "computed");
    if (p->ungated) return refuse("ungated is true", "false");
    if (p->groups != QUERN_NSA_LIST_COMPUTED) return refuse("groups is given", "computed");
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

/* Checks the parameters' own rules and q's heads; sets params and list_heads. */
static quern_status check_params(quern_context *ctx, const quern_nsa_params *given, decode_call *c)
{
    const quern_cache_params *has = &c->call.cache->layout.params;
    c->params = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    quern_status status = op_struct(&c->params, given, "params", "QUERN_NSA_PARAMS_INIT");
    if (status == QUERN_OK) status = check_kind(&c->params);
    if (status != QUERN_OK) return status;
    quern_nsa_params *p = &c->params;
    const int64_t q_shape[] = {1, has->capacity, c->heads, has->dim};
    int64_t key_shape[] = {1, quern_nsa_entries(p, has->capacity), has->kv_heads, has->dim};
    int64_t idx_shape[] = {1, quern_nsa_list_heads(p, c->heads, has->kv_heads), has->capacity,
                           p->num_selected};
    if (key_shape[1] < 0) key_shape[1] = 0;
    const quern_tensor q = quern_tensor_contiguous(NULL, has->dtype, 4, q_shape),
                       k = quern_tensor_contiguous(NULL, has->dtype, 4, key_shape);
    const quern_tensor idx = quern_tensor_contiguous(NULL, QUERN_I32, 4, idx_shape),
                       count = quern_tensor_contiguous(NULL, QUERN_I32, 3, idx_shape);
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k_cmp = &k;
    t.block_idx = &idx;
    t.block_count = &count;
    nsa_call select;
    quern_nsa_params chosen = *p;
    if (!(p->branches & QUERN_NSA_BRANCH_SLC)) { /* no selected branch: the selection's rules do not count */
        chosen.forced_first = chosen.forced_local = 0;
        chosen.metric = QUERN_NSA_METRIC_SOFTMAX;
    }
    status = op_prepare(&select.head, &nsa_family, NSA_SELECT, ctx, &chosen, &t, OP_AT_SHAPES);
    if (status != QUERN_OK) return status;
    p->stride = select.params.stride;
    p->select_block = select.params.select_block;
    p->scale = select.params.scale;
    c->list_heads = idx_shape[1];
    return check_cache(has, p);
}

static quern_status check_tensors(const decode_call *c, bool run)
{
    const quern_cache_params *has = &c->call.cache->layout.params;
    const quern_decode_tensors *t = &c->t;
    const quern_nsa_params *p = &c->params;
    const uint32_t act = 1u << (unsigned)has->dtype;
    const bool weights = p->gate == QUERN_NSA_GATE_WEIGHTS, given = p->gate == QUERN_NSA_GATE_GIVEN;
    if (t->lse != NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "lse is given: sparse attention accepts NULL");
    if (t->w_gate != NULL && !weights)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "w_gate is given: gate weights takes it, else NULL is accepted");
    if ((t->block_idx != NULL || t->block_count != NULL) && !(p->branches & QUERN_NSA_BRANCH_SLC))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%s is given: without the selected branch NULL is accepted",
                         t->block_idx != NULL ? "block_idx" : "block_count");
    const int64_t tokens = c->call.tokens;
    const view_rule rules[] = {
        {"q", t->q, act, 3, {tokens, c->heads, has->dim}, false, false},
        {"o", t->o, act, 3, {tokens, c->heads, has->dim_v}, false, true},
        {"w_gate", t->w_gate, act | VIEW_F32, 3, {c->heads, 3, has->dim}, !weights, false},
        {"gates", t->gates, VIEW_F32, 3, {tokens, c->heads, 3}, !given, !given},
        {"block_idx", t->block_idx, VIEW_I32, 3, {c->list_heads, tokens, p->num_selected}, true, true},
        {"block_count", t->block_count, VIEW_I32, 2, {c->list_heads, tokens}, true, true},
    };
    return view_check_all(rules, sizeof rules / sizeof *rules, t->q, run);
}

/* Lists that the caller did not ask for are in the workspace. */
static void build(op_build *b)
{
    const decode_call *c = (const decode_call *)b->call;
    const cache_call *call = &c->call;
    const quern_cache_params *has = &call->cache->layout.params;
    const quern_nsa_params *p = &c->params;
    const int64_t lists[] = {1, c->list_heads, call->tokens, p->num_selected};
    const stage_step step = cache_step(b);
    if (call->tokens == 0 || c->heads == 0) return;
    nsa_decode_args *d = OP_ADD(b, nsa_decode);
    d->step = step;
    d->capacity = has->capacity;
    d->window = p->window;
    d->branches = p->branches;
    d->gate = (gate_kind)p->gate;
    d->q = op_known_view(c->t.q, true);
    d->o = op_known_view(c->t.o, true);
    d->gates = op_known_view(c->t.gates, true);
    d->blocks = op_known_view(c->t.block_idx, true);
    d->block_count = op_known_view(c->t.block_count, true);
    if (p->gate == QUERN_NSA_GATE_WEIGHTS) d->w_gate = op_known_view(c->t.w_gate, false);
    d->plane[NSA_CMP] = cache_steps_plane(call, CACHE_ENTRIES);
    d->plane[NSA_SLC] = cache_steps_plane(call, has->separate_slc ? CACHE_SLC : CACHE_TOKENS);
    d->plane[NSA_WIN] = cache_steps_plane(call, has->separate_win ? CACHE_WIN : CACHE_TOKENS);
    d->scale = p->scale;
    d->block_size = p->block_size;
    d->stride = p->stride;
    d->select_block = p->select_block;
    d->k = p->num_selected;
    d->forced_first = p->forced_first;
    d->forced_local = p->forced_local;
    d->scorer = (select_scorer)p->metric;
    d->scope = (list_scope)p->scope;
    if (c->t.block_idx == NULL && (p->branches & QUERN_NSA_BRANCH_SLC))
        d->blocks = op_room(b, QUERN_I32, 4, lists);
}

static const char *const operations[] = {"nsa_decode"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .call_size = sizeof(decode_call),
    .program_at = offsetof(decode_call, program),
    .build = build,
    .begin = cache_write_step,
};

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                         const quern_cache *cache, const quern_cache_batch *batch,
                         const quern_decode_tensors *tensors, bool run, decode_call *c)
{
    c->t = (quern_decode_tensors)QUERN_DECODE_TENSORS_INIT;
    quern_status status = cache_begin(&c->call, ctx, exec, cache, batch, false);
    if (status == QUERN_OK) status = op_struct(&c->t, tensors, "tensors", "QUERN_DECODE_TENSORS_INIT");
    if (status != QUERN_OK) return status;
    const quern_cache_params *has = &cache->layout.params;
    const view_rule q = {"q",   c->t.q, 1u << (unsigned)has->dtype, 3, {c->call.tokens, VIEW_ANY, has->dim},
                         false, false};
    if ((status = view_check_order(c->t.q, c->t.o)) != QUERN_OK ||
        (status = view_check(&q, c->t.q, run)) != QUERN_OK)
        return status;
    c->heads = c->t.q->shape[1];
    if ((status = view_check_heads(c->heads, has->kv_heads, c->call.tokens)) != QUERN_OK ||
        (status = check_params(ctx, params, c)) != QUERN_OK || (status = check_tensors(c, run)) != QUERN_OK)
        return status;
    return cache_build(&c->call, ctx, &family, "q", c->t.q);
}

quern_status quern_nsa_decode_workspace(quern_context *ctx, const quern_nsa_params *params,
                                        const quern_cache *cache, const quern_cache_batch *batch,
                                        const quern_decode_tensors *tensors, size_t *bytes)
{
    DEFAULT_FLOAT_STATE; /* a plan resolves the scale */
    decode_call c;
    const quern_status status = plan(ctx, NULL, params, cache, batch, tensors, false, &c);
    return status == QUERN_OK ? cache_workspace(&c.call, bytes) : status;
}

quern_status quern_nsa_decode(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                              const quern_cache *cache, const quern_cache_batch *batch,
                              const quern_decode_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    decode_call c;
    quern_status status = plan(ctx, exec, params, cache, batch, tensors, true, &c);
    if (status == QUERN_OK) status = cache_check_run(&c.call, workspace, workspace_bytes);
    return status == QUERN_OK ? cache_run(&c.call, workspace) : status;
}
