/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.c - the block indexer: its schema, its public functions, and its program of one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nsa/index.h"

#include <stddef.h>

typedef struct index_call {
    op_call head;
    quern_nsa_index_params params;
    _Alignas(op_step) char program[OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(block_index)];
} index_call;

#define I(field) OP_TENSOR(quern_nsa_index_tensors, field)

static const op_tensor tensors[] = {
    {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {S_BATCH, S_NQ, S_LISTS, S_WIDTH}, {S_TQ, S_LISTS, S_WIDTH}},
    {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + KEYS}, {OP_LEAD + KEY_ROWS}},
    {"cu_seqlens_q", "cu_seqlens_q", OP_I32, OP_NONE, {S_BATCH1}, {0}},
    {"cu_seqlens_kv", "cu_seqlens_kv", OP_I32, OP_NONE, {S_BATCH1}, {0}},
    {"block_idx",
     "block_idx",
     OP_I32,
     OP_NONE,
     {S_BATCH, S_LISTS, S_NQ, S_CHOSEN},
     {S_LISTS, S_LIST_ROWS, S_CHOSEN}},
    {"block_count", "block_count", OP_I32, OP_NONE, {S_BATCH, S_LISTS, S_NQ}, {S_LISTS, S_LIST_ROWS}},
    {"block_score", "block_score", OP_F32, OP_NONE, {S_BATCH, S_LISTS, S_NQ, S_BLOCKS}, {0}},
};
_Static_assert(sizeof tensors / sizeof *tensors == OP_TENSOR_COUNT(quern_nsa_index_tensors),
               "a row a tensor");
_Static_assert(I(q_index) == 0 && I(k_index) == 1 && I(cu_seqlens_kv) == I(cu_seqlens_q) + 1,
               "as index.h says");

#define AT(member) offsetof(quern_nsa_index_params, member)
static const op_param params[] = {
    {"select_block", AT(select_block), OP_INTEGER, 1, INT32_MAX, NULL, "l', tokens of a block"},
    {"num_selected", AT(num_selected), OP_INTEGER, 1, INT32_MAX, NULL,
     "k, selected blocks of a query, forced ones included"},
    {"forced_first", AT(forced_first), OP_INTEGER, 0, INT32_MAX, NULL, "first blocks, always selected"},
    {"forced_local", AT(forced_local), OP_INTEGER, 0, INT32_MAX, NULL,
     "newest blocks, the query's own last, always selected"},
    {"query_offset", AT(query_offset), OP_INTEGER, -1, INT32_MAX, NULL, "position of query 0; -1: S - N"},
};
#undef AT
static const quern_nsa_index_params defaults = QUERN_NSA_INDEX_PARAMS_INIT;
static const char *const operations[] = {"nsa_index"};

const char *const nsa_index_symbols[] = {"",
                                         [S_NQ] = "N",
                                         [S_NKV] = "S",
                                         [S_TQ] = "T",
                                         [S_TKV] = "Tkv",
                                         [S_BATCH] = "B",
                                         [S_BATCH1] = "B+1",
                                         [S_LISTS] = "Hs",
                                         [S_WIDTH] = "D_I",
                                         [S_BLOCKS] = "blocks",
                                         [S_HEADS] = "H",
                                         [S_DIM] = "D",
                                         [S_LIST_ROWS] = "rows",
                                         [S_CHOSEN] = "k",
                                         NULL};
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
    const quern_nsa_index_params *p = &((const index_call *)call)->params;
    const int64_t forced = p->forced_first + p->forced_local;
    if (p->num_selected >= forced) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "num_selected is %lld: at least the %lld forced blocks (first %lld, local %lld) are "
                     "accepted",
                     (long long)p->num_selected, (long long)forced, (long long)p->forced_first,
                     (long long)p->forced_local);
}

static void roles(op_call *call)
{
    uint8_t *r = call->role;
    r[I(q_index)] = r[I(k_index)] = OP_NEEDED;
    r[I(cu_seqlens_q)] = OP_OPTIONAL;
    r[I(cu_seqlens_kv)] = call->varlen ? OP_OPTIONAL : OP_REFUSED;
    r[I(block_idx)] = OP_RESULT;
    r[I(block_count)] = OP_OPTIONAL_RESULT;
    r[I(block_score)] = call->varlen ? OP_REFUSED : OP_OPTIONAL_RESULT;
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    (void)call, (void)text;
    return tensor == I(block_score) ? " with cu_seqlens_q: scores of fixed lengths are accepted"
                                    : " without cu_seqlens_q: both or cu_seqlens_q alone are accepted";
}

quern_status nsa_index_derive(op_call *call)
{
    const int32_t ndim = call->varlen ? 3 : 4, at = call->varlen ? 0 : 1;
    const quern_tensor *q = call->given[I(q_index)], *k = call->given[I(k_index)];
    call->like = *q;
    const bool shared = k->ndim == ndim - 1;
    quern_status status = op_check_activation(call, I(q_index), ndim);
    if (status == QUERN_OK) status = op_check_activation(call, I(k_index), shared ? ndim - 1 : ndim);
    if (status == QUERN_OK) status = view_check_head_dim("q_index", q->shape[at + 2]);
    int64_t *s = call->symbol;
    if (status == QUERN_OK) status = op_find_batch(call, call->family->varlen_by, q, &s[S_BATCH]);
    if (status != QUERN_OK) return status;
    if (q->shape[at] > INT32_MAX || k->shape[at] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld query and %lld key tokens: at most %d each are accepted",
                         (long long)q->shape[at], (long long)k->shape[at], INT32_MAX);
    s[S_BATCH1] = s[S_BATCH] + 1;
    s[S_NQ] = s[S_TQ] = q->shape[at];
    s[S_NKV] = s[S_TKV] = k->shape[at];
    s[S_LISTS] = q->shape[at + 1];
    s[S_WIDTH] = q->shape[at + 2];
    s[S_LIST_ROWS] = s[S_TQ] + s[S_BATCH];
    op_extents *keys = &call->lead[KEYS], *rows = &call->lead[KEY_ROWS];
    *keys = shared ? (op_extents){3, {s[S_BATCH], s[S_NKV], s[S_WIDTH]}}
                   : (op_extents){4, {s[S_BATCH], s[S_NKV], s[S_LISTS], s[S_WIDTH]}};
    *rows = shared ? (op_extents){2, {s[S_TKV], s[S_WIDTH]}}
                   : (op_extents){3, {s[S_TKV], s[S_LISTS], s[S_WIDTH]}};
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_nsa_index_params *p = &((const index_call *)call)->params;
    const quern_tensor *q = call->given[I(q_index)], *k = call->given[I(k_index)];
    int64_t *s = call->symbol;
    if (q == NULL || k == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed",
                         q == NULL ? "q_index" : "k_index");
    quern_status status = nsa_index_derive(call);
    if (status == QUERN_OK) status = view_check_heads(s[S_LISTS], 1, s[S_NQ]);
    if (status != QUERN_OK) return status;
    s[S_BLOCKS] = mask_blocks(s[S_NKV], p->select_block);
    s[S_CHOSEN] = p->num_selected;
    return QUERN_OK;
}

quern_status nsa_index_check_data(const op_call *call, void *const *data)
{
    if (!call->varlen) return QUERN_OK;
    const int64_t *s = call->symbol;
    const int32_t cu = call->family->varlen_by, cu_kv = cu + 1;
    const bool own = call->alignment[cu_kv] > 0;
    const quern_status status = view_check_offsets(data[cu], s[S_BATCH], "cu_seqlens_q", s[S_TQ]);
    if (status != QUERN_OK || (!own && s[S_TKV] >= s[S_TQ])) return status;
    return view_check_offsets(data[own ? cu_kv : cu], s[S_BATCH], own ? "cu_seqlens_kv" : "cu_seqlens_q",
                              s[S_TKV]);
}

stage_seqs nsa_index_seqs(const op_call *call)
{
    const int64_t *s = call->symbol;
    const int32_t cu = call->family->varlen_by;
    const bool any = call->varlen || s[S_NQ] > 0; /* no loop goes over sequences without tokens */
    return (stage_seqs){any ? s[S_BATCH] : 0, s[S_NQ], s[S_NKV], op_view(call, cu, false),
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
    const quern_nsa_index_params *p = &((const index_call *)h)->params;
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
    OP_TABLES(index_call, operations, tensors, params, nsa_index_symbols, ops),
    .first = QUERN_OP_NSA_INDEX,
    .varlen_by = I(cu_seqlens_q),
    .defaults = &defaults,
    .params_init = "QUERN_NSA_INDEX_PARAMS_INIT",
    .tensors_init = "QUERN_NSA_INDEX_TENSORS_INIT",
    .leads = nsa_index_leads,
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
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
