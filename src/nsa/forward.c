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
 * The stages of a short sequence do not fill a GPU. Where their launches are recorded, each waits for those
 * alone whose results it reads: the window branch for nothing, the compressed branch and select (mean_logit)
 * for compress, the selected branch for select, the gate for all.
 */
#include "core/error.h"
#include "nsa/call.h"

static const int64_t branches_most = (int64_t)2 << 30; /* bytes of the branches' outputs in the workspace */
static const int64_t beside_most = 1 << 18; /* rows (a query of a head) of stages beside each other */

/* How many passes over the key/value heads keep `outputs` branches' outputs below that limit, as far as
 * passes can. */
static int64_t passes_of(const nsa_call *c, int64_t outputs)
{
    const int64_t bytes = outputs * (c->head.varlen ? 1 : c->batch) * c->n * c->heads * c->dim_v *
                          (int64_t)quern_dtype_size(c->head.like.dtype);
    return nsa_passes_of(c, bytes, branches_most);
}

static select_args select_of_pass(const nsa_call *c, int64_t pass)
{
    select_args s = c->select;
    s.q = nsa_of_pass(c, s.q, 2, c->heads, pass);
    s.keys = nsa_of_pass(c, s.keys, 2, c->kv_heads, pass);
    s.lse = nsa_of_pass(c, s.lse, 1, c->heads, pass);
    s.blocks = nsa_of_pass(c, s.blocks, 1, c->list_heads, pass);
    s.count = nsa_of_pass(c, s.count, 1, c->list_heads, pass);
    s.groups = nsa_of_pass(c, s.groups, 1, c->list_heads, pass);
    return s;
}

static bool computes_blocks(const nsa_call *c)
{
    return nsa_branch_on(c, NSA_SLC) && c->params.selection == QUERN_NSA_LIST_COMPUTED;
}

static bool computes_groups(const nsa_call *c)
{
    return nsa_branch_on(c, NSA_CMP) && c->params.max_compressed_groups > 0 &&
           c->params.groups == QUERN_NSA_LIST_COMPUTED;
}

static bool lists_are_wanted(const nsa_call *c)
{
    return op_uses(&c->head, T(block_idx)) || op_uses(&c->head, T(block_count));
}

static void carve_compress(nsa_call *c, arena *a)
{
    nsa_views *v = &c->views;
    const quern_dtype act = c->head.like.dtype;
    const int64_t B = c->head.varlen ? 1 : c->batch;
    const int64_t k_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_k},
                  v_shape[] = {B, c->n_cmp, c->kv_heads, c->dim_v}, offsets[] = {c->batch + 1};
    v->k_b[NSA_CMP] = nsa_given_or_take(c, &v->k_b[NSA_CMP], a, act, 4, k_shape);
    v->v_b[NSA_CMP] = nsa_given_or_take(c, &v->v_b[NSA_CMP], a, act, 4, v_shape);
    if (c->head.varlen)
        c->compressed.cu_kv = nsa_given_or_take(c, &c->compressed.cu_kv, a, QUERN_I32, 1, offsets);
    c->compress = nsa_compress_args(c);
}

static void carve_lists(nsa_call *c, arena *a, bool blocks, bool groups)
{
    nsa_views *v = &c->views;
    const quern_nsa_params *p = &c->params;
    const int64_t B = c->head.varlen ? 1 : c->batch;
    const int64_t idx[] = {B, c->list_heads, c->list_rows, p->num_selected},
                  grp[] = {B, c->list_heads, c->list_rows, p->max_compressed_groups};
    c->use_select = blocks || groups;
    if (blocks) v->block_idx = nsa_given_or_take(c, &v->block_idx, a, QUERN_I32, 4, idx);
    if (groups) v->group_idx = nsa_given_or_take(c, &v->group_idx, a, QUERN_I32, 4, grp);
    c->select = nsa_select_args(c);
    if (!blocks) /* an input, or no branch of this call's */
        c->select.blocks = c->select.count = (quern_tensor){0};
}

/* Where the backend offers the fused stage for this call, outputs of branches go to memory only where the
 * caller wants them. */
static bool carve_fused(nsa_call *c, arena *a, size_t *scratch)
{
    char why[STAGE_WHY_BYTES];
    const arena before = *a;
    const nsa_views views = c->views;
    if (c->head.backend->attend_gate_forward.run == NULL) return false;
    carve_lists(c, a, computes_blocks(c), computes_groups(c));
    for (int i = 0; i < NSA_BRANCHES; i++) {
        c->fused.branch[i] = nsa_branch_args(c, i);
        c->fused.separate[i] = c->separate[i];
    }
    c->fused.branches = c->params.branches;
    c->fused.select = c->select;
    c->fused.select_given = !c->use_select;
    c->fused.lists_wanted = lists_are_wanted(c);
    c->fused.behind_compress = c->use_compress;
    c->fused.gate = nsa_gate_args(c);
    if (!STAGE_TAKES(c->head.backend->attend_gate_forward, &c->head.exec, &c->fused, why)) {
        *a = before;
        c->views = views;
        return false;
    }
    nsa_make_room(scratch, STAGE_WORKSPACE(c->head.backend->attend_gate_forward, &c->head.exec, &c->fused));
    return true;
}

/* Whether a branch's output or LSE is a result of the call. */
static bool branch_is_wanted(const nsa_call *c, int branch)
{
    return op_uses(&c->head, T(o_cmp) + branch) || op_uses(&c->head, T(lse_cmp) + branch);
}

/* Which branches run. For the gate alone, one without keys need not, for it gives 0, and the window branch
 * need not where it sees what the selected branch sees (`all`). Returns whether the latter is so. */
static bool choose_branches(nsa_call *c, bool all)
{
    const bool twins = all && nsa_branch_on(c, NSA_WIN) && c->params.causal && c->params.window >= c->n &&
                       !c->separate[NSA_SLC] && !c->separate[NSA_WIN] && !branch_is_wanted(c, NSA_WIN);
    for (int i = 0; i < NSA_BRANCHES; i++) c->use_attend[i] = nsa_branch_on(c, i);
    if (c->n_cmp == 0 && !branch_is_wanted(c, NSA_CMP)) c->use_attend[NSA_CMP] = false;
    if (twins) c->use_attend[NSA_WIN] = false;
    return twins;
}

/* The stages one by one; bytes[step]: what each needs. */
static void carve_composed(nsa_call *c, arena *a, size_t *bytes)
{
    nsa_views *v = &c->views;
    const bool all = nsa_branch_on(c, NSA_SLC) && nsa_selects_all(c);
    const bool twins = choose_branches(c, all);
    int64_t taken = 0;
    for (int i = 0; i < NSA_BRANCHES; i++)
        if (c->use_attend[i] && v->o_b[i].ndim == 0 && taken++ == 0) v->o_b[i] = v->o;
    c->passes = passes_of(c, taken - 1);
    carve_lists(c, a, computes_blocks(c) && (lists_are_wanted(c) || !all), computes_groups(c));
    const int64_t B = c->head.varlen ? 1 : c->batch, H = c->heads / c->passes;
    const int64_t o_shape[] = {B, c->n, H, c->dim_v}, lse_shape[] = {B, H, c->n};
    for (int i = 0; i < NSA_BRANCHES; i++) {
        if (!c->use_attend[i]) continue;
        v->o_b[i] = nsa_given_or_take(c, &v->o_b[i], a, c->head.like.dtype, 4, o_shape);
        if (i == NSA_CMP && c->use_select && c->params.metric == QUERN_NSA_METRIC_SOFTMAX)
            v->lse_b[i] = nsa_given_or_take(c, &v->lse_b[i], a, QUERN_F32, 3, lse_shape);
        c->attend[i] = nsa_branch_args(c, i);
        if (i == NSA_SLC && all) nsa_attend_all(&c->attend[i]);
        const attend_args part = nsa_attend_of_pass(c, i, 0);
        bytes[NSA_STEP_ATTEND + i] = STAGE_WORKSPACE(c->head.backend->attend_forward, &c->head.exec, &part);
    }
    if (twins) v->o_b[NSA_WIN] = v->o_b[NSA_SLC];
    if (c->use_select) {
        c->select.lse = v->lse_b[NSA_CMP];
        const select_args part = select_of_pass(c, 0);
        bytes[NSA_STEP_SELECT] = STAGE_WORKSPACE(c->head.backend->select, &c->head.exec, &part);
    }
    c->use_gate = true;
    c->gate = nsa_gate_args(c);
    const gate_args part = nsa_gate_of_pass(c, 0);
    bytes[NSA_STEP_GATE] = STAGE_WORKSPACE(c->head.backend->gate_forward, &c->head.exec, &part);
    c->beside = c->head.backend->point != NULL && c->passes == 1 && B * c->n * c->heads <= beside_most;
}

static void carve(nsa_call *c, arena *a)
{
    size_t scratch = 0, bytes[NSA_STEPS] = {0};
    c->use_compress = c->params.compress != QUERN_NSA_COMPRESS_GIVEN &&
                      (nsa_branch_on(c, NSA_CMP) || nsa_branch_on(c, NSA_SLC));
    if (c->use_compress) carve_compress(c, a);
    c->use_fused = carve_fused(c, a, &scratch);
    if (!c->use_fused) carve_composed(c, a, bytes);
    if (c->use_compress)
        bytes[NSA_STEP_COMPRESS] =
            STAGE_WORKSPACE(c->head.backend->compress_forward, &c->head.exec, &c->compress);
    for (int i = 0; i < NSA_STEPS; i++)
        if (c->beside) c->step_scratch[i] = arena_take(a, bytes[i]);
        else nsa_make_room(&scratch, bytes[i]);
    if (c->beside) return;
    c->scratch = arena_take(a, scratch);
    for (int i = 0; i < NSA_STEPS; i++) c->step_scratch[i] = c->scratch;
}

static bool uses_step(const nsa_call *c, int step)
{
    return step == NSA_STEP_COMPRESS ? c->use_compress
           : step == NSA_STEP_SELECT ? c->use_select
           : step == NSA_STEP_GATE   ? c->use_gate
                                     : c->use_attend[step - NSA_STEP_ATTEND];
}

/* Whether select runs after the compressed branch, whose lse it reads. */
static bool selects_late(const nsa_call *c)
{
    return c->params.metric == QUERN_NSA_METRIC_SOFTMAX;
}

/* The steps whose results a step reads, a bit each. */
static uint32_t needs_of(const nsa_call *c, int step)
{
    const uint32_t compress = 1u << NSA_STEP_COMPRESS, select = 1u << NSA_STEP_SELECT,
                   cmp = 1u << (NSA_STEP_ATTEND + NSA_CMP);
    switch (step) {
    case NSA_STEP_SELECT: return selects_late(c) ? compress | cmp : compress;
    case NSA_STEP_ATTEND + NSA_CMP: return selects_late(c) ? compress : compress | select;
    case NSA_STEP_ATTEND + NSA_SLC: return select;
    case NSA_STEP_GATE: return ~0u;
    default: return 0;
    }
}

static quern_status run_step(const nsa_call *c, const op_frame *f, int step, int64_t pass)
{
    const void *scratch = c->step_scratch[step];
    switch (step) {
    case NSA_STEP_COMPRESS: return op_compress_forward(&c->head, f, &c->compress, scratch);
    case NSA_STEP_SELECT: {
        const select_args select = select_of_pass(c, pass);
        return op_select(&c->head, f, &select, scratch);
    }
    case NSA_STEP_GATE: {
        const gate_args gate = nsa_gate_of_pass(c, pass);
        return op_gate_forward(&c->head, f, &gate, scratch);
    }
    default: {
        const attend_args attend = nsa_attend_of_pass(c, step - NSA_STEP_ATTEND, pass);
        return op_attend_forward(&c->head, f, &attend, scratch);
    }
    }
}

/* Every step behind those that it needs; `start`: what those wait for that need none. Compress comes first,
 * so that the window branch takes what it leaves of a GPU. */
static quern_status run_beside(const nsa_call *c, const op_frame *f, const backend_point *start)
{
    const int cmp = NSA_STEP_ATTEND + NSA_CMP;
    const int order[NSA_STEPS] = {NSA_STEP_COMPRESS,
                                  NSA_STEP_ATTEND + NSA_WIN,
                                  selects_late(c) ? cmp : NSA_STEP_SELECT,
                                  selects_late(c) ? NSA_STEP_SELECT : cmp,
                                  NSA_STEP_ATTEND + NSA_SLC,
                                  NSA_STEP_GATE};
    backend_point behind[NSA_STEPS];
    uint32_t done = 0;
    for (int i = 0; i < NSA_STEPS; i++) {
        const uint32_t needs = needs_of(c, order[i]) & done;
        const backend_point *points[NSA_STEPS] = {start};
        int32_t count = 0;
        if (!uses_step(c, order[i])) continue;
        for (int s = 0; s < NSA_STEPS; s++)
            if (needs >> s & 1) points[count++] = &behind[s];
        quern_status status = op_resume(&c->head, f, points, count > 0 ? count : 1);
        if (status == QUERN_OK) status = run_step(c, f, order[i], 0);
        if (status != QUERN_OK) return status;
        if (!op_point(&c->head, f, &behind[order[i]]))
            return error_set(QUERN_ERR_DEVICE, "the stream is no longer recorded");
        done |= 1u << order[i];
    }
    return QUERN_OK;
}

static quern_status run_pass(const nsa_call *c, const op_frame *f, int64_t pass)
{
    const int cmp = NSA_STEP_ATTEND + NSA_CMP;
    const int order[] = {selects_late(c) ? cmp : NSA_STEP_SELECT, selects_late(c) ? NSA_STEP_SELECT : cmp,
                         NSA_STEP_ATTEND + NSA_SLC, NSA_STEP_ATTEND + NSA_WIN, NSA_STEP_GATE};
    quern_status status = QUERN_OK;
    for (size_t i = 0; i < sizeof order / sizeof *order && status == QUERN_OK; i++)
        if (uses_step(c, order[i])) status = run_step(c, f, order[i], pass);
    return status;
}

static quern_status run(const nsa_call *c, const op_frame *f)
{
    backend_point start;
    quern_status status = QUERN_OK;
    if (c->beside && op_point(&c->head, f, &start)) return run_beside(c, f, &start);
    if (c->use_compress) status = run_step(c, f, NSA_STEP_COMPRESS, 0);
    if (status == QUERN_OK && c->use_fused) return op_attend_gate_forward(&c->head, f, &c->fused, c->scratch);
    for (int64_t pass = 0; pass < c->passes && status == QUERN_OK; pass++) status = run_pass(c, f, pass);
    return status;
}

const nsa_operation nsa_forward_operation = {carve, run};
