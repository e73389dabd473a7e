/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.c - the block indexer: its schema, its public functions, and its program of one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nsa/index.h"

#include <stddef.h>

#define I(field) OP_TENSOR(quern_nsa_index_tensors, field)

static const op_tensor tensors[] = {
    {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HS, S_DI}, {S_T, S_HS, S_DI}},
    {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + LEAD_KEYS}, {OP_LEAD + LEAD_KEY_ROWS}},
    {"cu_seqlens_q", "cu_seqlens_q", OP_I32, OP_NONE, {S_B1}, {0}},
    {"cu_seqlens_kv", "cu_seqlens_kv", OP_I32, OP_NONE, {S_B1}, {0}},
    {"block_idx", "block_idx", OP_I32, OP_NONE, {S_B, S_HS, S_N, S_K}, {S_HS, S_ROWS, S_K}},
    {"block_count", "block_count", OP_I32, OP_NONE, {S_B, S_HS, S_N}, {S_HS, S_ROWS}},
    {"block_score", "block_score", OP_F32, OP_NONE, {S_B, S_HS, S_N, S_BLOCKS}, {0}},
};
_Static_assert(I(q_index) == 0 && I(k_index) == 1 && I(cu_seqlens_kv) == I(cu_seqlens_q) + 1,
               "as index.h says");

#define FIELD(member) OP_FIELD(quern_nsa_index_params, member)
static const op_param params[] = {
    {FIELD(select_block), OP_INTEGER, 1, INT32_MAX, NULL, "l', tokens of a block"},
    {FIELD(num_selected), OP_INTEGER, 1, INT32_MAX, NULL,
     "k, selected blocks of a query, forced ones included"},
    {FIELD(forced_first), OP_INTEGER, 0, INT32_MAX, NULL, "first blocks, always selected"},
    {FIELD(forced_local), OP_INTEGER, 0, INT32_MAX, NULL,
     "newest blocks, the query's own last, always selected"},
    {FIELD(query_offset), OP_INTEGER, -1, INT32_MAX, NULL, "position of query 0; -1: S - N"},
};
static const char *const operations[] = {"nsa_index"};

const char *const nsa_index_leads[] = {"B S D_I|B S Hs D_I...", "Tkv D_I|Tkv Hs D_I...", NULL};
static const int8_t scores_alone[] = {I(block_score), OP_NONE};
static const op_entry ops[] = {
    {.name = "nsa-index",
     .help = "MiniMax's block indexer: the blocks of every query by the maximum of q_I . k_I over their "
             "tokens",
     .aside = "save-scores",
     .aside_valued = true,
     .aside_tensors = scores_alone},
};

static quern_status check_params(op_call *call)
{
    const quern_nsa_index_params *p = op_params(call);
    const int64_t forced = p->forced_first + p->forced_local;
    if (p->num_selected >= forced) return QUERN_OK;
    return error_argument(
        "num_selected is %lld: at least the %lld forced blocks (first %lld, local %lld) are accepted",
        (long long)p->num_selected, (long long)forced, (long long)p->forced_first,
        (long long)p->forced_local);
}

static void roles(op_call *call)
{
    uint8_t *r = call->role;
    r[I(q_index)] = r[I(k_index)] = OP_NEEDED;
    r[I(cu_seqlens_q)] = OP_OPTIONAL;
    op_allow(call, I(cu_seqlens_kv), call->varlen, OP_OPTIONAL,
             " without cu_seqlens_q: both or cu_seqlens_q alone are accepted");
    r[I(block_idx)] = OP_RESULT;
    r[I(block_count)] = OP_OPTIONAL_RESULT;
    op_allow(call, I(block_score), !call->varlen, OP_OPTIONAL_RESULT,
             " with cu_seqlens_q: scores of fixed lengths are accepted");
}

quern_status nsa_index_derive(op_call *call)
{
    const int32_t ndim = call->varlen ? 3 : 4, at = call->varlen ? 0 : 1;
    const quern_tensor *q = call->given[I(q_index)], *k = call->given[I(k_index)];
    const bool shared = k->ndim == ndim - 1;
    quern_status status = op_check_ndim(call, I(k_index), shared ? ndim - 1 : ndim);
    if (status == QUERN_OK) status = view_check_head_dim("q_index", q->shape[at + 2]);
    int64_t *s = call->symbol;
    if (status == QUERN_OK) status = op_find_batch(call, call->family->varlen_by, q, &s[S_B]);
    if (status != QUERN_OK) return status;
    if (q->shape[at] > INT32_MAX || k->shape[at] > INT32_MAX)
        return error_argument("%lld query and %lld key tokens: at most %d each are accepted",
                              (long long)q->shape[at], (long long)k->shape[at], INT32_MAX);
    s[S_B1] = s[S_B] + 1;
    s[S_N] = s[S_T] = q->shape[at];
    s[S_S] = s[S_TKV] = k->shape[at];
    s[S_ROWS] = s[S_T] + s[S_B];
    op_extents *keys = &call->lead[LEAD_KEYS], *rows = &call->lead[LEAD_KEY_ROWS];
    *keys = shared ? (op_extents){3, {s[S_B], s[S_S], s[S_DI]}}
                   : (op_extents){4, {s[S_B], s[S_S], s[S_HS], s[S_DI]}};
    *rows = shared ? (op_extents){2, {s[S_TKV], s[S_DI]}} : (op_extents){3, {s[S_TKV], s[S_HS], s[S_DI]}};
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_nsa_index_params *p = op_params(call);
    int64_t *s = call->symbol;
    quern_status status = nsa_index_derive(call);
    if (status == QUERN_OK) status = view_check_heads(s[S_HS], 1, s[S_N]);
    if (status != QUERN_OK) return status;
    s[S_BLOCKS] = mask_blocks(s[S_S], p->select_block);
    s[S_K] = p->num_selected;
    return QUERN_OK;
}

quern_status nsa_index_check_data(const op_call *call, void *const *data)
{
    if (!call->varlen) return QUERN_OK;
    const int64_t *s = call->symbol;
    const int32_t cu = call->family->varlen_by, cu_kv = cu + 1;
    const bool own = call->alignment[cu_kv] > 0;
    const quern_status status = view_check_offsets(data[cu], s[S_B], "cu_seqlens_q", s[S_T]);
    if (status != QUERN_OK || (!own && s[S_TKV] >= s[S_T])) return status;
    return view_check_offsets(data[own ? cu_kv : cu], s[S_B], own ? "cu_seqlens_kv" : "cu_seqlens_q",
                              s[S_TKV]);
}

stage_seqs nsa_index_seqs(const op_call *call)
{
    const int64_t *s = call->symbol;
    const int32_t cu = call->family->varlen_by;
    const bool any = call->varlen || s[S_N] > 0; /* no loop goes over sequences without tokens */
    return (stage_seqs){any ? s[S_B] : 0, s[S_N], s[S_S], op_view(call, cu, false),
                        op_view(call, cu + 1, false)};
}

quern_tensor nsa_key_heads(quern_tensor keys)
{
    if (keys.ndim != 3) return keys;
    keys.ndim = 4;
    keys.shape[3] = keys.shape[2];
    keys.strides[3] = 1;
    keys.shape[2] = 1;
    keys.strides[2] = keys.shape[3];
    return keys;
}

static void build(op_build *b)
{
    const op_call *h = b->call;
    const quern_nsa_index_params *p = op_params(h);
    const stage_seqs seqs = nsa_index_seqs(h);
    validate_lists_args *lists = OP_ADD(b, validate_lists);
    lists->seqs = seqs;
    op_when_asked(b);
    *OP_ADD(b, block_index) =
        (block_index_args){.seqs = seqs,
                           .rule = {p->select_block, p->num_selected, p->forced_first, p->forced_local},
                           .query_offset = p->query_offset,
                           .q = op_view(h, I(q_index), true),
                           .keys = nsa_key_heads(op_view(h, I(k_index), true)),
                           .blocks = op_view(h, I(block_idx), true),
                           .count = op_view(h, I(block_count), true),
                           .scores = op_view(h, I(block_score), true)};
}

const op_family nsa_index_family = {
    OP_TABLES(operations, params, nsa_symbols, ops),
    OP_ROWS(tensors, quern_nsa_index_tensors, QUERN_NSA_INDEX_TENSORS_INIT),
    OP_CALL(quern_nsa_index_params, QUERN_NSA_INDEX_PARAMS_INIT,
            OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(block_index)),
    .first = QUERN_OP_NSA_INDEX,
    .varlen_by = I(cu_seqlens_q),
    .leads = nsa_index_leads,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = nsa_index_check_data,
    .build = build,
};

quern_status quern_nsa_index_workspace(quern_context *ctx, const quern_nsa_index_params *given,
                                       const quern_nsa_index_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nsa_index_family, 0, ctx, given, views, bytes);
}

quern_status quern_nsa_index(quern_context *ctx, const quern_exec *exec, const quern_nsa_index_params *given,
                             const quern_nsa_index_tensors *views, void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_index_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
