/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* build.c - from a checked call to its program: views and sequences as stages take them, then the
 * operation's own steps. */
#include "nsa/call.h"

#include <math.h>

static void (*const builders[NSA_OPS])(nsa_build *) = {
    [NSA_FORWARD] = nsa_build_forward,
    [NSA_BACKWARD] = nsa_build_backward,
    [NSA_COMPRESS] = nsa_build_compress,
    [NSA_COMPRESS_BACKWARD] = nsa_build_compress_backward,
    [NSA_SELECT] = nsa_build_select,
    [NSA_ATTEND] = nsa_build_attend,
    [NSA_ATTEND_BACKWARD] = nsa_build_attend_backward,
    [NSA_GATES] = nsa_build_gate,
    [NSA_COMBINE] = nsa_build_gate,
    [NSA_GATE] = nsa_build_gate,
    [NSA_GATE_BACKWARD] = nsa_build_gate_backward,
};

static void fill_extents(nsa_build *c)
{
    const int64_t *s = c->head->symbol;
    const bool varlen = c->head->varlen;
    c->n = s[S_N];
    c->batch = varlen || c->n > 0 ? s[S_B] : 0; /* no loop goes over sequences without tokens */
    c->rows_batch = varlen ? 1 : c->batch;
    c->heads = s[S_H];
    c->kv_heads = s[S_HKV];
    c->dim_k = s[S_D];
    c->dim_v = s[S_DV];
    c->n_cmp = varlen ? s[S_TC] : s[S_NC];
    c->list_heads = s[S_HS];
    c->list_rows = varlen ? s[S_ROWS] : s[S_TILES];
}

/* Activations, lists and statistics: with a batch extent. */
static quern_tensor with_batch(const nsa_build *c, int32_t tensor)
{
    return op_view(c->head, tensor, true);
}

static quern_tensor flat(const nsa_build *c, int32_t tensor)
{
    return op_view(c->head, tensor, false);
}

static void fill_inputs(nsa_build *c)
{
    nsa_views *v = &c->views;
    v->q = with_batch(c, T(q));
    v->k = with_batch(c, T(k));
    v->v = with_batch(c, T(v));
    v->k_b[NSA_CMP] = with_batch(c, T(k_cmp));
    v->v_b[NSA_CMP] = with_batch(c, T(v_cmp));
    c->separate[NSA_CMP] = false;
    for (int i = NSA_SLC; i <= NSA_WIN; i++) {
        const int32_t own = i == NSA_SLC ? T(k_slc) : T(k_win);
        c->separate[i] = op_uses(c->head, own);
        v->k_b[i] = c->separate[i] ? with_batch(c, own) : v->k;
        v->v_b[i] = c->separate[i] ? with_batch(c, own + 1) : v->v;
    }
    v->w_k = flat(c, T(w_k));
    v->w_v = flat(c, T(w_v));
    v->pe_k = flat(c, T(pe_k));
    v->pe_v = flat(c, T(pe_v));
    v->w_gate = flat(c, T(w_gate));
    v->gates = with_batch(c, T(gates));
    v->block_idx = with_batch(c, T(block_idx));
    v->block_count = with_batch(c, T(block_count));
    v->group_idx = with_batch(c, T(group_idx));
    v->q_index = with_batch(c, T(q_index));
    v->k_index = nsa_key_heads(with_batch(c, T(k_index)));
}

static void fill_results(nsa_build *c)
{
    nsa_views *v = &c->views;
    v->o = with_batch(c, T(o));
    v->d_o = with_batch(c, T(d_o));
    for (int i = 0; i < NSA_BRANCHES; i++) {
        v->o_b[i] = with_batch(c, T(o_cmp) + i);
        v->lse_b[i] = with_batch(c, T(lse_cmp) + i);
        v->d_o_b[i] = with_batch(c, T(d_o_cmp) + i);
    }
    v->d_q = with_batch(c, T(d_q));
    v->d_k = with_batch(c, T(d_k));
    v->d_v = with_batch(c, T(d_v));
    static const int32_t d_k[] = {T(d_k_cmp), T(d_k_slc), T(d_k_win)};
    for (int i = 0; i < NSA_BRANCHES; i++) {
        v->d_k_b[i] = with_batch(c, d_k[i]);
        v->d_v_b[i] = with_batch(c, d_k[i] + 1);
    }
    v->d_w_k = flat(c, T(d_w_k));
    v->d_w_v = flat(c, T(d_w_v));
    v->d_pe_k = flat(c, T(d_pe_k));
    v->d_pe_v = flat(c, T(d_pe_v));
    v->d_w_gate = flat(c, T(d_w_gate));
    v->d_gates = with_batch(c, T(d_gates));
}

static void fill_sequences(nsa_build *c)
{
    const quern_tensor cu = flat(c, T(cu_seqlens));
    c->tokens = (stage_seqs){c->batch, c->n, c->n, cu, cu};
    c->compressed = (stage_seqs){c->batch, c->n, c->n_cmp, cu, flat(c, T(cu_seqlens_cmp))};
}

/* Notes lists' and offsets' faults in the caller's status word. */
static void validate(nsa_build *c)
{
    const uint8_t *role = c->head->role;
    validate_lists_args *lists = OP_ADD(c->b, validate_lists);
    lists->seqs = c->compressed;
    lists->tile = c->params->tile;
    lists->select_block = c->params->select_block;
    lists->block_size = c->params->block_size;
    lists->stride = c->params->stride;
    if (role[T(cu_seqlens_cmp)] != OP_NEEDED) lists->seqs.cu_kv = (quern_tensor){0};
    if (role[T(block_idx)] == OP_NEEDED) lists->blocks = c->views.block_idx;
    if (role[T(group_idx)] == OP_NEEDED) lists->groups = c->views.group_idx;
    op_when_asked(c->b);
}

void nsa_build_program(op_build *b)
{
    nsa_call *call = (nsa_call *)b->call;
    nsa_build c;
    c.b = b;
    c.head = b->call;
    c.params = &call->params;
    c.passes = 1;
    c.converts = 0;
    fill_extents(&c);
    if (call->params.scale == 0.0f && c.dim_k > 0) call->params.scale = 1.0f / sqrtf((float)c.dim_k);
    fill_inputs(&c);
    fill_results(&c);
    fill_sequences(&c);
    validate(&c);
    builders[b->call->operation](&c);
}
