/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward.c - the whole forward:
 *
 *   compress -> (select, mean_logit) -> attend cmp -> (select, softmax: with lse_cmp) -> attend slc, win -> gate
 *
 * A backend that offers attend_gate_forward takes everything after compress in one stage.
 */
#include "core/view.h"
#include "nsa/call.h"

static void grow(size_t *most, size_t bytes)
{
    if (bytes > *most) *most = bytes;
}

static void carve(nsa_call *c, arena *a)
{
    nsa_views *v = &c->views;
    const quern_nsa_params *p = &c->params;
    const quern_dtype act = c->like.dtype;
    const int64_t B = c->packed ? 1 : c->batch, N = c->n, H = c->heads;
    const bool cmp = nsa_branch_on(c, NSA_CMP), slc = nsa_branch_on(c, NSA_SLC);
    const bool selects = slc && p->selection == QUERN_NSA_LIST_COMPUTED, groups = cmp && p->max_compressed_groups > 0;
    c->use_compress = p->compress != QUERN_NSA_COMPRESS_GIVEN && (cmp || slc);
    c->use_select = selects || (groups && p->groups == QUERN_NSA_LIST_COMPUTED);
    if (c->use_compress) {
        const int64_t k_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_k}, v_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_v}, borders[] = {c->batch + 1};
        v->k_b[NSA_CMP] = nsa_given_or_take(c, &v->k_b[NSA_CMP], a, act, 4, k_shape);
        v->v_b[NSA_CMP] = nsa_given_or_take(c, &v->v_b[NSA_CMP], a, act, 4, v_shape);
        if (c->packed) c->compressed.cu_kv = nsa_given_or_take(c, &c->compressed.cu_kv, a, QUERN_I32, 1, borders);
        c->compress = nsa_compress_args(c);
    }
    if (c->use_select) {
        const int64_t idx[] = {B, c->list_heads, c->list_rows, p->num_selected}, grp[] = {B, c->list_heads, c->list_rows, p->max_compressed_groups};
        if (selects) v->block_idx = nsa_given_or_take(c, &v->block_idx, a, QUERN_I32, 4, idx);
        if (groups) v->group_idx = nsa_given_or_take(c, &v->group_idx, a, QUERN_I32, 4, grp);
    }
    const int64_t o_shape[] = {B, N, H, c->dim_v}, lse_shape[] = {B, H, N};
    /* Fused where offered: o_b then reach memory only where the caller wants them. */
    c->use_fused = false;
    if (c->backend->attend_gate_forward.supports != NULL) {
        char why[STAGE_WHY_BYTES];
        for (int i = 0; i < NSA_BRANCHES; i++) c->fused.branch[i] = nsa_branch_args(c, i), c->fused.separate[i] = c->separate[i];
        c->fused.branches = p->branches;
        c->fused.select = nsa_select_args(c);
        if (!selects) c->fused.select.block_idx = c->fused.select.block_count = (quern_tensor){0};
        c->fused.select_given = !c->use_select;
        c->fused.gate = nsa_gate_args(c);
        c->use_fused = c->backend->attend_gate_forward.supports(&c->exec, &c->fused, why);
    }
    size_t scratch = 0;
    if (c->use_fused) {
        grow(&scratch, c->backend->attend_gate_forward.workspace(&c->exec, &c->fused));
    } else {
        for (int i = 0; i < NSA_BRANCHES; i++) {
            c->use_attend[i] = nsa_branch_on(c, i);
            if (!c->use_attend[i]) continue;
            v->o_b[i] = nsa_given_or_take(c, &v->o_b[i], a, act, 4, o_shape);
            if (i == NSA_CMP && c->use_select && p->metric == QUERN_NSA_METRIC_SOFTMAX)
                v->lse_b[i] = nsa_given_or_take(c, &v->lse_b[i], a, QUERN_F32, 3, lse_shape);
            c->attend[i] = nsa_branch_args(c, i);
            grow(&scratch, c->backend->attend_forward.workspace(&c->exec, &c->attend[i]));
        }
        if (c->use_select) {
            c->select = nsa_select_args(c);
            if (!selects) c->select.block_idx = c->select.block_count = (quern_tensor){0}; /* an input, or no branch of this call's */
            grow(&scratch, c->backend->select.workspace(&c->exec, &c->select));
        }
        c->use_gate = true;
        c->gate = nsa_gate_args(c);
        grow(&scratch, c->backend->gate_forward.workspace(&c->exec, &c->gate));
    }
    if (c->use_compress) grow(&scratch, c->backend->compress_forward.workspace(&c->exec, &c->compress));
    c->scratch = arena_take(a, scratch);
}

static quern_status run(nsa_call *c)
{
    const quern_backend *b = c->backend;
    quern_status status = QUERN_OK;
    if (c->use_compress) status = b->compress_forward.run(&c->exec, &c->compress, c->scratch);
    if (status == QUERN_OK && c->use_fused) return b->attend_gate_forward.run(&c->exec, &c->fused, c->scratch);
    const bool late = c->params.metric == QUERN_NSA_METRIC_SOFTMAX; /* after the compressed branch, whose lse it reads */
    if (status == QUERN_OK && c->use_select && !late) status = b->select.run(&c->exec, &c->select, c->scratch);
    for (int i = 0; i < NSA_BRANCHES && status == QUERN_OK; i++) {
        if (c->use_attend[i]) status = b->attend_forward.run(&c->exec, &c->attend[i], c->scratch);
        if (i == NSA_CMP && status == QUERN_OK && c->use_select && late) status = b->select.run(&c->exec, &c->select, c->scratch);
    }
    if (status == QUERN_OK) status = b->gate_forward.run(&c->exec, &c->gate, c->scratch);
    return status;
}

const nsa_operation nsa_forward_operation = {carve, run};
