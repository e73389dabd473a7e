/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parts.c - the operations of one or two stages: compress, select, attend, gates. */
#include "nsa/call.h"

static void carve_compress(nsa_call *c, arena *a)
{
    c->use_compress = true;
    c->compress = nsa_compress_args(c);
    c->scratch =
        arena_take(a, STAGE_WORKSPACE(c->head.backend->compress_forward, &c->head.exec, &c->compress));
}

static quern_status run_compress(const nsa_call *c, const op_frame *f)
{
    return op_compress_forward(&c->head, f, &c->compress, c->scratch);
}

static void carve_compress_backward(nsa_call *c, arena *a)
{
    const nsa_views *v = &c->views;
    c->use_compress = true;
    c->compress = nsa_compress_args(c);
    c->compress.k_cmp = c->compress.v_cmp = (quern_tensor){0};
    c->compress.d_k_cmp = v->d_k_b[NSA_CMP];
    c->compress.d_v_cmp = v->d_v_b[NSA_CMP];
    c->compress.d_k = v->d_k;
    c->compress.d_v = v->d_v;
    c->scratch =
        arena_take(a, STAGE_WORKSPACE(c->head.backend->compress_backward, &c->head.exec, &c->compress));
}

static quern_status run_compress_backward(const nsa_call *c, const op_frame *f)
{
    return op_compress_backward(&c->head, f, &c->compress, c->scratch);
}

static void carve_select(nsa_call *c, arena *a)
{
    c->use_select = true;
    c->select = nsa_select_args(c);
    c->scratch = arena_take(a, STAGE_WORKSPACE(c->head.backend->select, &c->head.exec, &c->select));
}

static quern_status run_select(const nsa_call *c, const op_frame *f)
{
    return op_select(&c->head, f, &c->select, c->scratch);
}

static void carve_attend(nsa_call *c, arena *a)
{
    size_t most = 0;
    for (int i = 0; i < NSA_BRANCHES; i++) {
        c->use_attend[i] = nsa_branch_on(c, i);
        if (!c->use_attend[i]) continue;
        c->attend[i] = nsa_branch_args(c, i);
        nsa_make_room(&most, STAGE_WORKSPACE(c->head.backend->attend_forward, &c->head.exec, &c->attend[i]));
    }
    c->scratch = arena_take(a, most);
}

static quern_status run_attend(const nsa_call *c, const op_frame *f)
{
    quern_status status = QUERN_OK;
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++)
        if (c->use_attend[i]) status = op_attend_forward(&c->head, f, &c->attend[i], c->scratch);
    return status;
}

/* Where branches' gradients go: `out` itself where one branch alone makes it, else as in the whole backward
 * an f32 sum, converted at the end. */
static quern_tensor gradient_for(nsa_call *c, const quern_tensor *out, int branches, arena *a)
{
    return branches > 1 ? nsa_sum_for(c, out, a) : *out;
}

static void carve_attend_backward(nsa_call *c, arena *a)
{
    nsa_views *v = &c->views;
    const int64_t lse_shape[] = {c->head.varlen ? 1 : c->batch, c->heads, c->n};
    int on = 0, sharing = 0; /* branches, and those whose keys and values are k and v */
    for (int i = 0; i < NSA_BRANCHES; i++) {
        on += nsa_branch_on(c, i);
        sharing += nsa_branch_on(c, i) && i != NSA_CMP && !c->separate[i];
    }
    c->converts = 0;
    const quern_tensor d_q = gradient_for(c, &v->d_q, on, a), d_k = gradient_for(c, &v->d_k, sharing, a),
                       d_v = gradient_for(c, &v->d_v, sharing, a);
    size_t most = 0;
    bool have_q = false, have_kv = false;
    for (int i = 0; i < NSA_BRANCHES; i++) {
        c->use_attend[i] = nsa_branch_on(c, i);
        if (!c->use_attend[i]) continue;
        attend_args *attend = &c->attend[i];
        *attend = nsa_branch_args(c, i);
        attend->d_o = v->d_o_b[i];
        attend->delta = nsa_take(c, a, QUERN_F32, 3, lse_shape);
        c->rowdot[i] = (rowdot_args){c->tokens, v->d_o_b[i], v->o_b[i], attend->delta};
        attend->d_q = d_q;
        attend->accumulate_q = have_q;
        have_q = true;
        const bool own = i == NSA_CMP || c->separate[i];
        attend->d_k = own ? v->d_k_b[i] : d_k;
        attend->d_v = own ? v->d_v_b[i] : d_v;
        attend->accumulate_k = attend->accumulate_v = !own && have_kv;
        have_kv = have_kv || !own;
        nsa_make_room(&most, STAGE_WORKSPACE(c->head.backend->attend_backward, &c->head.exec, attend));
        nsa_make_room(&most, STAGE_WORKSPACE(c->head.backend->rowdot, &c->head.exec, &c->rowdot[i]));
    }
    for (int32_t i = 0; i < c->converts; i++)
        nsa_make_room(&most, STAGE_WORKSPACE(c->head.backend->convert, &c->head.exec, &c->convert[i]));
    c->scratch = arena_take(a, most);
}

static quern_status run_attend_backward(const nsa_call *c, const op_frame *f)
{
    quern_status status = QUERN_OK;
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++) {
        if (!c->use_attend[i]) continue;
        status = op_rowdot(&c->head, f, &c->rowdot[i], c->scratch);
        if (status == QUERN_OK) status = op_attend_backward(&c->head, f, &c->attend[i], c->scratch);
    }
    for (int32_t i = 0; i < c->converts && status == QUERN_OK; i++)
        status = op_convert(&c->head, f, &c->convert[i], c->scratch);
    return status;
}

/* Gates alone, combine alone, and both in one. */
static void carve_gate(nsa_call *c, arena *a)
{
    c->use_gate = true;
    c->gate = nsa_gate_args(c);
    if (c->head.operation == NSA_GATES) c->gate.kind = GATE_WEIGHTS;
    if (c->head.operation == NSA_COMBINE) c->gate.kind = c->views.gates.ndim > 0 ? GATE_GIVEN : GATE_NONE;
    c->scratch = arena_take(a, STAGE_WORKSPACE(c->head.backend->gate_forward, &c->head.exec, &c->gate));
}

static quern_status run_gate(const nsa_call *c, const op_frame *f)
{
    return op_gate_forward(&c->head, f, &c->gate, c->scratch);
}

static void carve_gate_backward(nsa_call *c, arena *a)
{
    c->use_gate = true;
    c->gate = nsa_gate_args(c);
    c->scratch = arena_take(a, STAGE_WORKSPACE(c->head.backend->gate_backward, &c->head.exec, &c->gate));
}

static quern_status run_gate_backward(const nsa_call *c, const op_frame *f)
{
    return op_gate_backward(&c->head, f, &c->gate, c->scratch);
}

const nsa_operation nsa_compress_operation = {carve_compress, run_compress};
const nsa_operation nsa_compress_backward_operation = {carve_compress_backward, run_compress_backward};
const nsa_operation nsa_select_operation = {carve_select, run_select};
const nsa_operation nsa_attend_operation = {carve_attend, run_attend};
const nsa_operation nsa_attend_backward_operation = {carve_attend_backward, run_attend_backward};
const nsa_operation nsa_gate_operation = {carve_gate, run_gate};
const nsa_operation nsa_gate_backward_operation = {carve_gate_backward, run_gate_backward};
