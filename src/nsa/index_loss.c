/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_loss.c - the block indexer's loss: its schema, its public functions, and its program of one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nsa/call.h"

#include <math.h>
#include <stddef.h>

typedef struct loss_call {
    op_call head;
    quern_nsa_index_loss_params params;
    _Alignas(op_step) char program[OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(index_loss)];
} loss_call;

#define L(field) OP_TENSOR(quern_nsa_index_loss_tensors, field)
enum {
    S_NQ = 1,
    S_NKV,
    S_TQ,
    S_TKV,
    S_BATCH,
    S_BATCH1,
    S_LISTS,
    S_WIDTH,
    S_HEADS,
    S_DIM,
    S_LIST_ROWS,
    S_CHOSEN
};
enum { KEYS, KEY_ROWS }; /* shapes of k_index, fixed length and varlen */

static const op_tensor tensors[] = {
    {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {S_BATCH, S_NQ, S_LISTS, S_WIDTH}, {S_TQ, S_LISTS, S_WIDTH}},
    {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + KEYS}, {OP_LEAD + KEY_ROWS}},
    {"q", "Q", OP_ACTIVATION, OP_NONE, {S_BATCH, S_NQ, S_HEADS, S_DIM}, {S_TQ, S_HEADS, S_DIM}},
    {"k", "K", OP_ACTIVATION, OP_NONE, {S_BATCH, S_NKV, S_LISTS, S_DIM}, {S_TKV, S_LISTS, S_DIM}},
    {"block_idx",
     "block_idx",
     OP_I32,
     OP_NONE,
     {S_BATCH, S_LISTS, S_NQ, S_CHOSEN},
     {S_LISTS, S_LIST_ROWS, S_CHOSEN}},
    {"lse_slc", "lse_slc", OP_F32, OP_NONE, {S_BATCH, S_HEADS, S_NQ}, {S_HEADS, S_TQ}},
    {"cu_seqlens_q", "cu_seqlens_q", OP_I32, OP_NONE, {S_BATCH1}, {0}},
    {"cu_seqlens_kv", "cu_seqlens_kv", OP_I32, OP_NONE, {S_BATCH1}, {0}},
    {"loss", "loss", OP_F32, OP_NONE, {0}, {0}},
    {"row_loss", "row_loss", OP_F32, OP_NONE, {S_BATCH, S_LISTS, S_NQ}, {S_LISTS, S_LIST_ROWS}},
    {"d_q_index",
     "dq_I",
     OP_ACTIVATION,
     OP_NONE,
     {S_BATCH, S_NQ, S_LISTS, S_WIDTH},
     {S_TQ, S_LISTS, S_WIDTH}},
    {"d_k_index", "dk_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + KEYS}, {OP_LEAD + KEY_ROWS}},
};
_Static_assert(sizeof tensors / sizeof *tensors == OP_TENSOR_COUNT(quern_nsa_index_loss_tensors),
               "a row a tensor");

#define AT(member) offsetof(quern_nsa_index_loss_params, member)
static const op_param params[] = {
    {"select_block", AT(select_block), OP_INTEGER, 1, INT32_MAX, NULL, "l', tokens of a block"},
    {"query_offset", AT(query_offset), OP_INTEGER, -1, INT32_MAX, NULL, "position of query 0; -1: S - N"},
    {"lambda", AT(lambda), OP_NUMBER, 0, 0, NULL, "the loss's factor"},
    {"scale", AT(scale), OP_ROOT, 0, 0, NULL, "of attention's scores; 0: 1/sqrt(D)"},
    {"index_scale", AT(index_scale), OP_POSITIVE, 0, 0, NULL, "of the indexer's; 0: 1/sqrt(D_I)"},
};
#undef AT
static const quern_nsa_index_loss_params defaults = QUERN_NSA_INDEX_LOSS_PARAMS_INIT;
static const char *const operations[] = {"nsa_index_loss"};

static const char *const symbols[] = {"",
                                      [S_NQ] = "N",
                                      [S_NKV] = "S",
                                      [S_TQ] = "T",
                                      [S_TKV] = "Tkv",
                                      [S_BATCH] = "B",
                                      [S_BATCH1] = "B+1",
                                      [S_LISTS] = "Hs",
                                      [S_WIDTH] = "D_I",
                                      [S_HEADS] = "H",
                                      [S_DIM] = "D",
                                      [S_LIST_ROWS] = "rows",
                                      [S_CHOSEN] = "k",
                                      NULL};
static const char *const leads[] = {"B S D_I|B S Hs D_I...", "Tkv D_I|Tkv Hs D_I...", NULL};
static const op_entry ops[] = {
    {.name = "nsa-index-loss",
     .help = "the block indexer's loss against attention's weights in the listed blocks, and its gradients",
     .backward = OP_NONE},
};

static void roles(op_call *call)
{
    uint8_t *r = call->role;
    for (int i = L(q_index); i <= L(block_idx); i++) r[i] = OP_NEEDED;
    r[L(lse_slc)] = r[L(cu_seqlens_q)] = OP_OPTIONAL;
    r[L(cu_seqlens_kv)] = call->varlen ? OP_OPTIONAL : OP_REFUSED;
    for (int i = L(loss); i <= L(d_k_index); i++) r[i] = OP_OPTIONAL_RESULT;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "%s is given without cu_seqlens_q: both or cu_seqlens_q alone are accepted",
                     call->family->tensors[tensor].field);
}

static quern_status derive(op_call *call)
{
    const int32_t ndim = call->varlen ? 3 : 4, at = call->varlen ? 0 : 1;
    const quern_tensor *const *t = call->given;
    for (int32_t i = L(q_index); i <= L(block_idx); i++)
        if (t[i] == NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", tensors[i].field);
    const quern_tensor *q = t[L(q_index)], *k = t[L(k_index)], *lists = t[L(block_idx)];
    call->like = *q;
    const bool shared = k->ndim == ndim - 1;
    quern_status status = op_check_activation(call, L(q_index), ndim);
    if (status == QUERN_OK) status = op_check_activation(call, L(k_index), shared ? ndim - 1 : ndim);
    if (status == QUERN_OK) status = op_check_activation(call, L(q), ndim);
    if (status == QUERN_OK) status = op_check_activation(call, L(k), ndim);
    if (status == QUERN_OK) status = view_check_head_dim("q_index", q->shape[at + 2]);
    if (status == QUERN_OK) status = view_check_head_dim("q", t[L(q)]->shape[at + 2]);
    if (status == QUERN_OK) status = view_check_heads(t[L(q)]->shape[at + 1], q->shape[at + 1], q->shape[at]);
    int64_t *s = call->symbol;
    if (status == QUERN_OK) status = op_find_batch(call, L(cu_seqlens_q), q, &s[S_BATCH]);
    if (status != QUERN_OK) return status;
    if (q->shape[at] > INT32_MAX || k->shape[at] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld query and %lld key tokens: at most %d each are accepted",
                         (long long)q->shape[at], (long long)k->shape[at], INT32_MAX);
    if (lists->ndim != ndim)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "block_idx has %d dimensions: %d are accepted",
                         lists->ndim, ndim);
    s[S_BATCH1] = s[S_BATCH] + 1;
    s[S_NQ] = s[S_TQ] = q->shape[at];
    s[S_NKV] = s[S_TKV] = k->shape[at];
    s[S_LISTS] = q->shape[at + 1];
    s[S_WIDTH] = q->shape[at + 2];
    s[S_HEADS] = t[L(q)]->shape[at + 1];
    s[S_DIM] = t[L(q)]->shape[at + 2];
    s[S_LIST_ROWS] = s[S_TQ] + s[S_BATCH];
    s[S_CHOSEN] = lists->shape[ndim - 1];
    op_extents *keys = &call->lead[KEYS], *rows = &call->lead[KEY_ROWS];
    *keys = shared ? (op_extents){3, {s[S_BATCH], s[S_NKV], s[S_WIDTH]}}
                   : (op_extents){4, {s[S_BATCH], s[S_NKV], s[S_LISTS], s[S_WIDTH]}};
    *rows = shared ? (op_extents){2, {s[S_TKV], s[S_WIDTH]}}
                   : (op_extents){3, {s[S_TKV], s[S_LISTS], s[S_WIDTH]}};
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    if (!call->varlen) return QUERN_OK;
    const int64_t *s = call->symbol;
    const bool own = call->alignment[L(cu_seqlens_kv)] > 0;
    const quern_status status =
        view_check_offsets(data[L(cu_seqlens_q)], s[S_BATCH], "cu_seqlens_q", s[S_TQ]);
    if (status != QUERN_OK || (!own && s[S_TKV] >= s[S_TQ])) return status;
    return view_check_offsets(data[own ? L(cu_seqlens_kv) : L(cu_seqlens_q)], s[S_BATCH],
                              own ? "cu_seqlens_kv" : "cu_seqlens_q", s[S_TKV]);
}

static float scale_or_root(float scale, int64_t dim)
{
    return scale > 0.0f ? scale : 1.0f / sqrtf((float)dim);
}

static void build(op_build *b)
{
    const op_call *h = b->call;
    const quern_nsa_index_loss_params *p = &((const loss_call *)h)->params;
    const int64_t *s = h->symbol;
    const bool any = h->varlen || s[S_NQ] > 0; /* no loop goes over sequences without tokens */
    const stage_seqs seqs = {any ? s[S_BATCH] : 0, s[S_NQ], s[S_NKV], op_view(h, L(cu_seqlens_q), false),
                             op_view(h, L(cu_seqlens_kv), false)};
    validate_lists_args *lists = OP_ADD(b, validate_lists);
    lists->seqs = seqs;
    op_when_asked(b);
    *OP_ADD(b, index_loss) = (index_loss_args){.seqs = seqs,
                                               .block_size = p->select_block,
                                               .query_offset = p->query_offset,
                                               .scale = scale_or_root(p->scale, s[S_DIM]),
                                               .scale_index = scale_or_root(p->index_scale, s[S_WIDTH]),
                                               .lambda = p->lambda,
                                               .list = op_view(h, L(block_idx), true),
                                               .q_index = op_view(h, L(q_index), true),
                                               .keys_index = nsa_key_heads(op_view(h, L(k_index), true)),
                                               .q = op_view(h, L(q), true),
                                               .keys = op_view(h, L(k), true),
                                               .lse = op_view(h, L(lse_slc), true),
                                               .loss = op_view(h, L(loss), false),
                                               .row_loss = op_view(h, L(row_loss), true),
                                               .d_q_index = op_view(h, L(d_q_index), true),
                                               .d_keys_index = nsa_key_heads(op_view(h, L(d_k_index), true))};
}

const op_family nsa_index_loss_family = {
    .operations = operations,
    .operation_count = 1,
    .first = QUERN_OP_NSA_INDEX_LOSS,
    .tensors = tensors,
    .tensor_count = sizeof tensors / sizeof *tensors,
    .varlen_by = L(cu_seqlens_q),
    .params = params,
    .param_count = sizeof params / sizeof *params,
    .defaults = &defaults,
    .params_init = "QUERN_NSA_INDEX_LOSS_PARAMS_INIT",
    .tensors_init = "QUERN_NSA_INDEX_LOSS_TENSORS_INIT",
    .symbols = symbols,
    .leads = leads,
    .group = "nsa-index-loss",
    .entries = ops,
    .entry_count = sizeof ops / sizeof *ops,
    .call_size = sizeof(loss_call),
    .params_at = offsetof(loss_call, params),
    .program_at = offsetof(loss_call, program),
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_nsa_index_loss_workspace(quern_context *ctx, const quern_nsa_index_loss_params *given,
                                            const quern_nsa_index_loss_tensors *views, size_t *bytes)
{
    loss_call call;
    return op_workspace_of(&call.head, &nsa_index_loss_family, 0, ctx, given, views, bytes);
}

quern_status quern_nsa_index_loss(quern_context *ctx, const quern_exec *exec,
                                  const quern_nsa_index_loss_params *given,
                                  const quern_nsa_index_loss_tensors *views, void *workspace,
                                  size_t workspace_bytes)
{
    loss_call call;
    return op_run(&call.head, &nsa_index_loss_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
