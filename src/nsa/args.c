/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* args.c - tensors in the workspace, and the stages' arguments. */
#include "nsa/call.h"

quern_tensor nsa_given_or_room(nsa_build *c, const quern_tensor *given, quern_dtype dtype, int32_t ndim,
                               const int64_t *shape)
{
    return given->ndim > 0 ? *given : op_room(c->b, dtype, ndim, shape);
}

quern_tensor nsa_sum_for(nsa_build *c, const quern_tensor *out, int64_t heads)
{
    if (out->ndim == 0 || out->dtype == QUERN_F32) return *out;
    const int64_t shape[] = {out->shape[0], out->shape[1], heads, out->shape[3]};
    const quern_tensor sum = op_room(c->b, QUERN_F32, 4, shape);
    c->convert[c->converts++] = (convert_args){c->tokens, sum, *out};
    return sum;
}

void nsa_add_converts(nsa_build *c, int32_t first)
{
    for (int32_t i = first; i < c->converts; i++) *OP_ADD(c->b, convert) = c->convert[i];
}

attend_args nsa_branch_args(const nsa_build *c, int branch)
{
    const quern_nsa_params *p = c->params;
    static const attend_mask masks[] = {ATTEND_COMPRESSED, ATTEND_BLOCKS, ATTEND_RANGE};
    attend_args a = {.mask = masks[branch],
                     .causal = p->causal,
                     .scale = p->scale,
                     .query_offset = -1,
                     .tile = p->tile,
                     .scope = (list_scope)p->scope};
    a.seqs = branch == NSA_CMP ? c->compressed : c->tokens;
    a.window = branch == NSA_WIN ? p->window : 0;
    a.block_size = branch == NSA_SLC ? p->select_block : p->block_size;
    a.stride = p->stride;
    a.visibility = (entry_visibility)p->compressed_visibility;
    if (branch == NSA_SLC) a.list = c->views.block_idx;
    if (branch == NSA_CMP && p->max_compressed_groups > 0) a.list = c->views.group_idx;
    a.q = c->views.q;
    a.k = c->views.k_b[branch];
    a.v = c->views.v_b[branch];
    a.o = c->views.o_b[branch];
    a.lse = c->views.lse_b[branch];
    return a;
}

bool nsa_selects_all(const nsa_build *c)
{
    const int64_t blocks = (c->n + c->params->select_block - 1) / c->params->select_block;
    return c->params->selection != QUERN_NSA_LIST_GIVEN && c->params->num_selected >= blocks;
}

void nsa_attend_all(attend_args *args)
{
    args->mask = ATTEND_RANGE;
    args->list = (quern_tensor){0};
}

compress_args nsa_compress_args(const nsa_build *c)
{
    const nsa_views *v = &c->views;
    return (compress_args){.seqs = c->compressed,
                           .kind = (compress_kind)c->params->compress,
                           .block_size = c->params->block_size,
                           .stride = c->params->stride,
                           .k = v->k,
                           .v = v->v,
                           .w_k = v->w_k,
                           .w_v = v->w_v,
                           .pe_k = v->pe_k,
                           .pe_v = v->pe_v,
                           .k_cmp = v->k_b[NSA_CMP],
                           .v_cmp = v->v_b[NSA_CMP],
                           .d_w_k = v->d_w_k,
                           .d_w_v = v->d_w_v,
                           .d_pe_k = v->d_pe_k,
                           .d_pe_v = v->d_pe_v};
}

select_rule nsa_select_rule(const quern_nsa_params *p)
{
    return (select_rule){.scorer = (select_scorer)p->metric,
                         .scope = (list_scope)p->scope,
                         .scale = p->scale,
                         .block_size = p->block_size,
                         .stride = p->stride,
                         .select_block = p->select_block,
                         .k = p->num_selected,
                         .forced_first = p->forced_first,
                         .forced_local = p->forced_local};
}

select_args nsa_select_args(const nsa_build *c)
{
    const quern_nsa_params *p = c->params;
    select_args s = {.seqs = c->compressed,
                     .rule = nsa_select_rule(p),
                     .causal = p->causal,
                     .visibility = (entry_visibility)p->compressed_visibility,
                     .tile = p->tile,
                     .group_k = p->max_compressed_groups,
                     .q = c->views.q,
                     .keys = c->views.k_b[NSA_CMP],
                     .lse = c->views.lse_b[NSA_CMP],
                     .blocks = c->views.block_idx,
                     .count = c->views.block_count};
    if (p->groups != QUERN_NSA_LIST_GIVEN) s.groups = c->views.group_idx;
    return s;
}

gate_args nsa_gate_args(const nsa_build *c)
{
    gate_args g = {.seqs = c->tokens,
                   .kind = (gate_kind)c->params->gate,
                   .q = c->views.q,
                   .w_gate = c->views.w_gate,
                   .gates = c->views.gates,
                   .o = c->views.o,
                   .d_o = c->views.d_o,
                   .d_q = c->views.d_q,
                   .d_w_gate = c->views.d_w_gate,
                   .d_gates = c->views.d_gates};
    for (int i = 0; i < NSA_BRANCHES; i++) {
        g.o_b[i] = c->views.o_b[i];
        g.d_o_b[i] = c->views.d_o_b[i];
    }
    return g;
}
