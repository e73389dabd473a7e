/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* store.c - writes rows into the caches of the indexer and the attention core: schema, public functions,
 * step. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

enum { STORE_PAGE_MOST = 65536 };
enum { SS_N = 1, SS_D, SS_ROW };

static const op_tensor tensors[] = {
    {"x", "x", OP_ACTIVATION, OP_NONE, {SS_N, SS_D}, {0}},
    {"slots", "slots", OP_I32, OP_NONE, {SS_N}, {0}},
    {"cache", "cache", OP_STORED, OP_NONE, {OP_LEAD, SS_ROW}, {0}},
};

#define FIELD(member) OP_FIELD(quern_dsv4_store_params, member)
static const op_param params[] = {
    {FIELD(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, dsv4_formats, "of the cache"},
    {FIELD(page), OP_INTEGER, 0, STORE_PAGE_MOST, NULL, "slots of a page; 0: contiguous"},
};
static const char *const operations[] = {"dsv4_store"};
static const op_entry ops[] = {
    {.name = "v4-store",
     .help = "Rows x [n D] into the slots of a cache that v4-attention and v4-index read, in its format"},
};
static const char symbols[] = "n D D|bytes";

static void roles(op_call *call)
{
    call->role[DT(x)] = call->role[DT(slots)] = OP_NEEDED;
    call->role[DT(cache)] = OP_UPDATED;
}

static quern_status derive(op_call *call)
{
    const quern_dsv4_store_params *p = op_params(call);
    const quern_tensor *cache = call->given[DT(cache)];
    const bool bytes = p->format != QUERN_DSV4_ROWS;
    int64_t *s = call->symbol;
    quern_status status;
    const quern_dsv4_compress_params width = {.format = p->format};
    if ((status = dsv4_check_width(&width, s[SS_D], 0)) != QUERN_OK) return status;
    const int32_t ndim = p->page > 0 && !bytes ? 3 : 2;
    if (cache->ndim != ndim)
        return error_argument("cache has %d dimensions: %d are accepted", cache->ndim, ndim);
    if ((status = dsv4_check_stored(call, DT(cache), p->format)) != QUERN_OK) return status;
    s[SS_ROW] = dsv4_page_elements(p->format, s[SS_D], p->page);
    call->lead[0].count = ndim - 1;
    call->lead[0].extent[0] = cache->shape[0];
    call->lead[0].extent[1] = p->page;
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const quern_dsv4_store_params *p = op_params(call);
    const int64_t rows = call->lead[0].extent[0], page = p->page > 0 ? p->page : 1;
    const int32_t *slots = data[DT(slots)];
    for (int64_t i = 0; i < call->symbol[SS_N]; i++)
        if (slots[i] < -1 || slots[i] / page >= rows)
            return error_argument("slots[%lld] is %d: -1 to %lld are accepted", (long long)i, slots[i],
                                  (long long)(rows * page - 1));
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_dsv4_store_params *p = op_params(call);
    *OP_ADD(b, store_rows) = (store_rows_args){.format = dsv4_entry_format(p->format),
                                               .page = p->page,
                                               .x = op_view(call, DT(x), false),
                                               .slots = op_view(call, DT(slots), false),
                                               .cache = op_view(call, DT(cache), false)};
}

quern_status dsv4_check_stored(const op_call *call, int32_t tensor, quern_dsv4_format format)
{
    const quern_dtype dtype = call->given[tensor]->dtype;
    if ((dtype == QUERN_U8) == (format != QUERN_DSV4_ROWS)) return QUERN_OK;
    return error_argument("%s has dtype %s: %s is accepted", call->family->tensors[tensor].field,
                          quern_dtype_name(dtype),
                          format != QUERN_DSV4_ROWS ? "u8, the format's bytes," : "f32, f16 or bf16");
}

quern_status dsv4_check_pages(const op_tensor *name, const quern_tensor *table, const int32_t *data,
                              int64_t b, int64_t first, int64_t end, int64_t pages)
{
    if (end > table->shape[1])
        return error_argument("%s has %lld columns: sequence %lld needs %lld", name->field,
                              (long long)table->shape[1], (long long)b, (long long)end);
    const int32_t *row = data + b * table->strides[0];
    for (int64_t c = first; c < end; c++)
        if (row[c] < 0 || row[c] >= pages)
            return error_argument("%s[%lld, %lld] is %d: pages 0 to %lld are accepted", name->field,
                                  (long long)b, (long long)c, row[c], (long long)pages - 1);
    return QUERN_OK;
}

const op_family dsv4_store_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_store_tensors, QUERN_DSV4_STORE_TENSORS_INIT),
    OP_CALL(quern_dsv4_store_params, QUERN_DSV4_STORE_PARAMS_INIT, OP_STEP_BYTES(store_rows)),
    .first = QUERN_OP_DSV4_STORE,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_dsv4_store_workspace(quern_context *ctx, const quern_dsv4_store_params *given,
                                        const quern_dsv4_store_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_store_family, 0, ctx, given, of, bytes);
}

quern_status quern_dsv4_store(quern_context *ctx, const quern_exec *exec,
                              const quern_dsv4_store_params *given, const quern_dsv4_store_tensors *of,
                              void *workspace, size_t workspace_bytes)
{
    return op_run(&dsv4_store_family, 0, ctx, exec, given, of, workspace, workspace_bytes);
}
