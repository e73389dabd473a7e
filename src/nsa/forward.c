/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward.c - the whole forward:
 *
 *   compress -> (select, mean_logit) -> attend cmp -> (select, softmax: with lse_cmp) -> attend slc, win ->
 *   gate
 *
 * A backend that offers attend_gate_forward takes everything after compress in one stage. Elsewhere the
 * branches' outputs that the caller did not ask for are most of the workspace of a long call. One of them is
 * kept in O, which the gate reads before it writes. Passes over the key/value heads share the memory of the
 * others. In a short sequence the lists name every block, so that select need not run.
 *
 * The block indexer's lists come first, where it chooses. The selected branch alone, ungated, is one stage
 * more.
 *
 * The stages of a short sequence do not fill a GPU and may run beside each other. The window branch waits for
 * nothing: it then comes after compress, and takes what that leaves of a GPU.
 */
#include "nsa/call.h"

static const int64_t branches_most = (int64_t)2 << 30; /* bytes of the branches' outputs in the workspace */
static const int64_t beside_most = 1 << 18; /* rows (a query of a head) of stages beside each other */

/* How many passes over the key/value heads keep `outputs` branches' outputs below that limit, as far as
 * passes can. */
static int64_t passes_of(const nsa_build *c, int64_t outputs)
{
    const int64_t bytes =
        outputs * c->rows_batch * c->n * c->heads * c->dim_v * (int64_t)quern_dtype_size(c->head->like.dtype);
    return nsa_passes_of(c, bytes, branches_most);
}

static bool computes_blocks(const nsa_build *c)
{
    return nsa_scores_entries(c->params);
}

static bool computes_groups(const nsa_build *c)
{
    return nsa_branch_on(c, NSA_CMP) && c->params->max_compressed_groups > 0 &&
           c->params->groups == QUERN_NSA_LIST_COMPUTED;
}

static bool lists_are_wanted(const nsa_build *c)
{
    return op_uses(c->head, T(block_idx)) || op_uses(c->head, T(block_count));
}

/* Entries, where the call makes them; returns whether it does. */
static bool add_compress(nsa_build *c)
{
    nsa_views *v = &c->views;
    const quern_dtype act = c->head->like.dtype;
    const int64_t k_shape[] = {c->rows_batch, c->n_cmp, c->kv_heads, c->dim_k},
                  v_shape[] = {c->rows_batch, c->n_cmp, c->kv_heads, c->dim_v}, offsets[] = {c->batch + 1};
    if (c->params->compress == QUERN_NSA_COMPRESS_GIVEN || !nsa_has_entries(c->params)) return false;
    v->k_b[NSA_CMP] = nsa_given_or_room(c, &v->k_b[NSA_CMP], act, 4, k_shape);
    v->v_b[NSA_CMP] = nsa_given_or_room(c, &v->v_b[NSA_CMP], act, 4, v_shape);
    if (c->head->varlen)
        c->compressed.cu_kv = nsa_given_or_room(c, &c->compressed.cu_kv, QUERN_I32, 1, offsets);
    *OP_ADD(c->b, compress_forward) = nsa_compress_args(c);
    return true;
}

/* The select stage's arguments, with memory for the lists that it makes. */
static select_args select_lists(nsa_build *c, bool blocks, bool groups)
{
    nsa_views *v = &c->views;
    const int64_t idx[] = {c->rows_batch, c->list_heads, c->list_rows, c->params->num_selected},
                  grp[] = {c->rows_batch, c->list_heads, c->list_rows, c->params->max_compressed_groups};
    if (blocks) v->block_idx = nsa_given_or_room(c, &v->block_idx, QUERN_I32, 4, idx);
    if (groups) v->group_idx = nsa_given_or_room(c, &v->group_idx, QUERN_I32, 4, grp);
    select_args select = nsa_select_args(c);
    if (!blocks) /* an input, or no branch of this call's */
        select.blocks = select.count = (quern_tensor){0};
    return select;
}

/* Where the backend offers the fused stage for this call, outputs of branches go to memory only where the
 * caller wants them. */
static bool add_fused(nsa_build *c, bool compresses)
{
    const arena before = c->b->a;
    const quern_tensor blocks = c->views.block_idx, groups = c->views.group_idx;
    if (!op_has(c->b, OP_attend_gate_forward)) return false;
    attend_gate_args *fused = OP_ADD(c->b, attend_gate_forward);
    fused->select = select_lists(c, computes_blocks(c), computes_groups(c));
    for (int i = 0; i < NSA_BRANCHES; i++) {
        fused->branch[i] = nsa_branch_args(c, i);
        fused->separate[i] = c->separate[i];
    }
    fused->branches = c->params->branches;
    fused->select_given = !computes_blocks(c) && !computes_groups(c);
    fused->lists_wanted = lists_are_wanted(c);
    fused->behind_compress = compresses;
    fused->gate = nsa_gate_args(c);
    if (op_takes(c->b, OP_attend_gate_forward, fused)) return true;
    op_drop(c->b);
    c->b->a = before;
    c->views.block_idx = blocks;
    c->views.group_idx = groups;
    return false;
}

/* Whether a branch's output or LSE is a result of the call. */
static bool branch_is_wanted(const nsa_build *c, int branch)
{
    return op_uses(c->head, T(o_cmp) + branch) || op_uses(c->head, T(lse_cmp) + branch);
}

/* Which branches run. For the gate alone, one without keys need not, for it gives 0, and the window branch
 * need not where it sees what the selected branch sees (`all`). Returns whether the latter is so. */
static bool choose_branches(const nsa_build *c, bool all, bool runs[NSA_BRANCHES])
{
    const bool twins = all && nsa_branch_on(c, NSA_WIN) && c->params->causal && c->params->window >= c->n &&
                       !c->separate[NSA_SLC] && !c->separate[NSA_WIN] && !branch_is_wanted(c, NSA_WIN);
    for (int i = 0; i < NSA_BRANCHES; i++) runs[i] = nsa_branch_on(c, i);
    if (c->n_cmp == 0 && !branch_is_wanted(c, NSA_CMP)) runs[NSA_CMP] = false;
    if (twins) runs[NSA_WIN] = false;
    return twins;
}

/* A branch's memory in a pass. */
static void place_branch(nsa_build *c, int branch, bool lse)
{
    nsa_views *v = &c->views;
    const int64_t heads = c->heads / c->passes, o_shape[] = {c->rows_batch, c->n, heads, c->dim_v},
                  lse_shape[] = {c->rows_batch, heads, c->n};
    v->o_b[branch] = nsa_given_or_room(c, &v->o_b[branch], c->head->like.dtype, 4, o_shape);
    if (lse) v->lse_b[branch] = nsa_given_or_room(c, &v->lse_b[branch], QUERN_F32, 3, lse_shape);
}

static void add_branch(nsa_build *c, int branch, bool all)
{
    attend_args *attend = OP_ADD(c->b, attend_forward);
    *attend = nsa_branch_args(c, branch);
    if (branch == NSA_SLC && all) nsa_attend_all(attend);
    nsa_cut_attend(c, attend);
}

static void add_select(nsa_build *c, const select_args *select)
{
    select_args *args = OP_ADD(c->b, select);
    *args = *select;
    args->lse = c->views.lse_b[NSA_CMP];
    nsa_cut_select(c, args);
}

/* The stages one by one. */
static void add_composed(nsa_build *c)
{
    nsa_views *v = &c->views;
    bool runs[NSA_BRANCHES];
    const bool all = nsa_branch_on(c, NSA_SLC) && nsa_selects_all(c), twins = choose_branches(c, all, runs),
               blocks = computes_blocks(c) && (lists_are_wanted(c) || !all), groups = computes_groups(c),
               selects = blocks || groups, late = c->params->metric == QUERN_NSA_METRIC_SOFTMAX;
    int64_t taken = 0;
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (runs[i] && v->o_b[i].ndim == 0 && taken++ == 0) v->o_b[i] = v->o;
    c->passes = passes_of(c, taken - 1);
    const select_args select = select_lists(c, blocks, groups);
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (runs[i]) place_branch(c, i, i == NSA_CMP && selects && late);
    if (twins) v->o_b[NSA_WIN] = v->o_b[NSA_SLC];
    const bool beside = c->passes == 1 && c->rows_batch * c->n * c->heads <= beside_most && op_beside(c->b);
    nsa_passes_begin(c);
    if (beside && runs[NSA_WIN]) add_branch(c, NSA_WIN, all);
    if (selects && !late) add_select(c, &select);
    if (runs[NSA_CMP]) add_branch(c, NSA_CMP, all);
    if (selects && late) add_select(c, &select);
    if (runs[NSA_SLC]) add_branch(c, NSA_SLC, all);
    if (!beside && runs[NSA_WIN]) add_branch(c, NSA_WIN, all);
    gate_args *gate = OP_ADD(c->b, gate_forward);
    *gate = nsa_gate_args(c);
    nsa_cut_gate(c, gate);
    op_loop_end(c->b);
}

/* Lists by the block indexer. */
static void add_index(nsa_build *c)
{
    nsa_views *v = &c->views;
    const quern_nsa_params *p = c->params;
    const int64_t shape[] = {c->rows_batch, c->list_heads, c->list_rows, p->num_selected};
    v->block_idx = nsa_given_or_room(c, &v->block_idx, QUERN_I32, 4, shape);
    *OP_ADD(c->b, block_index) =
        (block_index_args){.seqs = c->tokens,
                           .rule = {p->select_block, p->num_selected, p->forced_first, p->forced_local},
                           .query_offset = -1,
                           .q = v->q_index,
                           .keys = v->k_index,
                           .blocks = v->block_idx,
                           .count = v->block_count};
}

/* The selected branch alone, as O. */
static void add_ungated(nsa_build *c)
{
    const bool all = nsa_selects_all(c);
    attend_args *attend = OP_ADD(c->b, attend_forward);
    *attend = nsa_branch_args(c, NSA_SLC);
    attend->o = c->views.o;
    if (all) nsa_attend_all(attend);
    if (c->views.o_b[NSA_SLC].ndim > 0) op_copy(c->b, &c->views.o, &c->views.o_b[NSA_SLC]);
}

void nsa_build_forward(nsa_build *c)
{
    const bool indexed = nsa_branch_on(c, NSA_SLC) && c->params->selection == QUERN_NSA_LIST_INDEXED;
    if (indexed && !(c->params->ungated && nsa_selects_all(c) && !lists_are_wanted(c))) add_index(c);
    if (c->params->ungated) {
        add_ungated(c);
        return;
    }
    const bool compresses = add_compress(c);
    if (!add_fused(c, compresses)) add_composed(c);
}
