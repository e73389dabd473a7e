/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pack.c - a sequence's keys and values as bytes, and back: a pack_rows step for each pool. */
#include "cache/cache.h"
#include "cache/step.h"

#include "core/error.h"

enum { PACK, UNPACK };
#define ROW_OF_TABLE(field, columns)                                                                         \
    {                                                                                                        \
        field, field, OP_I32, OP_NONE, {columns},                                                            \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }
static const op_tensor tensors[] = {
    STEP_POOL("tokens", ST_PAGES),
    ROW_OF_TABLE("tokens_table", ST_COLUMNS),
    STEP_POOL("slc", ST_PAGES),
    STEP_POOL("entries", ST_ENTRY_PAGES),
    ROW_OF_TABLE("entries_table", ST_ENTRY_COLUMNS),
    STEP_POOL("win", ST_WIN_PAGES),
    ROW_OF_TABLE("win_table", ST_WIN_COLUMNS),
    {"packed", "packed", OP_U8, OP_NONE, {ST_PACKED}, {0}},
    STEP_INDEX,
};

#define FIELD(member) OP_FIELD(quern_cache_pack_params, member)
static const op_param params[] = {
    {FIELD(tokens), OP_INTEGER, 0, INT32_MAX, NULL, "of the sequence"},
    {FIELD(dim), OP_INTEGER, 0, 512, NULL, "channels of a key; 0: half of a pair's"},
    {FIELD(block_size), OP_INTEGER, 0, INT32_MAX, NULL, "tokens of an entry; 0: no entries"},
    {FIELD(stride), OP_INTEGER, 0, INT32_MAX, NULL, "tokens from an entry to the next; 0: block-size"},
};

#define PARAMS(call) ((quern_cache_pack_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    return cache_check_stride("", PARAMS(call)->block_size, &PARAMS(call)->stride);
}

static void roles(op_call *call)
{
    const bool unpack = call->operation == UNPACK;
    step_pool_roles(call, DK(tokens), PARAMS(call)->block_size > 0, unpack ? OP_UPDATED : OP_NEEDED);
    call->role[DK(packed)] = unpack ? OP_NEEDED : OP_RESULT;
    call->role[DK(index)] = call->given[DK(index)] == NULL ? OP_OPTIONAL : unpack ? OP_UPDATED : OP_NEEDED;
}

/* A pool's rows of the sequence. */
typedef struct packed_rows {
    int32_t pool, table;
    int64_t first, count, ring;
    int64_t heads, dim, dim_v;
} packed_rows;

static packed_rows rows_of(const op_call *call, cache_pool pool)
{
    const quern_cache_pack_params *p = op_params(call);
    const int64_t *s = call->symbol, ring = s[ST_WIN_COLUMNS], room = ring * CACHE_BLOCK;
    packed_rows r = {DK(tokens), DK(tokens_table), 0, p->tokens, 0, s[ST_HKV], s[ST_D], s[ST_DV]};
    if (pool == CACHE_SLC) r.pool = DK(slc);
    if (pool == CACHE_ENTRIES && p->block_size > 0) {
        r.pool = DK(entries);
        r.table = DK(entries_table);
        r.count = mask_entries(p->tokens, p->block_size, p->stride);
    }
    if (pool == CACHE_WIN) {
        r.pool = DK(win);
        r.table = DK(win_table);
        r.first = p->tokens > room ? p->tokens - room : 0;
        r.count = p->tokens - r.first;
        r.ring = ring;
    }
    if (pool == CACHE_INDEX) {
        r.pool = DK(index);
        r.heads = s[ST_HI];
        r.dim = s[ST_DI];
        r.dim_v = 0;
    }
    if ((pool == CACHE_ENTRIES && p->block_size == 0) || !op_uses(call, r.pool)) r.count = 0;
    return r;
}

static quern_status derive(op_call *call)
{
    const quern_cache_pack_params *p = op_params(call);
    const quern_tensor *tokens = call->given[DK(tokens)];
    int64_t *s = call->symbol, elements = 0;
    const int64_t pair = tokens->shape[2] / CACHE_BLOCK;
    if (tokens->shape[2] % CACHE_BLOCK != 0 || p->dim > pair)
        return error_argument(
            "tokens.shape[2] is %lld with dim %lld: 64 times the channels of keys and values is accepted",
            (long long)tokens->shape[2], (long long)p->dim);
    s[ST_D] = p->dim > 0 ? p->dim : pair / 2;
    s[ST_DV] = pair - s[ST_D];
    s[ST_PAGE] = tokens->shape[2];
    const quern_status status =
        op_uses(call, DK(index)) ? step_derive_index(call, DK(index), OP_NONE) : QUERN_OK;
    if (status != QUERN_OK) return status;
    const int64_t has[] = {s[ST_COLUMNS], s[ST_COLUMNS], s[ST_ENTRY_COLUMNS], s[ST_WIN_COLUMNS],
                           s[ST_COLUMNS]};
    for (int i = 0; i < CACHE_POOLS; i++) {
        const packed_rows r = rows_of(call, (cache_pool)i);
        if (r.count > has[i] * CACHE_BLOCK)
            return error_argument("%s has %lld columns: those of %lld rows are accepted",
                                  tensors[r.table].field, (long long)has[i], (long long)r.count);
        elements += r.count * r.heads * (r.dim + r.dim_v);
    }
    s[ST_PACKED] = elements * (int64_t)quern_dtype_size(call->like.dtype);
    return QUERN_OK;
}

static void build(op_build *b)
{
    const int64_t size = (int64_t)quern_dtype_size(b->call->like.dtype);
    int64_t at = 0;
    for (int i = 0; i < CACHE_POOLS; i++) {
        const packed_rows r = rows_of(b->call, (cache_pool)i);
        const int64_t bytes = r.count * r.heads * (r.dim + r.dim_v) * size;
        quern_tensor packed = op_view(b->call, DK(packed), false);
        if (r.count == 0) continue;
        view_narrow(&packed, 0, at, bytes);
        *OP_ADD(b, pack_rows) = (pack_rows_args){.page = CACHE_BLOCK,
                                                 .parts = r.heads,
                                                 .data = r.dim * size,
                                                 .scales = r.dim_v * size,
                                                 .first = r.first,
                                                 .count = r.count,
                                                 .ring = r.ring,
                                                 .unpack = b->call->operation == UNPACK,
                                                 .table = op_view(b->call, r.table, false),
                                                 .pages = op_view(b->call, r.pool, false),
                                                 .packed = packed};
        at += bytes;
    }
}

static const char *const operations[] = {"cache_pack", "cache_unpack"};
static const op_entry ops[] = {
    {.name = "cache-pack",
     .help = "a sequence's keys and values out of their pages, as bytes",
     .forward = PACK},
    {.name = "cache-unpack", .help = "such bytes into pages", .forward = UNPACK},
};

const op_family cache_pack_family = {
    OP_TABLES(operations, params, step_symbols, ops),
    OP_ROWS(tensors, quern_cache_pack_tensors, QUERN_CACHE_PACK_TENSORS_INIT),
    OP_CALL(quern_cache_pack_params, QUERN_CACHE_PACK_PARAMS_INIT, CACHE_POOLS *OP_STEP_BYTES(pack_rows)),
    .first = QUERN_OP_CACHE_PACK,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = step_check_packed,
    .build = build,
};

quern_status quern_cache_pack_workspace(quern_context *ctx, const quern_cache_pack_params *p,
                                        const quern_cache_pack_tensors *of, size_t *bytes)
{
    return op_workspace_of(&cache_pack_family, PACK, ctx, p, of, bytes);
}

quern_status quern_cache_pack(quern_context *ctx, const quern_exec *exec, const quern_cache_pack_params *p,
                              const quern_cache_pack_tensors *of, void *workspace, size_t workspace_bytes)
{
    return op_run(&cache_pack_family, PACK, ctx, exec, p, of, workspace, workspace_bytes);
}

quern_status quern_cache_unpack_workspace(quern_context *ctx, const quern_cache_pack_params *p,
                                          const quern_cache_pack_tensors *of, size_t *bytes)
{
    return op_workspace_of(&cache_pack_family, UNPACK, ctx, p, of, bytes);
}

quern_status quern_cache_unpack(quern_context *ctx, const quern_exec *exec, const quern_cache_pack_params *p,
                                const quern_cache_pack_tensors *of, void *workspace, size_t workspace_bytes)
{
    return op_run(&cache_pack_family, UNPACK, ctx, exec, p, of, workspace, workspace_bytes);
}
