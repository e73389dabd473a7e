/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_pack.c - what a layer keeps of a sequence as bytes, and back: a pack_rows step for each pool. */
#include "cache/step.h"
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"
#include "dsv4/layer.h"

#include <inttypes.h>

enum { PACK, UNPACK, PARTS = 7 };
/* Extents; the pools' are lists. */
enum { PS_ONE = 1, PS_COLUMNS, PS_SLOTS, PS_FLOATS, PS_INDEX_FLOATS, PS_PACKED };

static const op_tensor tensors[] = {
    {"raw", "raw", OP_STORED, OP_NONE, {LL_RAW}, {0}},
    {"raw_table", "raw_table", OP_I32, OP_NONE, {PS_ONE}, {0}},
    {"entries", "entries", OP_STORED, OP_NONE, {LL_ENTRIES}, {0}},
    {"entries_table", "entries_table", OP_I32, OP_NONE, {PS_COLUMNS}, {0}},
    {"keys", "keys", OP_STORED, OP_NONE, {LL_KEYS}, {0}},
    {"states", "states", OP_F32, OP_NONE, {PS_SLOTS, PS_FLOATS}, {0}},
    {"merged", "merged", OP_I32, OP_NONE, {PS_SLOTS}, {0}},
    {"indexer_states", "indexer_states", OP_F32, OP_NONE, {PS_SLOTS, PS_INDEX_FLOATS}, {0}},
    {"indexer_merged", "indexer_merged", OP_I32, OP_NONE, {PS_SLOTS}, {0}},
    {"slot", "slot", OP_I32, OP_NONE, {PS_ONE}, {0}},
    {"packed", "packed", OP_U8, OP_NONE, {PS_PACKED}, {0}},
};

#define FIELD(member) OP_FIELD(quern_dsv4_layer_pack_params, member)
static const op_param params[] = {
    {FIELD(tokens), OP_INTEGER, 0, INT32_MAX, NULL, "of the sequence"},
    {FIELD(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "tokens of an entry; 0: 4 with keys, else 128"},
    {FIELD(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, dsv4_formats, "of raw rows and entries: rows, row584"},
    {FIELD(key_format), OP_CHOICE, 0, QUERN_DSV4_FP4, dsv4_key_formats, "of the indexer's keys"},
};
static const char *const operations[] = {"dsv4_layer_pack", "dsv4_layer_unpack"};
static const op_entry ops[] = {
    {.name = "v4-layer-pack",
     .help = "what a layer of DeepSeek-V4 keeps of a sequence out of its pages and slot, as bytes",
     .forward = PACK},
    {.name = "v4-layer-unpack", .help = "such bytes into pages and a slot", .forward = UNPACK},
};
static const char symbols[] = "1 columns slots floats index_floats bytes";
static const char *const leads[] = {
    "", "",  "raw_pages ring D|584", "pages page D|pages page*584", "pages page C_I|pages page*bytes",
    "", NULL};

#define PARAMS(call) ((quern_dsv4_layer_pack_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    return dsv4_check_core_format(PARAMS(call)->format);
}

static void roles(op_call *call)
{
    const bool unpack = call->operation == UNPACK, entries = call->given[DLP(entries)] != NULL,
               keys = entries && call->given[DLP(keys)] != NULL;
    const op_role pool = unpack ? OP_UPDATED : OP_NEEDED;
    const char *beside_entries = ": without entries NULL is accepted";
    uint8_t *r = call->role;
    r[DLP(raw)] = (uint8_t)pool;
    r[DLP(raw_table)] = OP_NEEDED;
    r[DLP(entries)] = (uint8_t)(entries ? pool : OP_OPTIONAL);
    op_allow_all(call, DLP(states), DLP(merged), entries, pool, beside_entries);
    op_allow(call, DLP(entries_table), entries, OP_NEEDED, beside_entries);
    op_allow(call, DLP(slot), entries, OP_NEEDED, beside_entries);
    op_allow(call, DLP(keys), entries, keys ? pool : OP_OPTIONAL, beside_entries);
    op_allow_all(call, DLP(indexer_states), DLP(indexer_merged), keys, pool,
                 ": without keys NULL is accepted");
    r[DLP(packed)] = unpack ? OP_NEEDED : OP_RESULT;
}

/* Channels of keys in pages of `page` rows. */
static int64_t key_width(const quern_tensor *keys, quern_dsv4_format format, int64_t page)
{
    const int64_t columns = keys->shape[keys->ndim - 1];
    return format == QUERN_DSV4_ROWS ? columns : row_width(dsv4_entry_format(format), columns / page);
}

static quern_status derive_entries(op_call *call, int64_t width)
{
    const quern_dsv4_layer_pack_params *p = op_params(call);
    op_extents *entries = &call->lead[LEAD_OF(LL_ENTRIES)];
    quern_status status = layer_derive_pool(call, DLP(entries), p->format, width, entries);
    if (status != QUERN_OK || !op_uses(call, DLP(keys))) return status;
    const int64_t page = layer_page_of(entries, p->format, width);
    if ((status = op_check_ndim(call, DLP(keys), p->key_format == QUERN_DSV4_ROWS ? 3 : 2)) != QUERN_OK ||
        (status = dsv4_check_stored(call, DLP(keys), p->key_format)) != QUERN_OK)
        return status;
    const int64_t of_key = key_width(call->given[DLP(keys)], p->key_format, page);
    if (of_key < 1)
        return error_argument("keys.shape[1] is %" PRId64 ": %" PRId64 " rows of bytes are accepted",
                              call->given[DLP(keys)]->shape[1], page);
    layer_set_pool(&call->lead[LEAD_OF(LL_KEYS)], entries->extent[0], page, p->key_format, of_key);
    return QUERN_OK;
}

/* A pool's rows of the sequence. */
typedef struct part {
    int32_t pool, table;
    int64_t page, data, scales; /* slots; bytes */
    int64_t first, count, ring;
} part;

/* Channels of raw rows and entries. */
static int64_t width_of(const op_call *call)
{
    const row_format *f = row_format_of(dsv4_entry_format(PARAMS(call)->format));
    return f->width > 0 ? f->width : call->given[DLP(raw)]->shape[2];
}

/* Part i of the packed bytes; count 0: there is none. */
static part part_of(const op_call *call, int i)
{
    static const int32_t pools[PARTS] = {DLP(raw),    DLP(entries),        DLP(keys),          DLP(states),
                                         DLP(merged), DLP(indexer_states), DLP(indexer_merged)};
    const quern_dsv4_layer_pack_params *p = op_params(call);
    const op_extents *entries = &call->lead[LEAD_OF(LL_ENTRIES)];
    const int64_t *raw = call->lead[LEAD_OF(LL_RAW)].extent, *s = call->symbol,
                  page = entries->count > 0 ? layer_page_of(entries, p->format, width_of(call)) : 1;
    const bool keys = op_uses(call, DLP(keys));
    const int64_t ratio = p->ratio > 0 ? p->ratio : keys ? DSV4_CSA_RATIO : DSV4_HCA_RATIO;
    part of = {.pool = pools[i], .table = DLP(slot), .page = 1, .count = p->tokens > 0};
    if (!op_uses(call, of.pool)) return (part){0};
    if (i == 0) {
        of = (part){.pool = DLP(raw), .table = DLP(raw_table), .page = raw[1], .ring = 1};
        of.count = p->tokens < raw[1] ? p->tokens : raw[1];
        of.first = p->tokens - of.count;
        of.data = raw[2] * (int64_t)quern_dtype_size(call->given[of.pool]->dtype);
    } else if (i <= 2) {
        const quern_dsv4_format format = i == 1 ? p->format : p->key_format;
        const quern_tensor *pool = call->given[of.pool];
        const int64_t width = i == 1 ? width_of(call) : key_width(pool, format, page);
        of.table = DLP(entries_table);
        of.page = page;
        of.count = p->tokens / ratio;
        of.data = row_data_bytes(dsv4_entry_format(format), width, pool->dtype);
        of.scales = row_scale_bytes(dsv4_entry_format(format), width);
    } else {
        const int64_t columns = i == 3 ? s[PS_FLOATS] : i == 5 ? s[PS_INDEX_FLOATS] : 1;
        of.data = columns * (int64_t)sizeof(float);
    }
    return of;
}

/* Rows stand one behind the other in a page. */
static quern_status check_gaps(const op_call *call)
{
    static const int32_t pools[] = {DLP(raw), DLP(entries), DLP(keys)};
    for (int i = 0; i < 3; i++) {
        const quern_tensor *t = op_uses(call, pools[i]) ? call->given[pools[i]] : NULL;
        if (t != NULL && t->ndim == 3 && t->shape[1] > 1 && t->strides[1] != t->shape[2])
            return error_argument("%s.strides[1] is %" PRId64 ": %" PRId64 " is accepted",
                                  tensors[pools[i]].field, t->strides[1], t->shape[2]);
    }
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_dsv4_layer_pack_params *p = op_params(call);
    const quern_tensor *raw = call->given[DLP(raw)];
    int64_t *s = call->symbol;
    s[PS_ONE] = 1;
    s[PS_PACKED] = 0;
    if (raw->ndim != 3) return op_check_ndim(call, DLP(raw), 3);
    const int64_t width = width_of(call);
    quern_status status = layer_derive_raw(call, DLP(raw), p->format, width);
    if (status == QUERN_OK && op_uses(call, DLP(entries))) status = derive_entries(call, width);
    if (status == QUERN_OK) status = check_gaps(call);
    for (int i = 0; i < PARTS && status == QUERN_OK; i++) {
        const part of = part_of(call, i);
        s[PS_PACKED] += of.count * (of.data + of.scales);
        if (of.table == DLP(entries_table) && of.count > s[PS_COLUMNS] * of.page)
            status = error_argument("entries_table has %" PRId64 " columns: those of %" PRId64
                                    " entries are accepted",
                                    s[PS_COLUMNS], of.count);
    }
    return status;
}

static void build(op_build *b)
{
    int64_t at = 0;
    for (int i = 0; i < PARTS; i++) {
        const part of = part_of(b->call, i);
        const int64_t bytes = of.count * (of.data + of.scales);
        quern_tensor packed = op_view(b->call, DLP(packed), false);
        if (of.count == 0) continue;
        view_narrow(&packed, 0, at, bytes);
        const quern_tensor pool = op_view(b->call, of.pool, false);
        *OP_ADD(b, pack_rows) = (pack_rows_args){.page = of.page,
                                                 .parts = 1,
                                                 .data = of.data,
                                                 .scales = of.scales,
                                                 .first = of.first,
                                                 .count = of.count,
                                                 .ring = of.ring,
                                                 .unpack = b->call->operation == UNPACK,
                                                 .table = op_view(b->call, of.table, false),
                                                 .pages = pool,
                                                 .packed = packed};
        at += bytes;
    }
}

const op_family dsv4_layer_pack_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_layer_pack_tensors, QUERN_DSV4_LAYER_PACK_TENSORS_INIT),
    OP_CALL(quern_dsv4_layer_pack_params, QUERN_DSV4_LAYER_PACK_PARAMS_INIT, PARTS *OP_STEP_BYTES(pack_rows)),
    .first = QUERN_OP_DSV4_LAYER_PACK,
    .leads = leads,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = step_check_packed,
    .build = build,
};

quern_status quern_dsv4_layer_pack_workspace(quern_context *ctx, const quern_dsv4_layer_pack_params *given,
                                             const quern_dsv4_layer_pack_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_layer_pack_family, PACK, ctx, given, of, bytes);
}

quern_status quern_dsv4_layer_pack(quern_context *ctx, const quern_exec *exec,
                                   const quern_dsv4_layer_pack_params *given,
                                   const quern_dsv4_layer_pack_tensors *of, void *workspace,
                                   size_t workspace_bytes)
{
    return op_run(&dsv4_layer_pack_family, PACK, ctx, exec, given, of, workspace, workspace_bytes);
}

quern_status quern_dsv4_layer_unpack_workspace(quern_context *ctx, const quern_dsv4_layer_pack_params *given,
                                               const quern_dsv4_layer_pack_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_layer_pack_family, UNPACK, ctx, given, of, bytes);
}

quern_status quern_dsv4_layer_unpack(quern_context *ctx, const quern_exec *exec,
                                     const quern_dsv4_layer_pack_params *given,
                                     const quern_dsv4_layer_pack_tensors *of, void *workspace,
                                     size_t workspace_bytes)
{
    return op_run(&dsv4_layer_pack_family, UNPACK, ctx, exec, given, of, workspace, workspace_bytes);
}
