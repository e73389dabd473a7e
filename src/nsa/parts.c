/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parts.c - the operations of one or two stages: compress, select, attend, gates. */
#include "nsa/call.h"

void nsa_build_compress(nsa_build *c)
{
    *OP_ADD(c->b, compress_forward) = nsa_compress_args(c);
}

void nsa_build_compress_backward(nsa_build *c)
{
    const nsa_views *v = &c->views;
    compress_args *compress = OP_ADD(c->b, compress_backward);
    *compress = nsa_compress_args(c);
    compress->k_cmp = compress->v_cmp = (quern_tensor){0};
    compress->d_k_cmp = v->d_k_b[NSA_CMP];
    compress->d_v_cmp = v->d_v_b[NSA_CMP];
    compress->d_k = v->d_k;
    compress->d_v = v->d_v;
}

void nsa_build_select(nsa_build *c)
{
    *OP_ADD(c->b, select) = nsa_select_args(c);
}

void nsa_build_attend(nsa_build *c)
{
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (nsa_branch_on(c, i)) *OP_ADD(c->b, attend_forward) = nsa_branch_args(c, i);
}

/* Where branches' gradients go: `out` itself where one branch alone makes it, else as in the whole backward
 * an f32 sum, converted at the end. */
static quern_tensor gradient_for(nsa_build *c, const quern_tensor *out, int branches, int64_t heads)
{
    return branches > 1 ? nsa_sum_for(c, out, heads) : *out;
}

void nsa_build_attend_backward(nsa_build *c)
{
    const nsa_views *v = &c->views;
    const int64_t lse_shape[] = {c->rows_batch, c->heads, c->n};
    int on = 0, sharing = 0; /* branches, and those whose keys and values are k and v */
    for (int i = 0; i < NSA_BRANCHES; i++) {
        on += nsa_branch_on(c, i);
        sharing += nsa_branch_on(c, i) && i != NSA_CMP && !c->separate[i];
    }
    const quern_tensor d_q = gradient_for(c, &v->d_q, on, c->heads),
                       d_k = gradient_for(c, &v->d_k, sharing, c->kv_heads),
                       d_v = gradient_for(c, &v->d_v, sharing, c->kv_heads);
    bool have_q = false, have_kv = false;
    for (int i = 0; i < NSA_BRANCHES; i++) {
        if (!nsa_branch_on(c, i)) continue;
        const quern_tensor delta = op_room(c->b, QUERN_F32, 3, lse_shape);
        const bool own = i == NSA_CMP || c->separate[i];
        *OP_ADD(c->b, rowdot) = (rowdot_args){c->tokens, v->d_o_b[i], v->o_b[i], delta};
        attend_args *attend = OP_ADD(c->b, attend_backward);
        *attend = nsa_branch_args(c, i);
        attend->d_o = v->d_o_b[i];
        attend->delta = delta;
        attend->d_q = d_q;
        attend->accumulate_q = have_q;
        have_q = true;
        attend->d_k = own ? v->d_k_b[i] : d_k;
        attend->d_v = own ? v->d_v_b[i] : d_v;
        attend->accumulate_k = attend->accumulate_v = !own && have_kv;
        have_kv = have_kv || !own;
    }
    nsa_add_converts(c, 0);
}

/* Gates alone, combine alone, and both in one. */
void nsa_build_gate(nsa_build *c)
{
    gate_args *gate = OP_ADD(c->b, gate_forward);
    *gate = nsa_gate_args(c);
    if (c->head->operation == NSA_GATES) gate->kind = GATE_WEIGHTS;
    if (c->head->operation == NSA_COMBINE) gate->kind = c->views.gates.ndim > 0 ? GATE_GIVEN : GATE_NONE;
}

void nsa_build_gate_backward(nsa_build *c)
{
    *OP_ADD(c->b, gate_backward) = nsa_gate_args(c);
}
