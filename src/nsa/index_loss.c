/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_loss.c - the block indexer's loss: its schema, its public functions, and its program of one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nsa/index.h"

#include <math.h>
#include <stddef.h>

#define L(field) OP_TENSOR(quern_nsa_index_loss_tensors, field)

static const op_tensor tensors[] = {
    {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HS, S_DI}, {S_T, S_HS, S_DI}},
    {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + LEAD_KEYS}, {OP_LEAD + LEAD_KEY_ROWS}},
    {"q", "Q", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_H, S_D}, {S_T, S_H, S_D}},
    {"k", "K", OP_ACTIVATION, OP_NONE, {S_B, S_S, S_HS, S_D}, {S_TKV, S_HS, S_D}},
    {"block_idx", "block_idx", OP_I32, OP_NONE, {S_B, S_HS, S_N, S_K}, {S_HS, S_ROWS, S_K}},
    {"lse_slc", "lse_slc", OP_F32, OP_NONE, {S_B, S_H, S_N}, {S_H, S_T}},
    {"cu_seqlens_q", "cu_seqlens_q", OP_I32, OP_NONE, {S_B1}, {0}},
    {"cu_seqlens_kv", "cu_seqlens_kv", OP_I32, OP_NONE, {S_B1}, {0}},
    {"loss", "loss", OP_F32, OP_NONE, {0}, {0}},
    {"row_loss", "row_loss", OP_F32, OP_NONE, {S_B, S_HS, S_N}, {S_HS, S_ROWS}},
    {"d_q_index", "dq_I", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HS, S_DI}, {S_T, S_HS, S_DI}},
    {"d_k_index", "dk_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + LEAD_KEYS}, {OP_LEAD + LEAD_KEY_ROWS}},
};
_Static_assert(L(q_index) == 0 && L(k_index) == 1 && L(cu_seqlens_kv) == L(cu_seqlens_q) + 1,
               "as index.h says");

#define FIELD(member) OP_FIELD(quern_nsa_index_loss_params, member)
static const op_param params[] = {
    {FIELD(select_block), OP_INTEGER, 1, INT32_MAX, NULL, "l', tokens of a block"},
    {FIELD(query_offset), OP_INTEGER, -1, INT32_MAX, NULL, "position of query 0; -1: S - N"},
    {FIELD(lambda), OP_NUMBER, 0, 0, NULL, "the loss's factor"},
    {FIELD(scale), OP_ROOT, 0, 0, NULL, "of attention's scores; 0: 1/sqrt(D)"},
    {FIELD(index_scale), OP_POSITIVE, 0, 0, NULL, "of the indexer's; 0: 1/sqrt(D_I)"},
};
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
    op_allow(call, L(cu_seqlens_kv), call->varlen, OP_OPTIONAL,
             " without cu_seqlens_q: both or cu_seqlens_q alone are accepted");
    for (int i = L(loss); i <= L(d_k_index); i++) r[i] = OP_OPTIONAL_RESULT;
}

static quern_status derive(op_call *call)
{
    const int64_t *s = call->symbol;
    quern_status status = nsa_index_derive(call);
    if (status == QUERN_OK) status = view_check_head_dim("q", s[S_D]);
    return status == QUERN_OK ? view_check_heads(s[S_H], s[S_HS], s[S_N]) : status;
}

static float scale_or_root(float scale, int64_t dim)
{
    return scale > 0.0f ? scale : 1.0f / sqrtf((float)dim);
}

static void build(op_build *b)
{
    const op_call *h = b->call;
    const quern_nsa_index_loss_params *p = op_params(h);
    const int64_t *s = h->symbol;
    const stage_seqs seqs = nsa_index_seqs(h);
    validate_lists_args *lists = OP_ADD(b, validate_lists);
    lists->seqs = seqs;
    op_when_asked(b);
    *OP_ADD(b, index_loss) = (index_loss_args){.seqs = seqs,
                                               .block_size = p->select_block,
                                               .query_offset = p->query_offset,
                                               .scale = scale_or_root(p->scale, s[S_D]),
                                               .scale_index = scale_or_root(p->index_scale, s[S_DI]),
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
    OP_TABLES(operations, params, nsa_symbols, ops),
    OP_ROWS(tensors, quern_nsa_index_loss_tensors, QUERN_NSA_INDEX_LOSS_TENSORS_INIT),
    OP_CALL(quern_nsa_index_loss_params, QUERN_NSA_INDEX_LOSS_PARAMS_INIT,
            OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(index_loss)),
    .first = QUERN_OP_NSA_INDEX_LOSS,
    .varlen_by = L(cu_seqlens_q),
    .leads = nsa_index_leads,
    .roles = roles,
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
