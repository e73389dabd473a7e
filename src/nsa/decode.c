/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * decode.c - native sparse attention of a step's tokens over their sequences' pages: checks, then the
 * nsa_decode stage; before it index_decode, where the block indexer chooses.
 *
 * The selection's own check (params.c) decides which parameters are legal. It runs on a call of the
 * selection's shapes: one sequence as long as the tables' columns. Where the block indexer chooses, that of a
 * whole forward does.
 */
#include "cache/cache.h"
#include "cache/step.h"
#include "nsa/call.h"

#include "core/error.h"

#include <math.h>

static quern_status accepts(const char *what, const char *accepted)
{
    return error_argument("%s: a decoding call accepts %s", what, accepted);
}

#define PARAMS(call) ((quern_nsa_params *)op_params(call))

static bool is_indexed(const quern_nsa_params *p)
{
    return (p->branches & QUERN_NSA_BRANCH_SLC) != 0 && p->selection == QUERN_NSA_LIST_INDEXED;
}

/* What a decoding call takes of what NSA has. */
static quern_status check_params(op_call *call)
{
    const quern_nsa_params *p = op_params(call);
    if (!p->causal) return accepts("causal is false", "true");
    if (p->tile != 1) return error_argument("tile is %lld: a decoding call accepts 1", (long long)p->tile);
    if (p->compressed_visibility != QUERN_NSA_VISIBLE_COMPLETE)
        return accepts("compressed_visibility is started", "complete");
    if (p->max_compressed_groups != 0)
        return error_argument("max_compressed_groups is %lld: a decoding call accepts 0",
                              (long long)p->max_compressed_groups);
    if (p->compress == QUERN_NSA_COMPRESS_GIVEN) return accepts("compress is given", "mean or linear");
    if (p->selection == QUERN_NSA_LIST_GIVEN) return accepts("selection is given", "computed or indexed");
    if (p->ungated && p->selection == QUERN_NSA_LIST_COMPUTED)
        return accepts("ungated with selection computed", "selection indexed with it");
    if (p->groups != QUERN_NSA_LIST_COMPUTED) return accepts("groups is given", "computed");
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const quern_nsa_params *p = op_params(call);
    const bool given = p->gate == QUERN_NSA_GATE_GIVEN, slc = (p->branches & QUERN_NSA_BRANCH_SLC) != 0;
    uint8_t *r = call->role;
    r[DD(q)] = OP_NEEDED;
    r[DD(o)] = OP_RESULT;
    op_allow(call, DD(lse), false, OP_UNUSED, ": sparse attention accepts NULL");
    op_allow(call, DD(sink), false, OP_UNUSED, ": sparse attention accepts NULL");
    op_allow(call, DD(w_gate), p->gate == QUERN_NSA_GATE_WEIGHTS, OP_NEEDED,
             ": gate weights takes it, else NULL is accepted");
    r[DD(gates)] = given ? OP_NEEDED : OP_OPTIONAL_RESULT;
    op_allow_all(call, DD(block_idx), DD(block_count), slc, OP_OPTIONAL_RESULT,
                 ": without the selected branch NULL is accepted");
    if (p->ungated) r[DD(gates)] = OP_UNUSED;
    op_allow(call, DD(q_index), is_indexed(p), OP_NEEDED, ": with selection indexed it is accepted");
    r[DD(index)] = is_indexed(p) ? OP_NEEDED : OP_UNUSED;
    op_reason(call, DD(index), ": the pool of index keys is needed");
    r[DD(slots)] = r[DD(positions)] = r[DD(cu)] = OP_NEEDED;
    step_pool_roles(call, DD(tokens), true, OP_NEEDED);
    if (is_indexed(p) && !nsa_has_entries(p)) r[DD(entries)] = r[DD(entries_table)] = OP_UNUSED;
}

/* Checks the parameters by the rules of a whole forward, and the extents of the indexer's tensors. */
static quern_status derive_indexed(op_call *call)
{
    quern_nsa_params *p = op_params(call);
    const quern_nsa_tensors none = QUERN_NSA_TENSORS_INIT;
    int64_t *s = call->symbol;
    nsa_call whole;
    op_tensors own;
    quern_status status = op_begin(&whole.head, &nsa_family, NSA_FORWARD, p, &none, &own);
    if (status != QUERN_OK) return status;
    *p = whole.params;
    if ((status = step_derive_index(call, DD(index), DD(q_index))) != QUERN_OK) return status;
    if (s[ST_HI] != 1 && s[ST_HI] != s[ST_HS])
        return error_argument("index.shape[1] is %lld: 1, or a key for each of %lld lists, is accepted",
                              (long long)s[ST_HI], (long long)s[ST_HS]);
    return QUERN_OK;
}

/* Checks the parameters by the selection's own rules, on a call of its shapes; resolves defaults. */
static quern_status derive_computed(op_call *call)
{
    quern_nsa_params *p = op_params(call), chosen = *p;
    int64_t *s = call->symbol;
    const int64_t capacity = step_capacity(call);
    const int64_t q_shape[] = {1, capacity, s[ST_H], s[ST_D]}, entries = quern_nsa_entries(p, capacity),
                  key_shape[] = {1, entries > 0 ? entries : 0, s[ST_HKV], s[ST_D]},
                  idx_shape[] = {1, s[ST_HS], capacity, s[ST_K]};
    const quern_tensor q = quern_tensor_contiguous(NULL, call->like.dtype, 4, q_shape),
                       k = quern_tensor_contiguous(NULL, call->like.dtype, 4, key_shape);
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
    quern_status status = op_begin(&select.head, &nsa_family, NSA_SELECT, &chosen, &t, &own);
    if (status == QUERN_OK) status = op_derive(&select.head);
    if (status != QUERN_OK) return status;
    p->stride = select.params.stride;
    p->select_block = select.params.select_block;
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    quern_status status = step_derive_decode(call);
    if (status != QUERN_OK) return status;
    quern_nsa_params *p = op_params(call);
    int64_t *s = call->symbol;
    s[ST_HS] = quern_nsa_list_heads(p, s[ST_H], s[ST_HKV]);
    s[ST_K] = p->num_selected;
    status = is_indexed(p) ? derive_indexed(call) : derive_computed(call);
    if (status != QUERN_OK) return status;
    if (p->scale == 0.0f) p->scale = 1.0f / sqrtf((float)s[ST_D]);
    const int64_t ring = s[ST_WIN_COLUMNS] * CACHE_BLOCK;
    if (op_uses(call, DD(win)) && s[ST_WIN_COLUMNS] < s[ST_COLUMNS] && p->window > ring)
        return error_argument("window is %lld: at most that of the cache's ring, %lld, is accepted",
                              (long long)p->window, (long long)ring);
    return QUERN_OK;
}

/* Lists that the caller did not ask for are in the workspace. */
static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_nsa_params *p = op_params(call);
    const int64_t *s = call->symbol, lists[] = {1, s[ST_HS], s[ST_T], s[ST_K]};
    const cache_plane tokens = step_plane(b, DD(tokens), DD(tokens_table), false);
    if (s[ST_T] == 0 || s[ST_H] == 0) return;
    const stage_step step = step_of(b, DD(slots));
    quern_tensor blocks = op_view(call, DD(block_idx), true);
    if (blocks.ndim == 0 && (p->branches & QUERN_NSA_BRANCH_SLC)) blocks = op_room(b, QUERN_I32, 4, lists);
    if (is_indexed(p))
        *OP_ADD(b, index_decode) =
            (index_decode_args){.keys = step_index_plane(b, DD(index), DD(tokens_table)),
                                .step = step,
                                .capacity = step_capacity(call),
                                .rule = {p->select_block, p->num_selected, p->forced_first, p->forced_local},
                                .q = op_view(call, DD(q_index), true),
                                .blocks = blocks,
                                .count = op_view(call, DD(block_count), true)};
    nsa_decode_args *d = OP_ADD(b, nsa_decode);
    d->step = step;
    d->capacity = step_capacity(call);
    d->window = p->window;
    d->branches = p->branches;
    d->listed = is_indexed(p);
    d->ungated = p->ungated;
    d->gate = (gate_kind)p->gate;
    d->q = op_view(call, DD(q), true);
    d->o = op_view(call, DD(o), true);
    d->gates = op_view(call, DD(gates), true);
    d->blocks = blocks;
    if (!d->listed) d->block_count = op_view(call, DD(block_count), true);
    d->w_gate = op_view(call, DD(w_gate), false);
    d->plane[NSA_CMP] = step_plane(b, DD(entries), DD(entries_table), false);
    d->plane[NSA_SLC] = op_uses(call, DD(slc)) ? step_plane(b, DD(slc), DD(tokens_table), false) : tokens;
    d->plane[NSA_WIN] = op_uses(call, DD(win)) ? step_plane(b, DD(win), DD(win_table), true) : tokens;
    d->rule = nsa_select_rule(p);
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const nsa_decode_args *args = OP_FIND(call, nsa_decode);
    if (args == NULL) return QUERN_OK;
    const quern_nsa_params *p = op_params(call);
    const step_data s = {call, data, DD(slots), &args->step, p->block_size, p->stride};
    quern_status status = step_check(&s);
    if (status == QUERN_OK) status = step_check_table(&s, &args->plane[NSA_SLC], DD(tokens_table), false);
    if (status == QUERN_OK && args->plane[NSA_CMP].blocks.ndim > 0)
        status = step_check_table(&s, &args->plane[NSA_CMP], DD(entries_table), true);
    if (status == QUERN_OK && args->plane[NSA_WIN].ring > 0)
        status = step_check_table(&s, &args->plane[NSA_WIN], DD(win_table), false);
    return status;
}

static const char *const operations[] = {"nsa_decode_step"};
static const op_entry ops[] = {
    {.name = "nsa-decode-step",
     .help = "native sparse attention of a step's tokens over their sequences' pages"},
};
/* How the gate comes follows from what is there. */
static const op_mode modes[] = {{NSA_GATE_PARAM, {OP_NONE, DD(w_gate), DD(gates)}}};

const op_family nsa_decode_family = {
    OP_TABLES(operations, nsa_param_rows, step_symbols, ops),
    OP_ROWS(step_decode_tensors, quern_decode_tensors, QUERN_DECODE_TENSORS_INIT),
    OP_CALL(quern_nsa_params, QUERN_NSA_PARAMS_INIT, OP_STEP_BYTES(index_decode) + OP_STEP_BYTES(nsa_decode)),
    .first = QUERN_OP_NSA_DECODE_STEP,
    .modes = modes,
    .mode_count = sizeof modes / sizeof *modes,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_nsa_decode_step_workspace(quern_context *ctx, const quern_nsa_params *params,
                                             const quern_decode_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nsa_decode_family, 0, ctx, params, tensors, bytes);
}

quern_status quern_nsa_decode_step(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                                   const quern_decode_tensors *tensors, void *workspace,
                                   size_t workspace_bytes)
{
    return op_run(&nsa_decode_family, 0, ctx, exec, params, tensors, workspace, workspace_bytes);
}

/* ---- of a cache's sequences ---- */

static quern_status check_ring(const quern_cache_params *has, const quern_nsa_params *p)
{
    if (!has->separate_win || p->window <= has->window) return QUERN_OK;
    return error_argument("window is %lld: at most that of the cache's ring, %lld, is accepted",
                          (long long)p->window, (long long)has->window);
}

/* Checks that the cache holds what the parameters ask for. */
static quern_status check_cache(const quern_cache *cache, const quern_nsa_params *given)
{
    const quern_cache_params *has = &cache->params;
    quern_nsa_params p = nsa_defaults;
    const quern_status status = op_struct(&p, given, "params", "QUERN_NSA_PARAMS_INIT");
    if (status != QUERN_OK) return status;
    if (is_indexed(&p) && has->index_heads == 0)
        return error_argument("selection is indexed: a cache with index_heads is accepted");
    if (is_indexed(&p) && !nsa_has_entries(&p)) return check_ring(has, &p);
    if (p.stride == 0) p.stride = p.block_size;
    if (has->block_size != p.block_size || has->stride != p.stride)
        return error_argument(
            "block_size is %lld, stride %lld: those of the cache, %lld and %lld, are accepted",
            (long long)p.block_size, (long long)p.stride, (long long)has->block_size, (long long)has->stride);
    if (p.compress != QUERN_NSA_COMPRESS_GIVEN && has->compress != p.compress)
        return error_argument("compress is %d: that of the cache, %d, is accepted", (int)p.compress,
                              (int)has->compress);
    return check_ring(has, &p);
}

quern_status quern_nsa_decode_workspace(quern_context *ctx, const quern_nsa_params *params,
                                        const quern_cache *cache, const quern_cache_batch *batch,
                                        const quern_decode_tensors *tensors, size_t *bytes)
{
    cache_views v;
    quern_decode_tensors t;
    quern_status status = cache_bind_decode(cache, batch, false, tensors, &v, &t);
    if (status == QUERN_OK) status = check_cache(cache, params);
    return status == QUERN_OK ? quern_nsa_decode_step_workspace(ctx, params, &t, bytes) : status;
}

quern_status quern_nsa_decode(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                              const quern_cache *cache, const quern_cache_batch *batch,
                              const quern_decode_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    cache_views v;
    quern_decode_tensors t;
    quern_status status = cache_bind_decode(cache, batch, true, tensors, &v, &t);
    if (status == QUERN_OK) status = check_cache(cache, params);
    if (status != QUERN_OK) return status;
    return quern_nsa_decode_step(ctx, exec, params, &t, workspace, workspace_bytes);
}
