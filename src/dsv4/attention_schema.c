/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_schema.c - the attention core's tensors, parameters and the extents that follow from them. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

enum { PAGE_MOST = 65536 };

static const op_tensor tensors[] = {
    {"q", "Q", OP_ACTIVATION, OP_NONE, {AS_B, AS_T, AS_H, AS_D}, {AS_T, AS_H, AS_D}},
    {"kv", "KV", OP_STORED, OP_NONE, {AS_KV, AS_ROW}, {AS_T, AS_D}},
    {"kv_cmp", "KV_cmp", OP_STORED, OP_NONE, {AS_KV_CMP, AS_ROW}, {AS_S, AS_D}},
    {"idx", "idx", OP_I32, OP_NONE, {AS_B, AS_T, AS_K}, {AS_T, AS_K}},
    {"count", "count", OP_I32, OP_NONE, {AS_B, AS_T}, {AS_T}},
    {"sink", "sink", OP_F32, OP_NONE, {AS_H}, {0}},
    {"cos_sin", "cos_sin", OP_WEIGHT, OP_NONE, {AS_P, AS_ROPE}, {0}},
    {"cu_seqlens", "cu_seqlens", OP_I32, OP_NONE, {AS_B1}, {0}},
    {"o", "O", OP_ACTIVATION, OP_NONE, {AS_B, AS_T, AS_H, AS_D}, {AS_T, AS_H, AS_D}},
    {"lse", "lse", OP_F32, OP_NONE, {AS_B, AS_H, AS_T}, {AS_H, AS_T}},
    {"lse_win", "lse_win", OP_F32, OP_NONE, {AS_B, AS_H, AS_T}, {AS_H, AS_T}},
    {"d_o", "dO", OP_ACTIVATION, DA(o), {AS_B, AS_T, AS_H, AS_D}, {AS_T, AS_H, AS_D}},
    {"d_q", "dQ", OP_ACTIVATION, DA(q), {AS_B, AS_T, AS_H, AS_D}, {AS_T, AS_H, AS_D}},
    {"d_kv", "dKV", OP_ACTIVATION, DA(kv), {AS_B, AS_N, AS_D}, {AS_T, AS_D}},
    {"d_kv_cmp", "dKV_cmp", OP_ACTIVATION, DA(kv_cmp), {AS_B, AS_S, AS_D}, {AS_S, AS_D}},
    {"d_sink", "dsink", OP_F32, DA(sink), {AS_H}, {0}},
    {"start_positions", "start_positions", OP_I32, OP_NONE, {AS_B}, {0}},
    {"kv_table", "kv_table", OP_I32, OP_NONE, {AS_B, AS_KV_COLUMNS}, {0}},
    {"kv_cmp_table", "kv_cmp_table", OP_I32, OP_NONE, {AS_B, AS_CMP_COLUMNS}, {0}},
};

#define FIELD(member) OP_FIELD(quern_dsv4_attention_params, member)
static const op_param params[] = {
    {FIELD(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "r, tokens of an entry; 0: 4 with idx, else 128"},
    {FIELD(window), OP_INTEGER, 0, INT32_MAX, NULL, "raw keys of a query, its own among them; 0: 128"},
    {FIELD(start_abs_pos), OP_INTEGER, -1, INT32_MAX, NULL, "where query 0 stands; -1: N - T"},
    {FIELD(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, dsv4_formats, "of KV and KV_cmp: rows or row584"},
    {FIELD(page), OP_INTEGER, 0, PAGE_MOST, NULL, "slots of a page; 0: contiguous"},
};
static const char *const operations[] = {"dsv4_attention", "dsv4_attention_backward"};

static const char symbols[] = "B B+1 T N H D S k P R D|bytes columns columns";
static const int8_t window_alone[] = {DA(lse_win), OP_NONE};
static const op_entry ops[] = {
    {.name = "v4-attention",
     .help = "DeepSeek-V4's attention core over raw rows [B N D] and compressed entries [B S D]; with dO "
             "also its backward. Varlen: S is "
             "floor(T / r)",
     .forward = DSV4_ATTENTION,
     .backward = DSV4_ATTENTION_BACKWARD,
     .aside = "lse-win",
     .aside_valued = true,
     .aside_tensors = window_alone},
};

#define PARAMS(call) ((quern_dsv4_attention_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    quern_dsv4_attention_params *p = op_params(call);
    if (p->window == 0) p->window = DSV4_WINDOW;
    const quern_status status = dsv4_check_core_format(p->format);
    if (status != QUERN_OK) return status;
    if (call->operation == DSV4_ATTENTION_BACKWARD && (p->format != QUERN_DSV4_ROWS || p->page > 0))
        return error_argument("format is %s and page is %lld: the backward takes rows and 0",
                              dsv4_formats[p->format], (long long)p->page);
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const bool backward = call->operation == DSV4_ATTENTION_BACKWARD, pages = PARAMS(call)->page > 0,
               entries = call->given[DA(kv_cmp)] != NULL;
    const quern_tensor *const *t = call->given;
    uint8_t *r = call->role;
    r[DA(q)] = r[DA(kv)] = OP_NEEDED;
    r[DA(kv_cmp)] = r[DA(sink)] = r[DA(cos_sin)] = r[DA(cu_seqlens)] = OP_OPTIONAL;
    op_allow(call, DA(idx), entries, OP_OPTIONAL, ": it stands beside kv_cmp");
    op_allow(call, DA(count), t[DA(idx)] != NULL, OP_OPTIONAL, ": it stands beside idx");
    op_allow(call, DA(start_positions), !call->varlen, OP_OPTIONAL,
             ": it stands beside sequences of a fixed length, without cu_seqlens");
    op_allow(call, DA(kv_table), pages, OP_NEEDED, ": it stands beside a page of 1 slot or more");
    op_allow(call, DA(kv_cmp_table), pages && entries, OP_NEEDED,
             pages ? ": it stands beside kv_cmp" : ": it stands beside a page of 1 slot or more");
    r[DA(o)] = backward ? OP_NEEDED : OP_RESULT;
    r[DA(lse)] = backward ? OP_NEEDED : OP_OPTIONAL_RESULT;
    r[DA(lse_win)] = backward ? OP_UNUSED : OP_OPTIONAL_RESULT;
    r[DA(d_o)] = backward ? OP_NEEDED : OP_UNUSED;
    op_gradient_roles(call, DA(d_q), DA(d_sink), backward);
}

/* kv or kv_cmp: rows of the activations' dtype or bytes; contiguous, or a pool. Sets its leading extents. */
static quern_status derive_rows(op_call *call, int32_t tensor, int32_t lead)
{
    const quern_dsv4_attention_params *p = op_params(call);
    const quern_tensor *t = call->given[tensor];
    const bool bytes = p->format != QUERN_DSV4_ROWS;
    const int32_t ndim = call->varlen || (bytes && p->page > 0) ? 2 : 3;
    if (t->ndim != ndim)
        return error_argument("%s has %d dimensions: %d are accepted", tensors[tensor].field, t->ndim, ndim);
    const quern_dtype wanted = bytes                  ? QUERN_U8
                               : tensor == DA(kv_cmp) ? call->given[DA(kv)]->dtype
                               : call->operation == DSV4_ATTENTION && t->dtype != QUERN_U8 ? t->dtype
                                                                                           : call->like.dtype;
    if (t->dtype != wanted)
        return error_argument("%s: dtype %s: %s is accepted", tensors[tensor].field,
                              quern_dtype_name(t->dtype), quern_dtype_name(wanted));
    if (p->page > 0 && t->shape[0] > INT32_MAX)
        return error_argument("%s has %lld pages: at most %d are accepted", tensors[tensor].field,
                              (long long)t->shape[0], INT32_MAX);
    op_extents *x = &call->lead[lead];
    x->count = ndim - 1;
    x->extent[0] = p->page > 0 ? t->shape[0] : call->symbol[AS_B];
    x->extent[1] = p->page > 0 ? p->page : ndim == 3 ? t->shape[1] : 0;
    return QUERN_OK;
}

/* The extents of optional tensors. */
static quern_status derive_optional(op_call *call, bool varlen)
{
    const quern_tensor *const *t = call->given;
    const quern_dsv4_attention_params *p = op_params(call);
    int64_t *s = call->symbol;
    if (s[AS_KV_COLUMNS] > INT32_MAX || s[AS_CMP_COLUMNS] > INT32_MAX)
        return error_argument("page tables have %lld and %lld columns: at most %d each are accepted",
                              (long long)s[AS_KV_COLUMNS], (long long)s[AS_CMP_COLUMNS], INT32_MAX);
    s[AS_S] = t[DA(kv_cmp)] == NULL ? 0
              : varlen              ? s[AS_T] / p->ratio
              : p->page > 0         ? s[AS_CMP_COLUMNS] * p->page
                                    : t[DA(kv_cmp)]->shape[1];
    if (s[AS_ROPE] % 2 != 0 || s[AS_ROPE] > s[AS_D])
        return error_argument("cos_sin has %lld columns: an even number up to the %lld channels is accepted",
                              (long long)s[AS_ROPE], (long long)s[AS_D]);
    if ((s[AS_S] > INT32_MAX && p->page == 0) || s[AS_K] > INT32_MAX)
        return error_argument("%lld entries and lists of %lld: at most %d are accepted", (long long)s[AS_S],
                              (long long)s[AS_K], INT32_MAX);
    return QUERN_OK;
}

/* Checks that `start`, the position of a sequence's query 0, is in range, and so are raw row 0 and the last
 * query. */
static quern_status check_start(const op_call *call, int64_t start, int64_t queries, int64_t raw)
{
    const bool pages = PARAMS(call)->page > 0;
    const int64_t *s = call->symbol;
    if (start < 0 || (!pages && start + queries - raw < 0))
        return error_argument("query 0 stands at position %lld and raw row 0 at %lld: 0 or more is accepted",
                              (long long)start, pages ? 0 : (long long)(start + queries - raw));
    if (s[AS_ROPE] > 0 && queries > 0 && start + queries > s[AS_P])
        return error_argument("the last query stands at position %lld: cos_sin has positions 0 to %lld",
                              (long long)(start + queries - 1), (long long)s[AS_P] - 1);
    return QUERN_OK;
}

/* Checks the queries' positions; resolves start_abs_pos. */
static quern_status derive_positions(op_call *call, bool varlen)
{
    quern_dsv4_attention_params *p = op_params(call);
    const int64_t *s = call->symbol;
    if (varlen && p->start_abs_pos > 0)
        return error_argument("start_abs_pos is %lld with cu_seqlens: 0 or -1 is accepted",
                              (long long)p->start_abs_pos);
    if (op_uses(call, DA(start_positions))) return QUERN_OK;
    if (p->page > 0 && p->start_abs_pos < 0)
        return error_argument("start_abs_pos is -1 with pages: a position, or start_positions, is accepted");
    p->start_abs_pos = varlen ? 0 : p->start_abs_pos >= 0 ? p->start_abs_pos : s[AS_N] - s[AS_T];
    return varlen ? QUERN_OK : check_start(call, p->start_abs_pos, s[AS_T], s[AS_N]);
}

static quern_status derive(op_call *call)
{
    const bool varlen = call->varlen;
    const int32_t at = varlen ? 0 : 1;
    const quern_tensor *const *t = call->given;
    quern_dsv4_attention_params *p = op_params(call);
    int64_t *s = call->symbol;
    quern_status status = view_check_head_dim("q", s[AS_D]);
    if (status == QUERN_OK) status = view_check_order(t[DA(q)], t[DA(o)]);
    if (status == QUERN_OK) status = op_find_batch(call, DA(cu_seqlens), t[DA(q)], &s[AS_B]);
    if (status != QUERN_OK) return status;
    if (p->ratio == 0) p->ratio = t[DA(idx)] != NULL ? DSV4_CSA_RATIO : DSV4_HCA_RATIO;
    s[AS_B1] = s[AS_B] + 1;
    if (varlen && (p->format != QUERN_DSV4_ROWS || p->page > 0))
        return error_argument("format is %s and page is %lld with cu_seqlens: rows and 0 are accepted",
                              dsv4_formats[p->format], (long long)p->page);
    const row_format *f = row_format_of(dsv4_entry_format(p->format));
    if (f->width > 0 && s[AS_D] != f->width)
        return error_argument("q has %lld channels: format %s takes %d", (long long)s[AS_D], f->name,
                              f->width);
    s[AS_ROW] = dsv4_page_elements(p->format, s[AS_D], p->page);
    if ((status = derive_rows(call, DA(kv), 0)) != QUERN_OK) return status;
    if (t[DA(kv_cmp)] != NULL && (status = derive_rows(call, DA(kv_cmp), 1)) != QUERN_OK) return status;
    s[AS_N] = p->page > 0 ? 0 : t[DA(kv)]->shape[at];
    if (s[AS_H] < 1 || s[AS_H] > DSV4_HEADS_MOST)
        return error_argument("q has %lld heads: 1 to %d are accepted", (long long)s[AS_H], DSV4_HEADS_MOST);
    if (s[AS_T] > INT32_MAX || s[AS_N] > INT32_MAX)
        return error_argument("%lld queries and %lld raw rows: at most %d each are accepted",
                              (long long)s[AS_T], (long long)s[AS_N], INT32_MAX);
    status = derive_optional(call, varlen);
    return status == QUERN_OK ? derive_positions(call, varlen) : status;
}

static quern_status check_sequence(const op_call *call, void *const *data, int64_t b)
{
    const quern_dsv4_attention_params *p = op_params(call);
    const int64_t *s = call->symbol, queries = s[AS_T];
    const int32_t *starts = data[DA(start_positions)];
    const int64_t start = call->alignment[DA(start_positions)] > 0 ? starts[b] : p->start_abs_pos;
    quern_status status = check_start(call, start, queries, s[AS_N]);
    if (status != QUERN_OK || p->page == 0 || queries == 0) return status;
    const int64_t oldest = start >= p->window ? start - p->window + 1 : 0;
    const int64_t entries = call->role[DA(kv_cmp_table)] == OP_NEEDED ? (start + queries) / p->ratio : 0;
    const attend_mqa_args *a = OP_FIND(call, attend_mqa_forward); /* a backward has no pages */
    status = dsv4_check_pages(&tensors[DA(kv_table)], &a->kv_table, data[DA(kv_table)], b, oldest / p->page,
                              (start + queries + p->page - 1) / p->page, call->lead[0].extent[0]);
    if (status == QUERN_OK && entries > 0)
        status = dsv4_check_pages(&tensors[DA(kv_cmp_table)], &a->entries_table, data[DA(kv_cmp_table)], b, 0,
                                  (entries + p->page - 1) / p->page, call->lead[1].extent[0]);
    return status;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const int64_t *s = call->symbol;
    quern_status status = QUERN_OK;
    if (!call->varlen) {
        const int64_t sequences = dsv4_attention_sequences(call);
        for (int64_t b = 0; b < sequences && status == QUERN_OK; b++) status = check_sequence(call, data, b);
        return status;
    }
    const int32_t *cu = data[DA(cu_seqlens)];
    status = view_check_offsets(cu, s[AS_B], "cu_seqlens", s[AS_T]);
    for (int64_t b = 0; b < s[AS_B] && status == QUERN_OK && s[AS_ROPE] > 0; b++)
        if (cu[b + 1] - cu[b] > s[AS_P])
            status = error_argument("sequence %lld has %d tokens: cos_sin has positions 0 to %lld",
                                    (long long)b, cu[b + 1] - cu[b], (long long)s[AS_P] - 1);
    return status;
}

const op_family dsv4_attention_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_attention_tensors, QUERN_DSV4_ATTENTION_TENSORS_INIT),
    OP_CALL(quern_dsv4_attention_params, QUERN_DSV4_ATTENTION_PARAMS_INIT, OP_STEP_BYTES(attend_mqa)),
    .first = QUERN_OP_DSV4_ATTENTION,
    .varlen_by = DA(cu_seqlens),
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = dsv4_attention_build,
};
