/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append.c - a step's keys and values into their pages:
 *
 *   copy_pages of each pool  ->  cache_copy of each pair  ->  cache_compress of the blocks that become whole
 */
#include "cache/cache.h"
#include "cache/step.h"

#include "core/error.h"

static const op_tensor tensors[] = {
    {"k", "K", OP_ACTIVATION, OP_NONE, {ST_T, ST_HKV, ST_D}, {0}},
    {"v", "V", OP_ACTIVATION, OP_NONE, {ST_T, ST_HKV, ST_DV}, {0}},
    {"k_slc", "K_slc", OP_ACTIVATION, OP_NONE, {ST_T, ST_HKV, ST_D}, {0}},
    {"v_slc", "V_slc", OP_ACTIVATION, OP_NONE, {ST_T, ST_HKV, ST_DV}, {0}},
    {"k_win", "K_win", OP_ACTIVATION, OP_NONE, {ST_T, ST_HKV, ST_D}, {0}},
    {"v_win", "V_win", OP_ACTIVATION, OP_NONE, {ST_T, ST_HKV, ST_DV}, {0}},
    {"w_k", "w_k", OP_WEIGHT, OP_NONE, {ST_HKV, ST_IN, ST_D}, {0}},
    {"w_v", "w_v", OP_WEIGHT, OP_NONE, {ST_HKV, ST_IN_V, ST_DV}, {0}},
    {"pe_k", "pe_k", OP_WEIGHT, OP_NONE, {ST_HKV, ST_L, ST_D}, {0}},
    {"pe_v", "pe_v", OP_WEIGHT, OP_NONE, {ST_HKV, ST_L, ST_DV}, {0}},
    STEP_ROWS,
    {"copies", "copies", OP_I32, OP_NONE, {ST_COPIES, ST_COPY}, {0}},
    {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {ST_T, ST_HI, ST_DI}, {0}},
    STEP_INDEX,
};

static const char *const compressions[] = {"mean", "linear", NULL};
#define FIELD(member) OP_FIELD(quern_cache_step_params, member)
static const op_param params[] = {
    {FIELD(block_size), OP_INTEGER, 0, INT32_MAX, NULL, "tokens of an entry; 0: no entries"},
    {FIELD(stride), OP_INTEGER, 0, INT32_MAX, NULL, "tokens from an entry to the next; 0: block-size"},
    {FIELD(compress), OP_CHOICE, 0, QUERN_NSA_COMPRESS_LINEAR, compressions, "how a block becomes an entry"},
};

#define PARAMS(call) ((quern_cache_step_params *)op_params(call))

static bool is_linear(const quern_cache_step_params *p)
{
    return p->block_size > 0 && p->compress == QUERN_NSA_COMPRESS_LINEAR;
}

quern_status cache_check_stride(const char *prefix, int64_t block_size, int64_t *stride)
{
    if (*stride == 0) *stride = block_size;
    if (block_size == 0 || (*stride >= 1 && block_size % *stride == 0)) return QUERN_OK;
    return error_argument("%sstride is %lld: a divisor of block_size %lld is accepted", prefix,
                          (long long)*stride, (long long)block_size);
}

static quern_status check_params(op_call *call)
{
    return cache_check_stride("", PARAMS(call)->block_size, &PARAMS(call)->stride);
}

static void roles(op_call *call)
{
    const quern_cache_step_params *p = op_params(call);
    const bool linear = is_linear(p), slc = call->given[DR(slc)] != NULL, win = call->given[DR(win)] != NULL;
    uint8_t *r = call->role;
    r[DR(k)] = r[DR(v)] = OP_NEEDED;
    op_allow_all(call, DR(k_slc), DR(v_slc), slc, OP_NEEDED, ": without slc NULL is accepted");
    op_allow_all(call, DR(k_win), DR(v_win), win, OP_NEEDED, ": without win NULL is accepted");
    op_allow_all(call, DR(w_k), DR(w_v), p->block_size > 0, linear ? OP_NEEDED : OP_OPTIONAL,
                 ": without block_size NULL is accepted");
    op_allow_all(call, DR(pe_k), DR(pe_v), linear, OP_OPTIONAL,
                 ": compress linear takes it, else NULL is accepted");
    r[DR(slots)] = r[DR(positions)] = r[DR(cu)] = OP_NEEDED;
    r[DR(copies)] = OP_OPTIONAL;
    r[DR(index)] = call->given[DR(index)] != NULL ? OP_UPDATED : OP_OPTIONAL;
    op_allow(call, DR(k_index), call->given[DR(index)] != NULL, OP_NEEDED,
             ": without index NULL is accepted");
    step_pool_roles(call, DR(tokens), p->block_size > 0, OP_UPDATED);
}

static quern_status derive(op_call *call)
{
    const quern_cache_step_params *p = op_params(call);
    const int64_t rows = is_linear(p) ? p->block_size : 1;
    int64_t *s = call->symbol;
    s[ST_IN] = rows * s[ST_D]; /* of at most 2^31 rows */
    s[ST_IN_V] = rows * s[ST_DV];
    s[ST_L] = p->block_size;
    s[ST_COPY] = 3;
    step_derive(call);
    quern_status status = step_derive_rows(call, DR(k));
    if (status == QUERN_OK) status = view_check_head_dim("k", s[ST_D]);
    if (status == QUERN_OK) status = view_check_head_dim("v", s[ST_DV]);
    return status == QUERN_OK && op_uses(call, DR(index)) ? step_derive_index(call, DR(index), DR(k_index))
                                                          : status;
}

/* Copies of a pool's pages. */
static void add_copies(op_build *b, int32_t pool, int64_t number)
{
    const quern_tensor pages = op_view(b->call, pool, false);
    if (pages.ndim > 0 && op_uses(b->call, DR(copies)))
        *OP_ADD(b, copy_pages) = (copy_pages_args){number, op_view(b->call, DR(copies), false), pages};
}

/* The pair whose keys are tensor k. */
static void add_pair(op_build *b, int32_t pool, int32_t table, const stage_step *step, int32_t k)
{
    const quern_tensor keys = op_view(b->call, k, true), values = op_view(b->call, k + 1, true);
    if (keys.ndim > 0)
        *OP_ADD(b, cache_copy) = (cache_copy_args){
            .plane = step_plane(b, pool, table, pool == DR(win)), .step = *step, .k = keys, .v = values};
}

static void build(op_build *b)
{
    const quern_cache_step_params *p = op_params(b->call);
    const stage_step step = step_of(b, DR(slots));
    add_copies(b, DR(tokens), QUERN_CACHE_TOKENS);
    add_copies(b, DR(slc), QUERN_CACHE_TOKENS);
    add_copies(b, DR(entries), QUERN_CACHE_ENTRIES);
    add_copies(b, DR(win), QUERN_CACHE_WIN);
    add_copies(b, DR(index), QUERN_CACHE_TOKENS);
    add_pair(b, DR(tokens), DR(tokens_table), &step, DR(k));
    add_pair(b, DR(slc), DR(tokens_table), &step, DR(k_slc));
    add_pair(b, DR(win), DR(win_table), &step, DR(k_win));
    if (op_uses(b->call, DR(index)))
        *OP_ADD(b, cache_copy) = (cache_copy_args){.plane = step_index_plane(b, DR(index), DR(tokens_table)),
                                                   .step = step,
                                                   .k = op_view(b->call, DR(k_index), true)};
    if (p->block_size == 0) return;
    *OP_ADD(b, cache_compress) =
        (cache_compress_args){.tokens = step_plane(b, DR(tokens), DR(tokens_table), false),
                              .entries = step_plane(b, DR(entries), DR(entries_table), false),
                              .step = step,
                              .most = b->call->symbol[ST_T],
                              .kind = (compress_kind)p->compress,
                              .block_size = p->block_size,
                              .stride = p->stride,
                              .w_k = op_view(b->call, DR(w_k), false),
                              .w_v = op_view(b->call, DR(w_v), false),
                              .pe_k = op_view(b->call, DR(pe_k), false),
                              .pe_v = op_view(b->call, DR(pe_v), false)};
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const quern_cache_step_params *p = op_params(call);
    const cache_copy_args *copy = OP_FIND(call, cache_copy);
    const cache_compress_args *compress = OP_FIND(call, cache_compress);
    const step_data s = {call, data, DR(slots), &copy->step, p->block_size, p->stride};
    quern_status status = step_check(&s);
    if (status == QUERN_OK) status = step_check_table(&s, &copy->plane, DR(tokens_table), false);
    if (status == QUERN_OK && compress != NULL)
        status = step_check_table(&s, &compress->entries, DR(entries_table), true);
    const op_step *step = op_program_steps(call);
    for (int32_t i = 0; i < call->program.steps && status == QUERN_OK; i++, step = op_step_next(step)) {
        const cache_copy_args *args = op_step_args(step);
        if (step->stage == OP_cache_copy && args->plane.ring > 0)
            status = step_check_table(&s, &args->plane, DR(win_table), false);
        if (step->stage == OP_copy_pages) status = step_check_copies(op_step_args(step), data[DR(copies)]);
    }
    return status;
}

static const char *const operations[] = {"cache_append_step"};
static const op_entry ops[] = {
    {.name = "cache-append-step",
     .help = "keys and values of a step into their pages, and the entries of blocks that become whole"},
};

const op_family cache_append_family = {
    OP_TABLES(operations, params, step_symbols, ops),
    OP_ROWS(tensors, quern_cache_tensors, QUERN_CACHE_TENSORS_INIT),
    OP_CALL(quern_cache_step_params, QUERN_CACHE_STEP_PARAMS_INIT,
            5 * OP_STEP_BYTES(copy_pages) + 4 * OP_STEP_BYTES(cache_copy) + OP_STEP_BYTES(cache_compress)),
    .first = QUERN_OP_CACHE_APPEND_STEP,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_cache_append_step_workspace(quern_context *ctx, const quern_cache_step_params *p,
                                               const quern_cache_tensors *of, size_t *bytes)
{
    return op_workspace_of(&cache_append_family, 0, ctx, p, of, bytes);
}

quern_status quern_cache_append_step(quern_context *ctx, const quern_exec *exec,
                                     const quern_cache_step_params *p, const quern_cache_tensors *of,
                                     void *workspace, size_t workspace_bytes)
{
    return op_run(&cache_append_family, 0, ctx, exec, p, of, workspace, workspace_bytes);
}

/* ---- of a cache's sequences ---- */

static quern_cache_step_params step_params(const quern_cache *cache)
{
    const quern_cache_params *p = &cache->params;
    quern_cache_step_params s = QUERN_CACHE_STEP_PARAMS_INIT;
    s.block_size = p->block_size;
    s.stride = p->stride;
    s.compress = p->compress;
    return s;
}

/* The caller's tensors with those of the step. */
static quern_status bind(const quern_cache *cache, const quern_cache_tensors *given, const cache_views *v,
                         quern_cache_tensors *own)
{
    *own = (quern_cache_tensors)QUERN_CACHE_TENSORS_INIT;
    const quern_status status = op_struct(own, given, "tensors", "QUERN_CACHE_TENSORS_INIT");
    if (status != QUERN_OK) return status;
    cache_bind(cache, v, &own->slots);
    own->copies = &v->step.copies;
    own->index = cache_index(cache);
    return cache_check_rows(cache, v, own->k, "k");
}

quern_status quern_cache_append_workspace(quern_context *ctx, const quern_cache *cache,
                                          const quern_cache_batch *batch, const quern_cache_tensors *of,
                                          size_t *bytes)
{
    quern_cache_tensors t;
    cache_views v;
    quern_status status = cache_look(cache, batch, true, false, &v);
    if (status == QUERN_OK) status = bind(cache, of, &v, &t);
    if (status != QUERN_OK) return status;
    const quern_cache_step_params p = step_params(cache);
    return quern_cache_append_step_workspace(ctx, &p, &t, bytes);
}

quern_status quern_cache_append(quern_context *ctx, const quern_exec *exec, quern_cache *cache,
                                const quern_cache_batch *batch, const quern_cache_tensors *of,
                                void *workspace, size_t workspace_bytes)
{
    quern_cache_tensors t;
    cache_views v;
    quern_status status = cache_look(cache, batch, true, true, &v);
    if (status != QUERN_OK) return status;
    if ((status = bind(cache, of, &v, &t)) == QUERN_OK) {
        const quern_cache_step_params p = step_params(cache);
        status = quern_cache_append_step(ctx, exec, &p, &t, workspace, workspace_bytes);
    }
    (void)(status == QUERN_OK ? quern_ledger_commit : quern_ledger_abort)(cache->ledger);
    return status;
}
