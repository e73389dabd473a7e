/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plan.c - from a checked call to its stages: views and sequences as stages take them, then the
 * operation's own carve. */
#include "core/error.h"
#include "nsa/call.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

static const nsa_operation *const operations[NSA_OPS] = {
    &nsa_forward_operation,
    &nsa_backward_operation,
    &nsa_compress_operation,
    &nsa_compress_backward_operation,
    &nsa_select_operation,
    &nsa_attend_operation,
    &nsa_attend_backward_operation,
    &nsa_gate_operation,
    &nsa_gate_operation,
    &nsa_gate_operation,
    &nsa_gate_backward_operation,
};

static void fill_extents(nsa_call *c)
{
    const int64_t *s = c->head.symbol;
    const bool varlen = c->head.varlen;
    c->n = s[S_N];
    c->batch = varlen || c->n > 0 ? s[S_B] : 0; /* no loop goes over sequences without tokens */
    c->heads = s[S_H];
    c->kv_heads = s[S_HKV];
    c->dim_k = s[S_D];
    c->dim_v = s[S_DV];
    c->n_cmp = varlen ? s[S_TC] : s[S_NC];
    c->list_heads = s[S_HS];
    c->list_rows = varlen ? s[S_ROWS] : s[S_TILES];
}

/* Activations, lists and statistics: with a batch extent. */
static quern_tensor with_batch(const nsa_call *c, int32_t tensor)
{
    return op_view(&c->head, tensor, true);
}

static quern_tensor flat(const nsa_call *c, int32_t tensor)
{
    return op_view(&c->head, tensor, false);
}

static void fill_inputs(nsa_call *c)
{
    nsa_views *v = &c->views;
    v->q = with_batch(c, T(q));
    v->k = with_batch(c, T(k));
    v->v = with_batch(c, T(v));
    v->k_b[NSA_CMP] = with_batch(c, T(k_cmp));
    v->v_b[NSA_CMP] = with_batch(c, T(v_cmp));
    for (int i = NSA_SLC; i <= NSA_WIN; i++) {
        const int32_t own = i == NSA_SLC ? T(k_slc) : T(k_win);
        c->separate[i] = op_uses(&c->head, own);
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
}

static void fill_results(nsa_call *c)
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

static void fill_sequences(nsa_call *c)
{
    const op_call *h = &c->head;
    const quern_nsa_params *p = &c->params;
    const quern_tensor cu = flat(c, T(cu_seqlens));
    c->tokens = (stage_seqs){c->batch, c->n, c->n, cu, cu};
    c->compressed = (stage_seqs){c->batch, c->n, c->n_cmp, cu, flat(c, T(cu_seqlens_cmp))};
    c->lists = (validate_lists_args){.seqs = c->compressed,
                                     .tile = p->tile,
                                     .select_block = p->select_block,
                                     .block_size = p->block_size,
                                     .stride = p->stride,
                                     .status = op_status_view(h)};
    if (h->role[T(cu_seqlens_cmp)] != OP_NEEDED) c->lists.seqs.cu_kv = (quern_tensor){0};
    if (h->role[T(block_idx)] == OP_NEEDED) c->lists.blocks = c->views.block_idx;
    if (h->role[T(group_idx)] == OP_NEEDED) c->lists.groups = c->views.group_idx;
}

/* Whether the backend takes every stage that the carved call uses. */
static quern_status check_supported(const nsa_call *c)
{
    const quern_backend *b = c->head.backend;
    const stage_exec *exec = &c->head.exec;
    const bool backward = nsa_is_backward(c->head.operation);
    char why[STAGE_WHY_BYTES] = "";
    bool ok = true;
    if (c->use_compress)
        ok = STAGE_TAKES(backward ? b->compress_backward : b->compress_forward, exec, &c->compress, why);
    if (ok && c->use_select && !c->use_fused) ok = STAGE_TAKES(b->select, exec, &c->select, why);
    for (int i = 0; i < NSA_BRANCHES && ok; i++)
        if (c->use_attend[i])
            ok = STAGE_TAKES(backward ? b->attend_backward : b->attend_forward, exec, &c->attend[i], why);
    if (ok && c->use_gate)
        ok = STAGE_TAKES(backward ? b->gate_backward : b->gate_forward, exec, &c->gate, why);
    return ok ? QUERN_OK : error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
}

quern_status nsa_plan(op_call *call)
{
    nsa_call *c = (nsa_call *)call;
    arena a = op_workspace();
    const size_t from = offsetof(nsa_call, batch), to = offsetof(nsa_call, compress);
    memset((char *)c + from, 0, to - from);
    fill_extents(c);
    if (c->params.scale == 0.0f && c->dim_k > 0) c->params.scale = 1.0f / sqrtf((float)c->dim_k);
    fill_inputs(c);
    fill_results(c);
    fill_sequences(c);
    operations[call->operation]->carve(c, &a);
    op_workspace_end(call, &a);
    return check_supported(c);
}

quern_status nsa_run_stages(const op_call *call, const op_frame *frame)
{
    const nsa_call *c = (const nsa_call *)call;
    const quern_status status = frame->asked ? op_validate_lists(call, frame, &c->lists, NULL) : QUERN_OK;
    return status == QUERN_OK ? operations[call->operation]->run(c, frame) : status;
}
