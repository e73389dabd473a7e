/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.c - the indexer: its schema, its public functions, and its step. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

#include <math.h>

enum { INDEX_PAGE_MOST = 65536 };
enum { IS_B = 1, IS_T, IS_H, IS_C, IS_S, IS_ROW, IS_K, IS_COLUMNS };

static const op_tensor tensors[] = {
    {"q", "q_I", OP_ACTIVATION, OP_NONE, {IS_B, IS_T, IS_H, IS_C}, {0}},
    {"k", "k_I", OP_STORED, OP_NONE, {OP_LEAD, IS_ROW}, {0}},
    {"w", "w", OP_WEIGHT, OP_NONE, {IS_B, IS_T, IS_H}, {0}},
    {"idx", "idx", OP_I32, OP_NONE, {IS_B, IS_T, IS_K}, {0}},
    {"count", "count", OP_I32, OP_NONE, {IS_B, IS_T}, {0}},
    {"scores", "scores", OP_F32, OP_NONE, {IS_B, IS_T, IS_S}, {0}},
    {"start_positions", "start_positions", OP_I32, OP_NONE, {IS_B}, {0}},
    {"k_table", "k_table", OP_I32, OP_NONE, {IS_B, IS_COLUMNS}, {0}},
};

static const char *const product_words[] = {"exact", "fp8", NULL};
#define FIELD(member) OP_FIELD(quern_dsv4_index_params, member)
static const op_param params[] = {
    {FIELD(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "tokens of an entry; 0: 4"},
    {FIELD(top_k), OP_INTEGER, 0, DSV4_TOP_K_MOST, NULL, "entries kept; 0: 512"},
    {FIELD(start_abs_pos), OP_INTEGER, 0, INT32_MAX, NULL, "where query 0 stands"},
    {FIELD(key_format), OP_CHOICE, 0, QUERN_DSV4_FP4, dsv4_key_formats, "of k_I"},
    {FIELD(page), OP_INTEGER, 0, INDEX_PAGE_MOST, NULL, "slots of a page of k_I; 0: contiguous"},
    {FIELD(products), OP_CHOICE, 0, QUERN_DSV4_INDEX_FP8, product_words,
     "of q_I and k_I; fp8: each head of q_I is rounded as a row of fp8"},
};
static const char *const operations[] = {"dsv4_index"};
static const char symbols[] = "B T Hi C_I S C_I|bytes k columns";
static const int8_t scores_alone[] = {DI(scores), OP_NONE};
static const op_entry ops[] = {
    {.name = "v4-index",
     .help = "DeepSeek-V4's indexer: the entries of the greatest scores of every query, ascending",
     .aside = "save-scores",
     .aside_valued = true,
     .aside_tensors = scores_alone},
};

static quern_status check_params(op_call *call)
{
    quern_dsv4_index_params *p = op_params(call);
    if (p->ratio == 0) p->ratio = DSV4_CSA_RATIO;
    if (p->top_k == 0) p->top_k = DSV4_TOP_K;
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const quern_dsv4_index_params *p = op_params(call);
    for (int i = 0; i < OP_TENSOR_COUNT(quern_dsv4_index_tensors); i++)
        call->role[i] = i <= DI(w) ? OP_NEEDED : i == DI(scores) ? OP_OPTIONAL_RESULT : OP_RESULT;
    call->role[DI(start_positions)] = OP_OPTIONAL;
    op_allow(call, DI(k_table), p->page > 0, OP_NEEDED, ": it stands beside a page of 1 slot or more");
}

/* The keys: rows of one sequence after the other, or a pool. */
static quern_status derive_keys(op_call *call)
{
    const quern_dsv4_index_params *p = op_params(call);
    const quern_tensor *k = call->given[DI(k)], *table = call->given[DI(k_table)];
    const bool bytes = p->key_format != QUERN_DSV4_ROWS, pages = p->page > 0;
    const int32_t ndim = pages && bytes ? 2 : 3;
    const bool fp8 = p->key_format == QUERN_DSV4_FP8 || p->key_format == QUERN_DSV4_FP8_POWER;
    int64_t *s = call->symbol;
    if (p->products == QUERN_DSV4_INDEX_FP8 && !fp8)
        return error_argument("products is fp8: beside key_format fp8 or fp8-power it is accepted");
    if (k->ndim != ndim) return error_argument("k has %d dimensions: %d are accepted", k->ndim, ndim);
    const quern_status status = dsv4_check_stored(call, DI(k), p->key_format);
    if (status != QUERN_OK) return status;
    if (pages && (k->shape[0] > INT32_MAX || table->shape[1] > INT32_MAX))
        return error_argument("k has %lld pages and k_table %lld columns: at most %d are accepted",
                              (long long)k->shape[0], (long long)table->shape[1], INT32_MAX);
    s[IS_S] = pages ? s[IS_COLUMNS] * p->page : k->shape[1];
    s[IS_ROW] = dsv4_page_elements(p->key_format, s[IS_C], p->page);
    call->lead[0] = (op_extents){ndim - 1, {pages ? k->shape[0] : s[IS_B], pages ? p->page : s[IS_S]}};
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_dsv4_index_params *p = op_params(call);
    int64_t *s = call->symbol;
    quern_status status;
    s[IS_K] = p->top_k;
    const int32_t group = row_format_of(dsv4_entry_format(p->key_format))->group;
    const int64_t width_step = group > 8 ? group : 8;
    if (s[IS_C] < width_step || s[IS_C] > DSV4_INDEX_WIDTH_MOST || s[IS_C] % width_step != 0)
        return error_argument("q has %lld channels: a multiple of %lld up to %d is accepted",
                              (long long)s[IS_C], (long long)width_step, DSV4_INDEX_WIDTH_MOST);
    if ((status = derive_keys(call)) != QUERN_OK) return status;
    if (s[IS_H] < 1 || s[IS_H] > INT32_MAX || s[IS_T] > INT32_MAX || (s[IS_S] > INT32_MAX && p->page == 0))
        return error_argument(
            "%lld heads, %lld queries and %lld entries: 1 to %d heads and as many of the others are accepted",
            (long long)s[IS_H], (long long)s[IS_T], (long long)s[IS_S], INT32_MAX);
    return QUERN_OK;
}

/* Checks that the pages of a sequence's entries are in the pool. */
static quern_status check_pages(const op_call *call, const int32_t *table, int64_t b, int64_t start)
{
    const quern_dsv4_index_params *p = op_params(call);
    const int64_t entries = (start + call->symbol[IS_T]) / p->ratio, page = p->page,
                  columns = (entries + page - 1) / page;
    if (entries > INT32_MAX)
        return error_argument("sequence %lld has %lld entries: %d are accepted", (long long)b,
                              (long long)entries, INT32_MAX);
    const op_tensor *name = &tensors[DI(k_table)];
    return dsv4_check_pages(name, &OP_FIND(call, indexer)->table, table, b, 0, columns,
                            call->lead[0].extent[0]);
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const quern_dsv4_index_params *p = op_params(call);
    const bool given = call->alignment[DI(start_positions)] > 0;
    const int32_t *starts = data[DI(start_positions)];
    quern_status status = QUERN_OK;
    for (int64_t b = 0; b < call->symbol[IS_B] && status == QUERN_OK; b++) {
        const int64_t start = given ? starts[b] : p->start_abs_pos;
        if (start < 0)
            return error_argument("start_positions[%lld] is %lld: 0 or more is accepted", (long long)b,
                                  (long long)start);
        if (p->page > 0 && call->symbol[IS_T] > 0) status = check_pages(call, data[DI(k_table)], b, start);
    }
    return status;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_dsv4_index_params *p = op_params(call);
    const double channels = (double)call->symbol[IS_C], heads = (double)call->symbol[IS_H];
    *OP_ADD(b, indexer) = (indexer_args){.ratio = p->ratio,
                                         .position = p->start_abs_pos,
                                         .page = p->page,
                                         .format = dsv4_entry_format(p->key_format),
                                         .rounded = p->products == QUERN_DSV4_INDEX_FP8,
                                         .scale = (float)(1.0 / sqrt(channels * heads)),
                                         .positions = op_view(call, DI(start_positions), false),
                                         .table = op_view(call, DI(k_table), false),
                                         .q = op_view(call, DI(q), false),
                                         .keys = op_view(call, DI(k), false),
                                         .w = op_view(call, DI(w), false),
                                         .idx = op_view(call, DI(idx), false),
                                         .count = op_view(call, DI(count), false),
                                         .scores = op_view(call, DI(scores), false)};
}

const op_family dsv4_index_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_index_tensors, QUERN_DSV4_INDEX_TENSORS_INIT),
    OP_CALL(quern_dsv4_index_params, QUERN_DSV4_INDEX_PARAMS_INIT, OP_STEP_BYTES(indexer)),
    .first = QUERN_OP_DSV4_INDEX,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_dsv4_index_workspace(quern_context *ctx, const quern_dsv4_index_params *given,
                                        const quern_dsv4_index_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_index_family, 0, ctx, given, of, bytes);
}

quern_status quern_dsv4_index(quern_context *ctx, const quern_exec *exec,
                              const quern_dsv4_index_params *given, const quern_dsv4_index_tensors *of,
                              void *workspace, size_t workspace_bytes)
{
    return op_run(&dsv4_index_family, 0, ctx, exec, given, of, workspace, workspace_bytes);
}
