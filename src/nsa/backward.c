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

static int64_t passes_of(const nsa_build *c)
{
    const nsa_views *v = &c->views;
    const int64_t element = (int64_t)quern_dtype_size(c->head->like.dtype), word = sizeof(float);
    int64_t row = v->d_q.dtype == QUERN_F32 ? 0 : c->dim_k * word;
    if (v->gates.ndim == 0) row += NSA_BRANCHES * word;
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (nsa_branch_on(c, i)) row += word + (v->o_b[i].ndim == 0 ? c->dim_v * element : 0);
    return nsa_passes_of(c, c->rows_batch * c->n * c->heads * row, shared_most);
}

/* Where the branches add up their gradients. */
typedef struct branch_sums {
    quern_tensor d_q, d_k, d_v, d_k_cmp, d_v_cmp;
    bool have_q, have_kv; /* something is there to add to */
} branch_sums;

static branch_sums place_sums(nsa_build *c, bool compresses)
{
    nsa_views *v = &c->views;
    /* d_k_cmp, d_v_cmp: outputs where compress is GIVEN */
    branch_sums s = {.d_q = nsa_sum_for(c, &v->d_q, c->heads / c->passes),
                     .d_k_cmp = v->d_k_b[NSA_CMP],
                     .d_v_cmp = v->d_v_b[NSA_CMP],
                     .have_q = c->params->gate == QUERN_NSA_GATE_WEIGHTS};
    s.d_k = nsa_sum_for(c, &v->d_k, c->kv_heads);
    s.d_v = nsa_sum_for(c, &v->d_v, c->kv_heads);
    if (compresses) {
        const int64_t k_shape[] = {c->rows_batch, c->n_cmp, c->kv_heads, c->dim_k},
                      v_shape[] = {c->rows_batch, c->n_cmp, c->kv_heads, c->dim_v};
        s.d_k_cmp = op_room(c->b, QUERN_F32, 4, k_shape);
        s.d_v_cmp = op_room(c->b, QUERN_F32, 4, v_shape);
    }
    return s;
}

/* Computes a branch's output again, in memory of a pass. */
static void add_output(nsa_build *c, int branch)
{
    const int64_t shape[] = {c->rows_batch, c->n, c->heads / c->passes, c->dim_v};
    c->views.o_b[branch] = op_room(c->b, c->head->like.dtype, 4, shape);
    attend_args *attend = OP_ADD(c->b, attend_forward);
    *attend = nsa_branch_args(c, branch);
    if (branch == NSA_SLC && nsa_selects_all(c)) nsa_attend_all(attend);
    attend->lse = (quern_tensor){0}; /* an input here */
    nsa_cut_attend(c, attend);
}

/* The gate's arguments, with memory for each branch's delta. */
static void add_gate(nsa_build *c, const branch_sums *s, quern_tensor delta[NSA_BRANCHES])
{
    const int64_t shape[] = {c->rows_batch, c->heads / c->passes, c->n};
    gate_args *gate = OP_ADD(c->b, gate_backward);
    *gate = nsa_gate_args(c);
    gate->d_q = s->have_q ? s->d_q : (quern_tensor){0};
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (nsa_branch_on(c, i)) gate->delta[i] = delta[i] = op_room(c->b, QUERN_F32, 3, shape);
    nsa_cut_gate(c, gate);
}

static void add_branch(nsa_build *c, int branch, const quern_tensor *delta, branch_sums *s)
{
    const nsa_views *v = &c->views;
    attend_args *attend = OP_ADD(c->b, attend_backward);
    *attend = nsa_branch_args(c, branch);
    if (branch == NSA_SLC && nsa_selects_all(c)) nsa_attend_all(attend);
    attend->d_o = v->d_o;
    attend->delta = *delta;
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
    nsa_cut_attend(c, attend);
}

/* What a pass does; returns how many of the conversions it took. */
static int32_t add_pass(nsa_build *c, branch_sums *s)
{
    const int64_t gate_shape[] = {c->rows_batch, c->n, c->heads / c->passes, 3};
    quern_tensor delta[NSA_BRANCHES];
    const bool converts_q = s->d_q.ndim > 0 && c->views.d_q.dtype != QUERN_F32;
    if (c->views.gates.ndim == 0)
        c->views.gates = op_room(c->b, QUERN_F32, 4, gate_shape); /* NONE: filled with 1/3 */
    nsa_passes_begin(c);
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (nsa_branch_on(c, i) && c->views.o_b[i].ndim == 0) add_output(c, i);
    add_gate(c, s, delta);
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (nsa_branch_on(c, i)) add_branch(c, i, &delta[i], s);
    if (converts_q) {
        convert_args *convert = OP_ADD(c->b, convert);
        *convert = c->convert[0];
        if (c->passes > 1) op_cut(c->b, &convert->out, 2);
    }
    op_loop_end(c->b);
    return converts_q;
}

/* The selected branch alone, whose output is O. */
static void build_ungated(nsa_build *c)
{
    nsa_views *v = &c->views;
    if (v->o_b[NSA_SLC].ndim == 0) v->o_b[NSA_SLC] = v->o;
    if (v->o_b[NSA_SLC].ndim == 0) add_output(c, NSA_SLC);
    v->d_o_b[NSA_SLC] = v->d_o;
    nsa_build_attend_backward(c);
}

void nsa_build_backward(nsa_build *c)
{
    const nsa_views *v = &c->views;
    if (c->params->ungated) {
        build_ungated(c);
        return;
    }
    const bool compresses = c->params->compress != QUERN_NSA_COMPRESS_GIVEN && nsa_branch_on(c, NSA_CMP);
    c->passes = passes_of(c);
    branch_sums s = place_sums(c, compresses);
    const int32_t done = add_pass(c, &s);
    /* Without the compressed branch this stage only writes zeros, and only where no other stage wrote. */
    const bool weights = v->d_w_k.ndim > 0 || v->d_w_v.ndim > 0 || v->d_pe_k.ndim > 0 || v->d_pe_v.ndim > 0;
    if (weights || (s.d_k.ndim > 0 && (compresses || !s.have_kv))) {
        compress_args *compress = OP_ADD(c->b, compress_backward);
        *compress = nsa_compress_args(c);
        compress->d_k_cmp = s.d_k_cmp;
        compress->d_v_cmp = s.d_v_cmp;
        compress->d_k = s.d_k;
        compress->d_v = s.d_v;
        compress->accumulate = s.have_kv;
    }
    nsa_add_converts(c, done);
}
