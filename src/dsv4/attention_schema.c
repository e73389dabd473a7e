/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_schema.c - the attention core's tensors, parameters and the extents that follow from them. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

#include <stddef.h>

enum { PAGE_MOST = 65536, ROW584_DIM = 512 };

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
    {"d_o", "dO", OP_ACTIVATION, DA_O, {AS_B, AS_T, AS_H, AS_D}, {AS_T, AS_H, AS_D}},
    {"d_q", "dQ", OP_ACTIVATION, DA_Q, {AS_B, AS_T, AS_H, AS_D}, {AS_T, AS_H, AS_D}},
    {"d_kv", "dKV", OP_ACTIVATION, DA_KV, {AS_B, AS_N, AS_D}, {AS_T, AS_D}},
    {"d_kv_cmp", "dKV_cmp", OP_ACTIVATION, DA_KV_CMP, {AS_B, AS_S, AS_D}, {AS_S, AS_D}},
    {"d_sink", "dsink", OP_F32, DA_SINK, {AS_H}, {0}},
    {"start_positions", "start_positions", OP_I32, OP_NONE, {AS_B}, {0}},
    {"kv_table", "kv_table", OP_I32, OP_NONE, {AS_B, AS_KV_COLUMNS}, {0}},
    {"kv_cmp_table", "kv_cmp_table", OP_I32, OP_NONE, {AS_B, AS_CMP_COLUMNS}, {0}},
};
_Static_assert(sizeof tensors / sizeof *tensors == DSV4_ATTENTION_TENSORS, "a row a tensor");
_Static_assert(sizeof(quern_dsv4_attention_tensors) == (1 + DSV4_ATTENTION_TENSORS) * sizeof(void *),
               "a tensor a field");

static const char *const formats[] = {"rows", "fp8", "fp8-power", "fp4", "row584", NULL};
#define AT(member) offsetof(quern_dsv4_attention_params, member)
static const op_param params[] = {
    {"ratio", AT(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL,
     "r, tokens of an entry; 0: 4 with idx, else 128"},
    {"window", AT(window), OP_INTEGER, 0, INT32_MAX, NULL, "raw keys of a query, its own among them; 0: 128"},
    {"start_abs_pos", AT(start_abs_pos), OP_INTEGER, -1, INT32_MAX, NULL, "where query 0 stands; -1: N - T"},
    {"format", AT(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, formats, "of KV and KV_cmp: rows or row584"},
    {"page", AT(page), OP_INTEGER, 0, PAGE_MOST, NULL, "slots of a page; 0: contiguous"},
};
#undef AT
static const quern_dsv4_attention_params defaults = QUERN_DSV4_ATTENTION_PARAMS_INIT;
static const char *const operations[] = {"dsv4_attention", "dsv4_attention_backward"};

static const char *const symbols[] = {"",
                                      [AS_B] = "B",
                                      [AS_B1] = "B+1",
                                      [AS_T] = "T",
                                      [AS_N] = "N",
                                      [AS_H] = "H",
                                      [AS_D] = "D",
                                      [AS_S] = "S",
                                      [AS_K] = "k",
                                      [AS_P] = "P",
                                      [AS_ROPE] = "R",
                                      [AS_ROW] = "D|bytes",
                                      [AS_KV_COLUMNS] = "columns",
                                      [AS_CMP_COLUMNS] = "columns",
                                      NULL};
static const int8_t window_alone[] = {DA_LSE_WIN, OP_NONE};
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

static quern_status check_params(op_call *call)
{
    quern_dsv4_attention_params *p = &((dsv4_attention_call *)call)->params;
    if (p->window == 0) p->window = DSV4_WINDOW;
    if (p->format != QUERN_DSV4_ROWS && p->format != QUERN_DSV4_ROW584)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "format is %s: rows and row584 are accepted",
                         formats[p->format]);
    if (call->operation == DSV4_ATTENTION_BACKWARD && (p->format != QUERN_DSV4_ROWS || p->page > 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "format is %s and page is %lld: the backward takes rows and 0", formats[p->format],
                         (long long)p->page);
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const bool backward = call->operation == DSV4_ATTENTION_BACKWARD;
    const quern_tensor *const *t = call->given;
    uint8_t *r = call->role;
    r[DA_Q] = r[DA_KV] = OP_NEEDED;
    r[DA_KV_CMP] = r[DA_SINK] = r[DA_COS_SIN] = r[DA_CU_SEQLENS] = OP_OPTIONAL;
    r[DA_IDX] = t[DA_KV_CMP] != NULL ? OP_OPTIONAL : OP_REFUSED;
    const bool pages = ((const dsv4_attention_call *)call)->params.page > 0;
    r[DA_START_POSITIONS] = call->varlen ? OP_REFUSED : OP_OPTIONAL;
    r[DA_KV_TABLE] = pages ? OP_NEEDED : OP_REFUSED;
    r[DA_KV_CMP_TABLE] = !pages ? OP_REFUSED : t[DA_KV_CMP] != NULL ? OP_NEEDED : OP_REFUSED;
    r[DA_COUNT] = t[DA_IDX] != NULL ? OP_OPTIONAL : OP_REFUSED;
    r[DA_O] = backward ? OP_NEEDED : OP_RESULT;
    r[DA_LSE] = backward ? OP_NEEDED : OP_OPTIONAL_RESULT;
    r[DA_LSE_WIN] = backward ? OP_UNUSED : OP_OPTIONAL_RESULT;
    r[DA_D_O] = backward ? OP_NEEDED : OP_UNUSED;
    for (int i = DA_D_Q; i <= DA_D_SINK; i++)
        r[i] = !backward                           ? OP_UNUSED
               : t[tensors[i].gradient_of] != NULL ? OP_OPTIONAL_RESULT
                                                   : OP_SOURCE_MISSING;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    const bool pages = ((const dsv4_attention_call *)call)->params.page > 0;
    const char *beside = tensor == DA_COUNT             ? "idx"
                         : tensor == DA_START_POSITIONS ? "sequences of a fixed length, without cu_seqlens"
                         : tensor == DA_IDX || pages    ? "kv_cmp"
                                                        : "a page of 1 slot or more";
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: it stands beside %s", tensors[tensor].field,
                     beside);
}

/* kv or kv_cmp: rows of the activations' dtype or bytes; contiguous, or a pool. Sets its leading extents. */
static quern_status derive_rows(op_call *call, int32_t tensor, int32_t lead)
{
    const quern_dsv4_attention_params *p = &((const dsv4_attention_call *)call)->params;
    const quern_tensor *t = call->given[tensor];
    const bool bytes = p->format != QUERN_DSV4_ROWS;
    const int32_t ndim = call->varlen || (bytes && p->page > 0) ? 2 : 3;
    if (t->ndim != ndim)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %d dimensions: %d are accepted",
                         tensors[tensor].field, t->ndim, ndim);
    const quern_dtype wanted = bytes                 ? QUERN_U8
                               : tensor == DA_KV_CMP ? call->given[DA_KV]->dtype
                               : call->operation == DSV4_ATTENTION && t->dtype != QUERN_U8 ? t->dtype
                                                                                           : call->like.dtype;
    if (t->dtype != wanted)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s: dtype %s: %s is accepted", tensors[tensor].field,
                         quern_dtype_name(t->dtype), quern_dtype_name(wanted));
    if (p->page > 0 && t->shape[0] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %lld pages: at most %d are accepted",
                         tensors[tensor].field, (long long)t->shape[0], INT32_MAX);
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
    const quern_dsv4_attention_params *p = &((const dsv4_attention_call *)call)->params;
    int64_t *s = call->symbol;
    const struct {
        int32_t tensor, ndim;
    } free_extents[] = {{DA_IDX, varlen ? 2 : 3}, {DA_COS_SIN, 2}, {DA_KV_TABLE, 2}, {DA_KV_CMP_TABLE, 2}};
    for (int i = 0; i < 4; i++) {
        const int32_t x = free_extents[i].tensor;
        if (op_uses(call, x) && t[x]->ndim != free_extents[i].ndim)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %d dimensions: %d are accepted",
                             tensors[x].field, t[x]->ndim, free_extents[i].ndim);
    }
    s[AS_KV_COLUMNS] = op_uses(call, DA_KV_TABLE) ? t[DA_KV_TABLE]->shape[1] : 0;
    s[AS_CMP_COLUMNS] = op_uses(call, DA_KV_CMP_TABLE) ? t[DA_KV_CMP_TABLE]->shape[1] : 0;
    if (s[AS_KV_COLUMNS] > INT32_MAX || s[AS_CMP_COLUMNS] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "page tables have %lld and %lld columns: at most %d each are accepted",
                         (long long)s[AS_KV_COLUMNS], (long long)s[AS_CMP_COLUMNS], INT32_MAX);
    s[AS_S] = t[DA_KV_CMP] == NULL ? 0
              : varlen             ? s[AS_T] / p->ratio
              : p->page > 0        ? s[AS_CMP_COLUMNS] * p->page
                                   : t[DA_KV_CMP]->shape[1];
    s[AS_K] = t[DA_IDX] != NULL ? t[DA_IDX]->shape[varlen ? 1 : 2] : 0;
    s[AS_P] = t[DA_COS_SIN] != NULL ? t[DA_COS_SIN]->shape[0] : 0;
    s[AS_ROPE] = t[DA_COS_SIN] != NULL ? t[DA_COS_SIN]->shape[1] : 0;
    if (s[AS_ROPE] % 2 != 0 || s[AS_ROPE] > s[AS_D])
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "cos_sin has %lld columns: an even number up to the %lld channels is accepted",
                         (long long)s[AS_ROPE], (long long)s[AS_D]);
    if ((s[AS_S] > INT32_MAX && p->page == 0) || s[AS_K] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld entries and lists of %lld: at most %d are accepted", (long long)s[AS_S],
                         (long long)s[AS_K], INT32_MAX);
    return QUERN_OK;
}

/* Checks that `start`, the position of a sequence's query 0, is in range, and so are raw row 0 and the last
 * query. */
static quern_status check_start(const op_call *call, int64_t start, int64_t queries, int64_t raw)
{
    const bool pages = ((const dsv4_attention_call *)call)->params.page > 0;
    const int64_t *s = call->symbol;
    if (start < 0 || (!pages && start + queries - raw < 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "query 0 stands at position %lld and raw row 0 at %lld: 0 or more is accepted",
                         (long long)start, pages ? 0 : (long long)(start + queries - raw));
    if (s[AS_ROPE] > 0 && queries > 0 && start + queries > s[AS_P])
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "the last query stands at position %lld: cos_sin has positions 0 to %lld",
                         (long long)(start + queries - 1), (long long)s[AS_P] - 1);
    return QUERN_OK;
}

/* Checks the queries' positions; resolves start_abs_pos. */
static quern_status derive_positions(op_call *call, bool varlen)
{
    quern_dsv4_attention_params *p = &((dsv4_attention_call *)call)->params;
    const int64_t *s = call->symbol;
    if (varlen && p->start_abs_pos > 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "start_abs_pos is %lld with cu_seqlens: 0 or -1 is accepted",
                         (long long)p->start_abs_pos);
    if (op_uses(call, DA_START_POSITIONS)) return QUERN_OK;
    if (p->page > 0 && p->start_abs_pos < 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "start_abs_pos is -1 with pages: a position, or start_positions, is accepted");
    p->start_abs_pos = varlen ? 0 : p->start_abs_pos >= 0 ? p->start_abs_pos : s[AS_N] - s[AS_T];
    return varlen ? QUERN_OK : check_start(call, p->start_abs_pos, s[AS_T], s[AS_N]);
}

static quern_status derive(op_call *call)
{
    const bool varlen = call->varlen;
    const int32_t at = varlen ? 0 : 1;
    const quern_tensor *const *t = call->given;
    quern_dsv4_attention_params *p = &((dsv4_attention_call *)call)->params;
    int64_t *s = call->symbol;
    if (t[DA_Q] == NULL || t[DA_KV] == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed",
                         t[DA_Q] == NULL ? "q" : "kv");
    call->like = *t[DA_Q];
    quern_status status = op_check_activation(call, DA_Q, at + 3);
    if (status == QUERN_OK) status = view_check_head_dim("q", t[DA_Q]->shape[at + 2]);
    if (status == QUERN_OK) status = view_check_order(t[DA_Q], t[DA_O]);
    if (status == QUERN_OK) status = op_find_batch(call, DA_CU_SEQLENS, t[DA_Q], &s[AS_B]);
    if (status != QUERN_OK) return status;
    if (p->ratio == 0) p->ratio = t[DA_IDX] != NULL ? DSV4_CSA_RATIO : DSV4_HCA_RATIO;
    s[AS_B1] = s[AS_B] + 1;
    s[AS_T] = t[DA_Q]->shape[at];
    s[AS_H] = t[DA_Q]->shape[at + 1];
    s[AS_D] = t[DA_Q]->shape[at + 2];
    if (varlen && (p->format != QUERN_DSV4_ROWS || p->page > 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "format is %s and page is %lld with cu_seqlens: rows and 0 are accepted",
                         formats[p->format], (long long)p->page);
    if (p->format == QUERN_DSV4_ROW584 && s[AS_D] != ROW584_DIM)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "q has %lld channels: format row584 takes %d",
                         (long long)s[AS_D], ROW584_DIM);
    const int64_t bytes = dsv4_row_bytes(p->format, s[AS_D]);
    s[AS_ROW] = bytes == 0 ? s[AS_D] : bytes * (p->page > 0 ? p->page : 1);
    if ((status = derive_rows(call, DA_KV, 0)) != QUERN_OK) return status;
    if (t[DA_KV_CMP] != NULL && (status = derive_rows(call, DA_KV_CMP, 1)) != QUERN_OK) return status;
    s[AS_N] = p->page > 0 ? 0 : t[DA_KV]->shape[at];
    if (s[AS_H] < 1 || s[AS_H] > DSV4_HEADS_MOST)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "q has %lld heads: 1 to %d are accepted",
                         (long long)s[AS_H], DSV4_HEADS_MOST);
    if (s[AS_T] > INT32_MAX || s[AS_N] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld queries and %lld raw rows: at most %d each are accepted", (long long)s[AS_T],
                         (long long)s[AS_N], INT32_MAX);
    status = derive_optional(call, varlen);
    return status == QUERN_OK ? derive_positions(call, varlen) : status;
}

/* Checks that columns [first, end) of a sequence's row of a table name pages of the pool. */
static quern_status check_columns(const op_call *call, void *const *data, int32_t tensor, int64_t b,
                                  int64_t first, int64_t end)
{
    const int64_t columns = call->symbol[tensor == DA_KV_TABLE ? AS_KV_COLUMNS : AS_CMP_COLUMNS];
    const int64_t pages = call->lead[tensor == DA_KV_TABLE ? 0 : 1].extent[0];
    if (end > columns)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %lld columns: sequence %lld needs %lld",
                         tensors[tensor].field, (long long)columns, (long long)b, (long long)end);
    const attend_mqa_args *a = &((const dsv4_attention_call *)call)->attend;
    const int32_t *row = (const int32_t *)data[tensor] +
                         b * (tensor == DA_KV_TABLE ? a->kv_table : a->entries_table).strides[0];
    for (int64_t c = first; c < end; c++)
        if (row[c] < 0 || row[c] >= pages)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s[%lld, %lld] is %d: pages 0 to %lld are accepted",
                             tensors[tensor].field, (long long)b, (long long)c, row[c], (long long)pages - 1);
    return QUERN_OK;
}

static quern_status check_sequence(const op_call *call, void *const *data, int64_t b)
{
    const quern_dsv4_attention_params *p = &((const dsv4_attention_call *)call)->params;
    const int64_t *s = call->symbol, queries = s[AS_T];
    const int32_t *starts = data[DA_START_POSITIONS];
    const int64_t start = call->alignment[DA_START_POSITIONS] > 0 ? starts[b] : p->start_abs_pos;
    quern_status status = check_start(call, start, queries, s[AS_N]);
    if (status != QUERN_OK || p->page == 0 || queries == 0) return status;
    const int64_t oldest = start >= p->window ? start - p->window + 1 : 0;
    const int64_t entries = call->role[DA_KV_CMP_TABLE] == OP_NEEDED ? (start + queries) / p->ratio : 0;
    status = check_columns(call, data, DA_KV_TABLE, b, oldest / p->page,
                           (start + queries + p->page - 1) / p->page);
    if (status == QUERN_OK && entries > 0)
        status = check_columns(call, data, DA_KV_CMP_TABLE, b, 0, (entries + p->page - 1) / p->page);
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
    const int32_t *cu = data[DA_CU_SEQLENS];
    status = view_check_offsets(cu, s[AS_B], "cu_seqlens", s[AS_T]);
    for (int64_t b = 0; b < s[AS_B] && status == QUERN_OK && s[AS_ROPE] > 0; b++)
        if (cu[b + 1] - cu[b] > s[AS_P])
            status = error_set(QUERN_ERR_INVALID_ARGUMENT,
                               "sequence %lld has %d tokens: cos_sin has positions 0 to %lld", (long long)b,
                               cu[b + 1] - cu[b], (long long)s[AS_P] - 1);
    return status;
}

const op_family dsv4_attention_family = {
    .operations = operations,
    .operation_count = DSV4_ATTENTION_OPS,
    .first = QUERN_OP_DSV4_ATTENTION,
    .tensors = tensors,
    .tensor_count = DSV4_ATTENTION_TENSORS,
    .varlen_by = DA_CU_SEQLENS,
    .params = params,
    .param_count = sizeof params / sizeof *params,
    .defaults = &defaults,
    .params_init = "QUERN_DSV4_ATTENTION_PARAMS_INIT",
    .tensors_init = "QUERN_DSV4_ATTENTION_TENSORS_INIT",
    .symbols = symbols,
    .group = "v4-attention",
    .entries = ops,
    .entry_count = sizeof ops / sizeof *ops,
    .call_size = sizeof(dsv4_attention_call),
    .params_at = offsetof(dsv4_attention_call, params),
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .plan = dsv4_attention_plan,
    .run = dsv4_attention_run,
};
