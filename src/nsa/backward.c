/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.c - the whole backward:
 *
 *   (recompute o_b) -> gate backward (delta_b, the gate's share of dQ, dW_gate) -> attend backward of each
 *   branch
 *   -> compress backward -> convert
 *
 * Sums over branches are f32: the outputs themselves where they are f32, else workspace that is converted at
 * the end. The first write of a sum overwrites it, the others add, in a fixed order.
 */
#include "nsa/call.h"

/* gates[..., branch] as [B, H, N]. */
static quern_tensor gate_column(const quern_tensor *gates, int branch)
{
    quern_tensor t = *gates;
    t.data = t.data != NULL ? (float *)t.data + branch : NULL;
    t.ndim = 3;
    t.shape[1] = gates->shape[2];
    t.strides[1] = gates->strides[2];
    t.shape[2] = gates->shape[1];
    t.strides[2] = gates->strides[1];
    return t;
}

static void carve(nsa_call *c, arena *a)
{
    nsa_views *v = &c->views;
    const quern_nsa_params *p = &c->params;
    const int64_t B = c->head.varlen ? 1 : c->batch, N = c->n, H = c->heads;
    const int64_t o_shape[] = {B, N, H, c->dim_v}, lse_shape[] = {B, H, N}, gate_shape[] = {B, N, H, 3};
    size_t scratch = 0;
    c->converts = 0;
    const bool compresses = p->compress != QUERN_NSA_COMPRESS_GIVEN && nsa_branch_on(c, NSA_CMP);
    const quern_tensor d_q = nsa_sum_for(c, &v->d_q, a), d_k = nsa_sum_for(c, &v->d_k, a),
                       d_v = nsa_sum_for(c, &v->d_v, a);
    /* outputs where compress is GIVEN */
    quern_tensor d_k_cmp = v->d_k_b[NSA_CMP], d_v_cmp = v->d_v_b[NSA_CMP];
    if (compresses) {
        const int64_t k_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_k},
                      v_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_v};
        d_k_cmp = nsa_take(c, a, QUERN_F32, 4, k_shape);
        d_v_cmp = nsa_take(c, a, QUERN_F32, 4, v_shape);
    }
    if (v->gates.ndim == 0) v->gates = nsa_take(c, a, QUERN_F32, 4, gate_shape); /* NONE: filled with 1/3 */

    c->gate = nsa_gate_args(c);
    c->gate.d_q = p->gate == QUERN_NSA_GATE_WEIGHTS ? d_q : (quern_tensor){0};
    bool have_q = p->gate == QUERN_NSA_GATE_WEIGHTS, have_kv = false;
    for (int i = 0; i < NSA_BRANCHES; i++) {
        c->use_attend[i] = nsa_branch_on(c, i);
        if (!c->use_attend[i]) continue;
        attend_args *attend = &c->attend[i];
        const bool recompute = v->o_b[i].ndim == 0;
        c->recompute[i] = recompute;
        v->o_b[i] = nsa_given_or_take(c, &v->o_b[i], a, c->head.like.dtype, 4, o_shape);
        c->gate.o_b[i] = v->o_b[i];
        c->gate.delta[i] = nsa_take(c, a, QUERN_F32, 3, lse_shape);
        *attend = nsa_branch_args(c, i);
        if (i == NSA_SLC && nsa_selects_all(c)) nsa_attend_all(attend);
        attend->d_o = v->d_o;
        attend->delta = c->gate.delta[i];
        attend->row_scale = gate_column(&v->gates, i);
        attend->d_q = d_q;
        attend->accumulate_q = have_q;
        have_q = true;
        if (i == NSA_CMP) {
            attend->d_k = d_k_cmp;
            attend->d_v = d_v_cmp;
        } else if (c->separate[i]) {
            attend->d_k = v->d_k_b[i];
            attend->d_v = v->d_v_b[i];
        } else {
            attend->d_k = d_k;
            attend->d_v = d_v;
            attend->accumulate_k = attend->accumulate_v = have_kv;
            have_kv = true;
        }
        nsa_make_room(&scratch, STAGE_WORKSPACE(c->head.backend->attend_backward, &c->head.exec, attend));
        if (recompute)
            nsa_make_room(&scratch, STAGE_WORKSPACE(c->head.backend->attend_forward, &c->head.exec, attend));
    }
    c->use_gate = true;
    nsa_make_room(&scratch, STAGE_WORKSPACE(c->head.backend->gate_backward, &c->head.exec, &c->gate));
    /* Without the compressed branch this stage only writes zeros, and only where no other stage wrote. */
    const bool weights = v->d_w_k.ndim > 0 || v->d_w_v.ndim > 0 || v->d_pe_k.ndim > 0 || v->d_pe_v.ndim > 0;
    c->use_compress = weights || (d_k.ndim > 0 && (compresses || !have_kv));
    if (c->use_compress) {
        c->compress = nsa_compress_args(c);
        c->compress.d_k_cmp = d_k_cmp;
        c->compress.d_v_cmp = d_v_cmp;
        c->compress.d_k = d_k;
        c->compress.d_v = d_v;
        c->compress.accumulate = have_kv;
        nsa_make_room(&scratch,
                      STAGE_WORKSPACE(c->head.backend->compress_backward, &c->head.exec, &c->compress));
    }
    for (int32_t i = 0; i < c->converts; i++)
        nsa_make_room(&scratch, STAGE_WORKSPACE(c->head.backend->convert, &c->head.exec, &c->convert[i]));
    c->scratch = arena_take(a, scratch);
}

static quern_status run(const nsa_call *c, const op_frame *f)
{
    quern_status status = QUERN_OK;
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++) {
        if (!c->use_attend[i] || !c->recompute[i]) continue;
        attend_args again = c->attend[i];
        again.lse = (quern_tensor){0}; /* an input here */
        status = op_attend_forward(&c->head, f, &again, c->scratch);
    }
    if (status == QUERN_OK) status = op_gate_backward(&c->head, f, &c->gate, c->scratch);
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++)
        if (c->use_attend[i]) status = op_attend_backward(&c->head, f, &c->attend[i], c->scratch);
    if (status == QUERN_OK && c->use_compress)
        status = op_compress_backward(&c->head, f, &c->compress, c->scratch);
    for (int32_t i = 0; i < c->converts && status == QUERN_OK; i++)
        status = op_convert(&c->head, f, &c->convert[i], c->scratch);
    return status;
}

const nsa_operation nsa_backward_operation = {carve, run};
