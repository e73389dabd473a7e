/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_loss.c - the block indexer's loss: its schema, its public functions, and its program of one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nsa/index.h"

#include <math.h>
#include <stddef.h>

typedef struct loss_call {
    op_call head;
    quern_nsa_index_loss_params params;
    _Alignas(op_step) char program[OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(index_loss)];
} loss_call;

#define L(field) OP_TENSOR(quern_nsa_index_loss_tensors, field)

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
_Static_assert(L(q_index) == 0 && L(k_index) == 1 && L(cu_seqlens_kv) == L(cu_seqlens_q) + 1,
               "as index.h says");

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

static const op_entry ops[] = {
    {.name = "nsa-index-loss",
     .help = "the block indexer's loss against attention's weights in the listed blocks, and its gradients"},
};

static void roles(op_call *call)
{
    uint8_t *r = call->role;
    for (int i = L(q_index); i <= L(block_idx); i++) r[i] = OP_NEEDED;
    r[L(lse_slc)] = r[L(cu_seqlens_q)] = OP_OPTIONAL;
    r[L(cu_seqlens_kv)] = call->varlen ? OP_OPTIONAL : OP_REFUSED;
    for (int i = L(loss); i <= L(d_k_index); i++) r[i] = OP_OPTIONAL_RESULT;
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    (void)call, (void)tensor, (void)text;
    return " without cu_seqlens_q: both or cu_seqlens_q alone are accepted";
}

static quern_status derive(op_call *call)
{
    const int32_t ndim = call->varlen ? 3 : 4, at = call->varlen ? 0 : 1;
    const quern_tensor *const *t = call->given, *q = t[L(q)], *lists = t[L(block_idx)];
    int64_t *s = call->symbol;
    for (int32_t i = L(q_index); i <= L(block_idx); i++)
        if (t[i] == NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", tensors[i].field);
    quern_status status = nsa_index_derive(call);
    if (status == QUERN_OK) status = op_check_activation(call, L(q), ndim);
    if (status == QUERN_OK) status = op_check_activation(call, L(k), ndim);
    if (status == QUERN_OK) status = view_check_head_dim("q", q->shape[at + 2]);
    if (status == QUERN_OK) status = view_check_heads(q->shape[at + 1], s[S_LISTS], s[S_NQ]);
    if (status != QUERN_OK) return status;
    if (lists->ndim != ndim)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "block_idx has %d dimensions: %d are accepted",
                         lists->ndim, ndim);
    s[S_HEADS] = q->shape[at + 1];
    s[S_DIM] = q->shape[at + 2];
    s[S_CHOSEN] = lists->shape[ndim - 1];
    return QUERN_OK;
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
    const stage_seqs seqs = nsa_index_seqs(h);
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
    OP_TABLES(loss_call, operations, tensors, params, nsa_index_symbols, ops),
    .first = QUERN_OP_NSA_INDEX_LOSS,
    .varlen_by = L(cu_seqlens_q),
    .defaults = &defaults,
    .params_init = "QUERN_NSA_INDEX_LOSS_PARAMS_INIT",
    .tensors_init = "QUERN_NSA_INDEX_LOSS_TENSORS_INIT",
    .leads = nsa_index_leads,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = nsa_index_check_data,
    .build = build,
};

quern_status quern_nsa_index_loss_workspace(quern_context *ctx, const quern_nsa_index_loss_params *given,
                                            const quern_nsa_index_loss_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nsa_index_loss_family, 0, ctx, given, views, bytes);
}

quern_status quern_nsa_index_loss(quern_context *ctx, const quern_exec *exec,
                                  const quern_nsa_index_loss_params *given,
                                  const quern_nsa_index_loss_tensors *views, void *workspace,
                                  size_t workspace_bytes)
{
    return op_run(&nsa_index_loss_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
