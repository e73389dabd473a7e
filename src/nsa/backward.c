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
 *
 * dQ's sum, delta and outputs that are computed again are most of the workspace of a long call. All but
 * compress go over the key/value heads in passes that share this memory.
 */
#include "nsa/call.h"

static const int64_t shared_most = (int64_t)4 << 30; /* bytes of what passes share */

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

static int64_t passes_of(const nsa_call *c)
{
    const nsa_views *v = &c->views;
    const int64_t element = (int64_t)quern_dtype_size(c->head.like.dtype), word = sizeof(float);
    int64_t row = v->d_q.dtype == QUERN_F32 ? 0 : c->dim_k * word;
    if (v->gates.ndim == 0) row += NSA_BRANCHES * word;
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (nsa_branch_on(c, i)) row += word + (v->o_b[i].ndim == 0 ? c->dim_v * element : 0);
    return nsa_passes_of(c, (c->head.varlen ? 1 : c->batch) * c->n * c->heads * row, shared_most);
}

/* Where the branches add up their gradients. */
typedef struct branch_sums {
    quern_tensor d_q, d_k, d_v, d_k_cmp, d_v_cmp;
    bool have_q, have_kv; /* something is there to add to */
} branch_sums;

static branch_sums carve_sums(nsa_call *c, arena *a, bool compresses)
{
    nsa_views *v = &c->views;
    /* d_k_cmp, d_v_cmp: outputs where compress is GIVEN */
    branch_sums s = {.d_q = v->d_q, .d_k_cmp = v->d_k_b[NSA_CMP], .d_v_cmp = v->d_v_b[NSA_CMP]};
    c->converts = 0;
    if (v->d_q.dtype != QUERN_F32) {
        const quern_tensor part = nsa_of_pass(c, v->d_q, 2, c->heads, 0);
        s.d_q = nsa_sum_for(c, &part, a);
    }
    c->pass_converts = c->converts;
    s.d_k = nsa_sum_for(c, &v->d_k, a);
    s.d_v = nsa_sum_for(c, &v->d_v, a);
    if (compresses) {
        const int64_t B = c->head.varlen ? 1 : c->batch;
        const int64_t k_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_k},
                      v_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_v};
        s.d_k_cmp = nsa_take(c, a, QUERN_F32, 4, k_shape);
        s.d_v_cmp = nsa_take(c, a, QUERN_F32, 4, v_shape);
    }
    s.have_q = c->params.gate == QUERN_NSA_GATE_WEIGHTS;
    return s;
}

static void carve_branch(nsa_call *c, arena *a, int branch, branch_sums *s, size_t *scratch)
{
    nsa_views *v = &c->views;
    attend_args *attend = &c->attend[branch];
    const int64_t B = c->head.varlen ? 1 : c->batch, H = c->heads / c->passes;
    const int64_t o_shape[] = {B, c->n, H, c->dim_v}, lse_shape[] = {B, H, c->n};
    c->recompute[branch] = v->o_b[branch].ndim == 0;
    v->o_b[branch] = nsa_given_or_take(c, &v->o_b[branch], a, c->head.like.dtype, 4, o_shape);
    c->gate.o_b[branch] = v->o_b[branch];
    c->gate.delta[branch] = nsa_take(c, a, QUERN_F32, 3, lse_shape);
    *attend = nsa_branch_args(c, branch);
    if (branch == NSA_SLC && nsa_selects_all(c)) nsa_attend_all(attend);
    attend->d_o = v->d_o;
    attend->delta = c->gate.delta[branch];
    attend->row_scale = gate_column(&v->gates, branch);
    attend->d_q = s->d_q;
    attend->accumulate_q = s->have_q;
    s->have_q = true;
    if (branch == NSA_CMP) {
        attend->d_k = s->d_k_cmp;
        attend->d_v = s->d_v_cmp;
    } else if (c->separate[branch]) {
        attend->d_k = v->d_k_b[branch];
        attend->d_v = v->d_v_b[branch];
    } else {
        attend->d_k = s->d_k;
        attend->d_v = s->d_v;
        attend->accumulate_k = attend->accumulate_v = s->have_kv;
        s->have_kv = true;
    }
    const attend_args part = nsa_attend_of_pass(c, branch, 0);
    nsa_make_room(scratch, STAGE_WORKSPACE(c->head.backend->attend_backward, &c->head.exec, &part));
    if (c->recompute[branch])
        nsa_make_room(scratch, STAGE_WORKSPACE(c->head.backend->attend_forward, &c->head.exec, &part));
}

static void carve(nsa_call *c, arena *a)
{
    nsa_views *v = &c->views;
    const bool compresses = c->params.compress != QUERN_NSA_COMPRESS_GIVEN && nsa_branch_on(c, NSA_CMP);
    size_t scratch = 0;
    c->passes = passes_of(c);
    branch_sums s = carve_sums(c, a, compresses);
    const int64_t gate_shape[] = {c->head.varlen ? 1 : c->batch, c->n, c->heads / c->passes, 3};
    if (v->gates.ndim == 0) v->gates = nsa_take(c, a, QUERN_F32, 4, gate_shape); /* NONE: filled with 1/3 */
    c->use_gate = true;
    c->gate = nsa_gate_args(c);
    c->gate.d_q = s.have_q ? s.d_q : (quern_tensor){0};
    for (int i = 0; i < NSA_BRANCHES; i++) {
        c->use_attend[i] = nsa_branch_on(c, i);
        if (c->use_attend[i]) carve_branch(c, a, i, &s, &scratch);
    }
    const gate_args gate = nsa_gate_of_pass(c, 0);
    nsa_make_room(&scratch, STAGE_WORKSPACE(c->head.backend->gate_backward, &c->head.exec, &gate));
    /* Without the compressed branch this stage only writes zeros, and only where no other stage wrote. */
    const bool weights = v->d_w_k.ndim > 0 || v->d_w_v.ndim > 0 || v->d_pe_k.ndim > 0 || v->d_pe_v.ndim > 0;
    c->use_compress = weights || (s.d_k.ndim > 0 && (compresses || !s.have_kv));
    if (c->use_compress) {
        c->compress = nsa_compress_args(c);
        c->compress.d_k_cmp = s.d_k_cmp;
        c->compress.d_v_cmp = s.d_v_cmp;
        c->compress.d_k = s.d_k;
        c->compress.d_v = s.d_v;
        c->compress.accumulate = s.have_kv;
        nsa_make_room(&scratch,
                      STAGE_WORKSPACE(c->head.backend->compress_backward, &c->head.exec, &c->compress));
    }
    for (int32_t i = 0; i < c->converts; i++)
        nsa_make_room(&scratch, STAGE_WORKSPACE(c->head.backend->convert, &c->head.exec, &c->convert[i]));
    c->scratch = arena_take(a, scratch);
}

static quern_status run_pass(const nsa_call *c, const op_frame *f, int64_t pass)
{
    quern_status status = QUERN_OK;
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++) {
        if (!c->use_attend[i] || !c->recompute[i]) continue;
        attend_args again = nsa_attend_of_pass(c, i, pass);
        again.lse = (quern_tensor){0}; /* an input here */
        status = op_attend_forward(&c->head, f, &again, c->scratch);
    }
    const gate_args gate = nsa_gate_of_pass(c, pass);
    if (status == QUERN_OK) status = op_gate_backward(&c->head, f, &gate, c->scratch);
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++) {
        if (!c->use_attend[i]) continue;
        const attend_args attend = nsa_attend_of_pass(c, i, pass);
        status = op_attend_backward(&c->head, f, &attend, c->scratch);
    }
    for (int32_t i = 0; i < c->pass_converts && status == QUERN_OK; i++) {
        convert_args convert = c->convert[i];
        convert.out = nsa_of_pass(c, c->views.d_q, 2, c->heads, pass);
        status = op_convert(&c->head, f, &convert, c->scratch);
    }
    return status;
}

static quern_status run(const nsa_call *c, const op_frame *f)
{
    quern_status status = QUERN_OK;
    for (int64_t pass = 0; pass < c->passes && status == QUERN_OK; pass++) status = run_pass(c, f, pass);
    if (status == QUERN_OK && c->use_compress)
        status = op_compress_backward(&c->head, f, &c->compress, c->scratch);
    for (int32_t i = c->pass_converts; i < c->converts && status == QUERN_OK; i++)
        status = op_convert(&c->head, f, &c->convert[i], c->scratch);
    return status;
}

const nsa_operation nsa_backward_operation = {carve, run};
