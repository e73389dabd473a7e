/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_step_schema.c - a step of the layer: its tensors and parameters, and the extents that follow from
 * them. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"
#include "dsv4/layer.h"
#include "dsv4/layer_tensors.h"

#include <inttypes.h>

enum { PAGE_MOST = 65536 };

static const op_tensor tensors[] = {
    LAYER_INPUTS LAYER_RESULTS DSV4_WEIGHT_TENSORS("compressor", "w.compressor.", LS_IN, LS_PROJ)
        DSV4_WEIGHT_TENSORS("indexer", "w.compressor.indexer.", LS_IN,
                            LS_4CI){"slots", "slots", OP_I32, OP_NONE, {LS_B}, {0}},
    {"positions", "positions", OP_I32, OP_NONE, {LS_B}, {0}},
    {"cu", "cu", OP_I32, OP_NONE, {LS_B1}, {0}},
    {"raw", "raw", OP_STORED, OP_NONE, {LL_RAW}, {0}},
    {"raw_table", "raw_table", OP_I32, OP_NONE, {LS_B, LS_1}, {0}},
    {"entries", "entries", OP_STORED, OP_NONE, {LL_ENTRIES}, {0}},
    {"entries_table", "entries_table", OP_I32, OP_NONE, {LS_B, LS_COLUMNS}, {0}},
    {"keys", "keys", OP_STORED, OP_NONE, {LL_KEYS}, {0}},
    {"states", "states", OP_F32, OP_NONE, {LS_SLOTS, LS_FLOATS}, {0}},
    {"merged", "merged", OP_I32, OP_NONE, {LS_SLOTS}, {0}},
    {"indexer_states", "indexer_states", OP_F32, OP_NONE, {LS_SLOTS, LS_INDEX_FLOATS}, {0}},
    {"indexer_merged", "indexer_merged", OP_I32, OP_NONE, {LS_SLOTS}, {0}},
    {"copies", "copies", OP_I32, OP_NONE, {LL_COPIES}, {0}},
    {"fault", "fault", OP_I32, OP_NONE, {LS_SLOTS}, {0}},
};
/* The layer's parts find these by DL(..). */
_Static_assert(DLS(out) == DL(out) && DLS(o_a_out) == DL(o_a_out) && DLS(indexer_heads) == DL(indexer_heads),
               "x, weights and results come first");

const dsv4_weight_row layer_step_weights[2] = {
    {{DLS(compressor_kv), DLS(compressor_gate)}, DLS(compressor_fp8)},
    {{DLS(indexer_kv), DLS(indexer_gate)}, DLS(indexer_fp8)}};

static const char *const operations[] = {"dsv4_layer_step"};
static const op_entry ops[] = {
    {.name = "v4-layer-step",
     .help = "new tokens of many sequences through a whole attention layer of DeepSeek-V4, from and to pages "
             "and states"},
};
static const char symbols[] = LAYER_SYMBOLS " B B+1 1 slots columns floats index_floats";
static const char *const leads[] = {
    "T",   "",  "raw_pages ring D|584", "pages page D|pages page*584", "pages page C_I|pages page*bytes",
    "C 3", NULL};

#define PARAMS(call) ((quern_dsv4_layer_step_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    quern_dsv4_layer_step_params *p = op_params(call);
    layer_resolve(p);
    const quern_status status = dsv4_check_core_format(p->format);
    if (status != QUERN_OK) return status;
    if (p->key_format == QUERN_DSV4_ROWS || p->kind == QUERN_DSV4_LAYER_CSA) return QUERN_OK;
    return error_argument("key_format is %s: a layer of kind %s has no indexer", dsv4_formats[p->key_format],
                          layer_kinds[p->kind]);
}

static void roles(op_call *call)
{
    const quern_dsv4_layer_kind kind = PARAMS(call)->kind;
    const bool csa = kind == QUERN_DSV4_LAYER_CSA, entries = kind != QUERN_DSV4_LAYER_SWA;
    const uint8_t of_entries = entries ? OP_UPDATED : OP_REFUSED, of_keys = csa ? OP_UPDATED : OP_REFUSED;
    uint8_t *r = call->role;
    layer_roles(call);
    r[DLS(slots)] = r[DLS(positions)] = r[DLS(cu)] = r[DLS(raw_table)] = OP_NEEDED;
    r[DLS(raw)] = OP_UPDATED;
    r[DLS(entries)] = r[DLS(states)] = r[DLS(merged)] = of_entries;
    r[DLS(entries_table)] = entries ? OP_NEEDED : OP_REFUSED;
    r[DLS(keys)] = r[DLS(indexer_states)] = r[DLS(indexer_merged)] = of_keys;
    r[DLS(copies)] = OP_OPTIONAL;
    r[DLS(fault)] = call->given[DLS(fault)] != NULL ? OP_UPDATED : OP_OPTIONAL;
}

/* That a tensor is there, of so many dimensions, in the dtype of its format. */
static quern_status check_stored(op_call *call, int32_t tensor, int32_t ndim, quern_dsv4_format format)
{
    const quern_status status = op_check_ndim(call, tensor, ndim);
    return status == QUERN_OK ? dsv4_check_stored(call, tensor, format) : status;
}

quern_status layer_derive_raw(op_call *call, int32_t tensor, quern_dsv4_format format, int64_t width)
{
    const quern_status status = check_stored(call, tensor, 3, format);
    if (status != QUERN_OK) return status;
    const int64_t *shape = call->given[tensor]->shape, *strides = call->given[tensor]->strides;
    int64_t page; /* strides may be any numbers yet */
    const bool overflows = __builtin_mul_overflow(shape[1], strides[1], &page);
    call->lead[LEAD_OF(LL_RAW)] = (op_extents){3, {shape[0], shape[1], dsv4_row_elements(format, width)}};
    if (shape[0] > 1 && (overflows || strides[0] != page))
        return error_argument("raw.strides[0] is %" PRId64 ": %" PRId64 " times strides[1], %" PRId64
                              ", pages without gaps, is accepted",
                              strides[0], shape[1], strides[1]);
    if (shape[0] > INT32_MAX || shape[1] < 1 || shape[1] > INT32_MAX)
        return error_argument("raw has %" PRId64 " pages of %" PRId64
                              " rows: up to %d of 1 to %d are accepted",
                              shape[0], shape[1], INT32_MAX, INT32_MAX);
    return QUERN_OK;
}

quern_status layer_derive_pool(op_call *call, int32_t tensor, quern_dsv4_format format, int64_t width,
                               op_extents *extents)
{
    const bool bytes = format != QUERN_DSV4_ROWS;
    const quern_status status = check_stored(call, tensor, bytes ? 2 : 3, format);
    if (status != QUERN_OK) return status;
    const int64_t *shape = call->given[tensor]->shape,
                  page = bytes ? shape[1] / dsv4_row_elements(format, width) : shape[1];
    layer_set_pool(extents, shape[0], page, format, width);
    if (shape[0] > INT32_MAX || page < 1 || page > PAGE_MOST)
        return error_argument("%s has %" PRId64 " pages of %" PRId64
                              " rows: up to %d of 1 to %d are accepted",
                              call->family->tensors[tensor].field, shape[0], page, INT32_MAX, PAGE_MOST);
    return QUERN_OK;
}

void layer_set_pool(op_extents *extents, int64_t pages, int64_t page, quern_dsv4_format format, int64_t width)
{
    const int64_t row = dsv4_row_elements(format, width);
    *extents = format != QUERN_DSV4_ROWS ? (op_extents){2, {pages, page * row}}
                                         : (op_extents){3, {pages, page, row}};
}

int64_t layer_page_of(const op_extents *extents, quern_dsv4_format format, int64_t width)
{
    return extents->count == 3 ? extents->extent[1] : extents->extent[1] / dsv4_row_elements(format, width);
}

/* The compressors' states: all have as many slots and rings as long. */
static void derive_states(op_call *call)
{
    const bool csa = PARAMS(call)->kind == QUERN_DSV4_LAYER_CSA;
    int64_t *s = call->symbol;
    const int64_t ring = dsv4_ring_of(csa, s[LS_D], s[LS_FLOATS]);
    s[LS_FLOATS] = pool_state_floats(csa, s[LS_D], ring);
    s[LS_INDEX_FLOATS] = pool_state_floats(true, s[LS_CI], ring);
}

static quern_status derive_pools(op_call *call)
{
    const quern_dsv4_layer_step_params *p = op_params(call);
    const bool csa = p->kind == QUERN_DSV4_LAYER_CSA;
    int64_t *s = call->symbol;
    op_extents *entries = &call->lead[LEAD_OF(LL_ENTRIES)];
    quern_status status = layer_derive_pool(call, DLS(entries), p->format, s[LS_D], entries);
    if (status != QUERN_OK) return status;
    derive_states(call);
    if (call->given[DLS(entries)]->dtype != call->given[DLS(raw)]->dtype)
        return error_argument("entries has dtype %s: %s, as raw, is accepted",
                              quern_dtype_name(call->given[DLS(entries)]->dtype),
                              quern_dtype_name(call->given[DLS(raw)]->dtype));
    if (!csa) return QUERN_OK;
    const quern_dsv4_compress_params of_keys = {.format = p->key_format};
    if ((status = dsv4_check_width(&of_keys, s[LS_CI], 0)) != QUERN_OK ||
        (status = check_stored(call, DLS(keys), p->key_format == QUERN_DSV4_ROWS ? 3 : 2, p->key_format)) !=
            QUERN_OK)
        return status;
    layer_set_pool(&call->lead[LEAD_OF(LL_KEYS)], entries->extent[0],
                   layer_page_of(entries, p->format, s[LS_D]), p->key_format, s[LS_CI]);
    return QUERN_OK;
}

int64_t layer_step_room(const op_call *call)
{
    const bool csa = PARAMS(call)->kind == QUERN_DSV4_LAYER_CSA;
    const int64_t *s = call->symbol, r = s[LS_R], ring = call->lead[LEAD_OF(LL_RAW)].extent[1],
                  held = r > 0 ? dsv4_ring_of(csa, s[LS_D], s[LS_FLOATS]) : 0;
    int64_t most = s[LS_P] < INT32_MAX ? s[LS_P] : INT32_MAX;
    /* A ring that is shorter than a window, and what can be taken back, keeps all rows. */
    if (ring < PARAMS(call)->window - 1 + held && ring < most) most = ring;
    if (r == 0) return most;
    const int64_t page = layer_page_of(&call->lead[LEAD_OF(LL_ENTRIES)], PARAMS(call)->format, s[LS_D]);
    int64_t entries = s[LS_COLUMNS] < INT32_MAX / page ? s[LS_COLUMNS] * page : INT32_MAX;
    if (op_uses(call, DLS(idx_score)) && s[LS_SCORES] < entries) entries = s[LS_SCORES];
    const int64_t tokens = entries * r + r - 1; /* of fewer than 2^31 entries of at most 2^16 tokens */
    return tokens < most ? tokens : most;
}

int64_t layer_step_entries(const op_call *call)
{
    const int64_t *s = call->symbol;
    return s[LS_R] > 0 ? s[LS_T] / s[LS_R] + s[LS_B] : 0;
}

static quern_status derive_step(op_call *call)
{
    int64_t *s = call->symbol;
    const quern_status status = op_uses(call, DLS(copies)) ? op_check_ndim(call, DLS(copies), 2) : QUERN_OK;
    if (status != QUERN_OK) return status;
    s[LS_1] = 1;
    s[LS_T] = call->like.shape[0];
    s[LS_B1] = s[LS_B] + 1;
    s[LS_S] = layer_step_entries(call);
    for (int32_t i = DLS(compressed); i <= DLS(idx_k); i++) /* a result may have room for fewer */
        if (op_uses(call, i) && call->given[i]->ndim == 2 && call->given[i]->shape[0] < s[LS_S])
            s[LS_S] = call->given[i]->shape[0];
    if (s[LS_T] > INT32_MAX || s[LS_B] > INT32_MAX)
        return error_argument("%" PRId64 " tokens of %" PRId64 " sequences: up to %d are accepted", s[LS_T],
                              s[LS_B], INT32_MAX);
    call->lead[LEAD_OF(LL_TOKENS)] = (op_extents){1, {s[LS_T]}};
    call->lead[LEAD_OF(LL_BATCH)] = (op_extents){0, {0}};
    call->lead[LEAD_OF(LL_COPIES)] =
        (op_extents){2, {op_uses(call, DLS(copies)) ? call->given[DLS(copies)]->shape[0] : 0, 3}};
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_dsv4_layer_step_params *p = op_params(call);
    const quern_dsv4_compress_params of_rows = {.format = p->format};
    int64_t *s = call->symbol;
    quern_status status = layer_derive(call);
    if (status == QUERN_OK) status = dsv4_check_width(&of_rows, s[LS_D], s[LS_ROPE]);
    if (status == QUERN_OK) status = derive_step(call);
    if (status == QUERN_OK) status = layer_derive_raw(call, DLS(raw), p->format, s[LS_D]);
    if (status == QUERN_OK && p->kind != QUERN_DSV4_LAYER_SWA) status = derive_pools(call);
    if (status != QUERN_OK) return status;
    const quern_tensor *scores = op_uses(call, DLS(idx_score)) ? call->given[DLS(idx_score)] : NULL;
    s[LS_SCORES] = INT32_MAX;
    if (scores != NULL && scores->ndim == 2) s[LS_SCORES] = scores->shape[1];
    else if (p->kind == QUERN_DSV4_LAYER_CSA) s[LS_SCORES] = layer_step_room(call) / s[LS_R];
    if (op_uses(call, DLS(fault)) && s[LS_T] > layer_step_room(call))
        return error_argument("x has %" PRId64 " tokens: with fault up to %" PRId64
                              ", the positions that there is room for, are accepted",
                              s[LS_T], layer_step_room(call));
    return QUERN_OK;
}

const op_family dsv4_layer_step_family = {
    OP_TABLES(operations, layer_param_rows, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_layer_step_tensors, QUERN_DSV4_LAYER_STEP_TENSORS_INIT),
    .defaults = &(const quern_dsv4_layer_step_params)QUERN_DSV4_LAYER_STEP_PARAMS_INIT,
    .params_init = "QUERN_DSV4_LAYER_STEP_PARAMS_INIT",
    .call_size = sizeof(layer_step_call),
    .params_at = offsetof(dsv4_layer_call, params),
    .program_at = offsetof(layer_step_call, program),
    .first = QUERN_OP_DSV4_LAYER_STEP,
    .leads = leads,
    .check_params = check_params,
    .roles = roles,
    .refuse = layer_refuse,
    .derive = derive,
    .check_data = layer_check_data,
    .build = layer_step_build,
};
