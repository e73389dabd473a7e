/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.c - checks an NSA call's tensors against one table of rules and normalises them. */
#include "nsa/call.h"

#include "core/context.h"
#include "core/error.h"
#include "core/op.h"
#include "core/view.h"

#include <math.h>

/* Whether an operation uses a tensor: not at all, as an input or output, needed or optional. */
typedef enum role { UNUSED, NEEDED, OPTIONAL, RESULT, OPTIONAL_RESULT } role;

enum { MAX_RULES = 56 };

typedef struct rule_list {
    view_rule rules[MAX_RULES];
    int32_t count;
} rule_list;

static void add(rule_list *list, role r, const char *name, const quern_tensor *tensor, uint32_t dtypes, int32_t ndim, int64_t s0, int64_t s1,
                int64_t s2, int64_t s3)
{
    if (r == UNUSED || ((r == OPTIONAL || r == OPTIONAL_RESULT) && tensor == NULL)) return;
    list->rules[list->count++] = (view_rule){name, tensor, dtypes, ndim, {s0, s1, s2, s3}, false, r == RESULT || r == OPTIONAL_RESULT};
}

bool nsa_branch_on(const nsa_call *call, int branch)
{
    return (call->params.branches & (1u << branch)) != 0;
}

bool nsa_is_backward(nsa_op op)
{
    return op == NSA_BACKWARD || op == NSA_COMPRESS_BACKWARD || op == NSA_ATTEND_BACKWARD || op == NSA_GATE_BACKWARD;
}

/* What each operation does with each tensor. */
typedef struct roles {
    role q, k, k_own[NSA_BRANCHES], cmp, cu_cmp, w, pe, w_gate, gates, block_idx, block_count, group_idx;
    role o, o_b, lse, lse_cmp_in, d_o, d_o_b, d_q, d_k, d_cmp, d_w, d_w_gate, d_gates;
} roles;

static roles roles_of(const nsa_call *c, const quern_nsa_tensors *t)
{
    const quern_nsa_params *p = &c->params;
    const nsa_op op = c->op;
    const bool cmp = nsa_branch_on(c, NSA_CMP), slc = nsa_branch_on(c, NSA_SLC), win = nsa_branch_on(c, NSA_WIN);
    const bool whole = op == NSA_FORWARD || op == NSA_BACKWARD, attends = whole || op == NSA_ATTEND || op == NSA_ATTEND_BACKWARD;
    const bool compresses = op == NSA_COMPRESS || op == NSA_COMPRESS_BACKWARD || (whole && p->compress != QUERN_NSA_COMPRESS_GIVEN && (cmp || slc));
    const bool selects = op == NSA_SELECT || (op == NSA_FORWARD && slc && p->selection == QUERN_NSA_LIST_COMPUTED);
    const bool groups = p->max_compressed_groups > 0 && cmp && attends;
    const bool weights = p->gate == QUERN_NSA_GATE_WEIGHTS, given = p->gate == QUERN_NSA_GATE_GIVEN;
    roles r = {0};
    if (op == NSA_FORWARD || op == NSA_BACKWARD || op == NSA_SELECT || op == NSA_ATTEND || op == NSA_ATTEND_BACKWARD || op == NSA_GATES) r.q = NEEDED;
    if (op == NSA_GATE || op == NSA_GATE_BACKWARD) r.q = weights ? NEEDED : OPTIONAL;
    const bool own_slc = t->k_slc != NULL || t->v_slc != NULL, own_win = t->k_win != NULL || t->v_win != NULL;
    const bool reads_k = compresses || (attends && ((slc && !own_slc) || (win && !own_win)));
    r.k = reads_k ? NEEDED : UNUSED;
    if (attends && slc) r.k_own[NSA_SLC] = own_slc ? NEEDED : UNUSED;
    if (attends && win) r.k_own[NSA_WIN] = own_win ? NEEDED : UNUSED;
    if (op == NSA_COMPRESS) r.cmp = RESULT;
    else if (op == NSA_FORWARD) r.cmp = compresses ? OPTIONAL_RESULT : (cmp || selects) ? NEEDED : UNUSED;
    else if (op == NSA_SELECT || (op == NSA_BACKWARD && cmp) || ((op == NSA_ATTEND || op == NSA_ATTEND_BACKWARD) && cmp)) r.cmp = NEEDED;
    if (op == NSA_COMPRESS) r.cu_cmp = c->packed ? RESULT : UNUSED;
    else if (op == NSA_FORWARD && compresses) r.cu_cmp = c->packed ? OPTIONAL_RESULT : UNUSED;
    else if (c->packed && (r.cmp == NEEDED || op == NSA_COMPRESS_BACKWARD)) r.cu_cmp = NEEDED;
    if (compresses) {
        r.w = p->compress == QUERN_NSA_COMPRESS_LINEAR ? NEEDED : OPTIONAL;
        r.pe = p->compress == QUERN_NSA_COMPRESS_LINEAR ? OPTIONAL : UNUSED;
    }
    if (weights && (whole || op == NSA_GATE || op == NSA_GATE_BACKWARD)) r.w_gate = NEEDED;
    if (op == NSA_GATES) r.w_gate = NEEDED, r.gates = RESULT;
    if (op == NSA_COMBINE) r.gates = OPTIONAL;
    if (op == NSA_FORWARD || op == NSA_GATE) r.gates = given ? NEEDED : OPTIONAL_RESULT;
    if (op == NSA_BACKWARD || op == NSA_GATE_BACKWARD) r.gates = p->gate == QUERN_NSA_GATE_NONE ? OPTIONAL : NEEDED;
    if (selects) r.block_idx = op == NSA_SELECT ? RESULT : OPTIONAL_RESULT, r.block_count = OPTIONAL_RESULT;
    else if (attends && slc) r.block_idx = NEEDED;
    if (groups) r.group_idx = op == NSA_FORWARD && p->groups == QUERN_NSA_LIST_COMPUTED ? OPTIONAL_RESULT : NEEDED;
    if (op == NSA_SELECT && p->max_compressed_groups > 0) r.group_idx = OPTIONAL_RESULT;
    if (op == NSA_FORWARD || op == NSA_COMBINE || op == NSA_GATE) r.o = RESULT;
    if (op == NSA_FORWARD) r.o_b = OPTIONAL_RESULT, r.lse = OPTIONAL_RESULT;
    if (op == NSA_ATTEND) r.o_b = RESULT, r.lse = OPTIONAL_RESULT;
    if (op == NSA_BACKWARD) r.o_b = OPTIONAL, r.lse = NEEDED;
    if (op == NSA_ATTEND_BACKWARD) r.o_b = NEEDED, r.lse = NEEDED;
    if (op == NSA_COMBINE || op == NSA_GATE || op == NSA_GATE_BACKWARD) r.o_b = NEEDED;
    if (op == NSA_SELECT && p->metric == QUERN_NSA_METRIC_SOFTMAX) r.lse_cmp_in = OPTIONAL;
    if (op == NSA_BACKWARD || op == NSA_GATE_BACKWARD) {
        r.d_o = NEEDED;
        if (weights) r.d_w_gate = OPTIONAL_RESULT;
        else r.d_gates = OPTIONAL_RESULT;
    }
    if (op == NSA_ATTEND_BACKWARD) r.d_o_b = NEEDED;
    if (op == NSA_GATE_BACKWARD) r.d_o_b = OPTIONAL_RESULT;
    if (op == NSA_BACKWARD || op == NSA_ATTEND_BACKWARD) r.d_q = RESULT;
    if (op == NSA_GATE_BACKWARD) r.d_q = weights ? OPTIONAL_RESULT : UNUSED;
    if (reads_k && nsa_is_backward(op)) r.d_k = op == NSA_COMPRESS_BACKWARD ? OPTIONAL_RESULT : RESULT;
    if (op == NSA_ATTEND_BACKWARD && cmp) r.d_cmp = RESULT;
    if (op == NSA_BACKWARD && cmp && p->compress == QUERN_NSA_COMPRESS_GIVEN) r.d_cmp = RESULT;
    if (op == NSA_COMPRESS_BACKWARD) r.d_cmp = NEEDED;
    if (compresses && nsa_is_backward(op)) r.d_w = OPTIONAL_RESULT;
    return r;
}

static const quern_tensor *first_of(const quern_tensor *const *list, const char *const *names, int32_t n, const char **name)
{
    for (int32_t i = 0; i < n; i++) {
        *name = names[i];
        if (list[i] != NULL) return list[i];
    }
    return NULL;
}

/* Compressed entries of a sequence of n tokens. */
static int64_t entries_of(const quern_nsa_params *p, int64_t n)
{
    return n >= p->block_size ? (n - p->block_size) / p->stride + 1 : 0;
}

/* The extents that all rules are written in, from the tensors the operation cannot do without. */
static quern_status find_extents(nsa_call *c, const quern_nsa_tensors *t, const roles *r)
{
    const quern_tensor *const queries[] = {r->q != UNUSED ? t->q : NULL, r->o_b != UNUSED ? t->o_cmp : NULL, r->o_b != UNUSED ? t->o_slc : NULL,
                                           r->o_b != UNUSED ? t->o_win : NULL, r->o != UNUSED ? t->o : NULL};
    const quern_tensor *const keys[] = {r->k != UNUSED ? t->k : NULL, r->k_own[NSA_SLC] != UNUSED ? t->k_slc : NULL,
                                        r->k_own[NSA_WIN] != UNUSED ? t->k_win : NULL, r->cmp != UNUSED ? t->k_cmp : NULL};
    const quern_tensor *const values[] = {r->k != UNUSED ? t->v : NULL, r->k_own[NSA_SLC] != UNUSED ? t->v_slc : NULL,
                                          r->k_own[NSA_WIN] != UNUSED ? t->v_win : NULL, r->cmp != UNUSED ? t->v_cmp : NULL,
                                          r->o != UNUSED ? t->o : NULL, r->o_b != UNUSED ? t->o_cmp : NULL, r->o_b != UNUSED ? t->o_slc : NULL,
                                          r->o_b != UNUSED ? t->o_win : NULL, r->d_o != UNUSED ? t->d_o : NULL};
    static const char *const query_names[] = {"q", "o_cmp", "o_slc", "o_win", "o"}, *const key_names[] = {"k", "k_slc", "k_win", "k_cmp"};
    static const char *const value_names[] = {"v", "v_slc", "v_win", "v_cmp", "o", "o_cmp", "o_slc", "o_win", "d_o"};
    const char *q_name, *k_name, *v_name;
    const quern_tensor *q = first_of(queries, query_names, 5, &q_name), *k = first_of(keys, key_names, 4, &k_name),
                       *v = first_of(values, value_names, 9, &v_name);
    const bool compress_alone = c->op == NSA_COMPRESS || c->op == NSA_COMPRESS_BACKWARD;
    const quern_tensor *lead = compress_alone ? k : q;
    if (lead == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", compress_alone ? "k" : r->q == NEEDED ? "q" : "o_cmp");
    const int32_t ndim = c->packed ? 3 : 4, at = c->packed ? 0 : 1;
    const quern_tensor *const all[] = {lead, q, k, v};
    const char *const names[] = {compress_alone ? k_name : q_name, q_name, k_name, v_name};
    for (int i = 0; i < 4; i++) {
        if (all[i] == NULL) continue;
        const view_rule rule = {names[i], all[i], VIEW_ACTIVATION, ndim, {VIEW_ANY, VIEW_ANY, VIEW_ANY, VIEW_ANY}, false, false};
        const quern_status status = view_check(&rule, lead, false);
        if (status != QUERN_OK) return status;
    }
    c->like = *lead;
    c->n = lead->shape[at];
    c->batch = c->packed ? t->cu_seqlens->shape[0] - 1 : lead->shape[0];
    c->heads = q != NULL ? q->shape[at + 1] : 0;
    c->kv_heads = k != NULL ? k->shape[at + 1] : 0;
    c->dim_k = r->q != UNUSED && t->q != NULL ? t->q->shape[at + 2] : k != NULL ? k->shape[at + 2] : 0;
    c->dim_v = v != NULL ? v->shape[at + 2] : 0;
    if (c->n > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%lld tokens: at most %d are accepted", (long long)c->n, INT32_MAX);
    quern_status status = QUERN_OK;
    if (r->q != UNUSED && t->q != NULL) status = view_check_head_dim("q", c->dim_k);
    if (status == QUERN_OK && v != NULL) status = view_check_head_dim(v_name, c->dim_v);
    if (status == QUERN_OK && q != NULL && k != NULL) status = view_check_heads(c->heads, c->kv_heads);
    if (status != QUERN_OK) return status;
    const quern_nsa_params *p = &c->params;
    c->n_cmp = c->packed ? c->n / p->stride : entries_of(p, c->n);
    c->list_heads = p->scope == QUERN_NSA_SCOPE_HEAD ? c->heads : c->kv_heads;
    c->list_rows = c->packed ? c->n / p->tile + c->batch : (c->n + p->tile - 1) / p->tile;
    return QUERN_OK;
}

static void add_rules(const nsa_call *c, const quern_nsa_tensors *t, const roles *r, rule_list *list)
{
    const quern_nsa_params *p = &c->params;
    const uint32_t act = 1u << c->like.dtype, weight = act | VIEW_F32;
    const int64_t B = c->batch, N = c->n, H = c->heads, Hkv = c->kv_heads, D = c->dim_k, Dv = c->dim_v, Nc = c->n_cmp, l = p->block_size;
#define ACT(role_, field, dtypes, n, h, d)                                                                                      \
    c->packed ? add(list, role_, #field, t->field, dtypes, 3, n, h, d, 0) : add(list, role_, #field, t->field, dtypes, 4, B, n, h, d)
    ACT(r->q, q, act, N, H, D);
    ACT(r->k, k, act, N, Hkv, D), ACT(r->k, v, act, N, Hkv, Dv);
    ACT(r->k_own[NSA_SLC], k_slc, act, N, Hkv, D), ACT(r->k_own[NSA_SLC], v_slc, act, N, Hkv, Dv);
    ACT(r->k_own[NSA_WIN], k_win, act, N, Hkv, D), ACT(r->k_own[NSA_WIN], v_win, act, N, Hkv, Dv);
    ACT(r->cmp, k_cmp, act, Nc, Hkv, D);
    if (c->op != NSA_SELECT) ACT(r->cmp, v_cmp, act, Nc, Hkv, Dv);
    if (c->packed) {
        add(list, NEEDED, "cu_seqlens", t->cu_seqlens, VIEW_I32, 1, B + 1, 0, 0, 0);
        add(list, r->cu_cmp, "cu_seqlens_cmp", t->cu_seqlens_cmp, VIEW_I32, 1, B + 1, 0, 0, 0);
    }
    const bool linear = p->compress == QUERN_NSA_COMPRESS_LINEAR;
    add(list, r->w, "w_k", t->w_k, weight, 3, Hkv, linear ? l * D : D, D, 0);
    add(list, r->w, "w_v", t->w_v, weight, 3, Hkv, linear ? l * Dv : Dv, Dv, 0);
    add(list, r->pe, "pe_k", t->pe_k, weight, 3, Hkv, l, D, 0);
    add(list, r->pe, "pe_v", t->pe_v, weight, 3, Hkv, l, Dv, 0);
    add(list, r->w_gate, "w_gate", t->w_gate, weight, 3, H, 3, D, 0);
    ACT(r->gates, gates, VIEW_F32, N, H, 3);
#define LIST(role_, field, dims, k)                                                                                                       \
    c->packed ? add(list, role_, #field, t->field, VIEW_I32, (dims) - 1, c->list_heads, c->list_rows, k, 0)                                 \
              : add(list, role_, #field, t->field, VIEW_I32, dims, B, c->list_heads, c->list_rows, k)
    LIST(r->block_idx, block_idx, 4, p->num_selected);
    LIST(r->block_count, block_count, 3, 0);
    LIST(r->group_idx, group_idx, 4, p->max_compressed_groups);
#undef LIST
    ACT(r->o, o, act, N, H, Dv);
#define STAT(role_, field)                                                                                                                           \
    c->packed ? add(list, role_, #field, t->field, VIEW_F32, 2, H, N, 0, 0) : add(list, role_, #field, t->field, VIEW_F32, 3, B, H, N, 0)
    const bool gates_only = c->op == NSA_COMBINE || c->op == NSA_GATE || c->op == NSA_GATE_BACKWARD; /* these take any subset as given */
#define BRANCH(i, role_) (gates_only ? ((role_) == NEEDED ? OPTIONAL : (role_)) : nsa_branch_on(c, i) ? (role_) : UNUSED)
    ACT(BRANCH(NSA_CMP, r->o_b), o_cmp, act, N, H, Dv), ACT(BRANCH(NSA_SLC, r->o_b), o_slc, act, N, H, Dv),
        ACT(BRANCH(NSA_WIN, r->o_b), o_win, act, N, H, Dv);
    STAT(r->lse_cmp_in, lse_cmp);
    STAT(BRANCH(NSA_CMP, r->lse), lse_cmp), STAT(BRANCH(NSA_SLC, r->lse), lse_slc), STAT(BRANCH(NSA_WIN, r->lse), lse_win);
    ACT(r->d_o, d_o, act, N, H, Dv);
    ACT(BRANCH(NSA_CMP, r->d_o_b), d_o_cmp, act, N, H, Dv), ACT(BRANCH(NSA_SLC, r->d_o_b), d_o_slc, act, N, H, Dv),
        ACT(BRANCH(NSA_WIN, r->d_o_b), d_o_win, act, N, H, Dv);
#undef STAT
#undef BRANCH
    ACT(r->d_q, d_q, act, N, H, D);
    ACT(r->d_k, d_k, act, N, Hkv, D), ACT(r->d_k, d_v, act, N, Hkv, Dv);
    if (nsa_is_backward(c->op)) {
        const role own_slc = r->k_own[NSA_SLC] == NEEDED ? RESULT : UNUSED, own_win = r->k_own[NSA_WIN] == NEEDED ? RESULT : UNUSED;
        ACT(own_slc, d_k_slc, act, N, Hkv, D), ACT(own_slc, d_v_slc, act, N, Hkv, Dv);
        ACT(own_win, d_k_win, act, N, Hkv, D), ACT(own_win, d_v_win, act, N, Hkv, Dv);
    }
    ACT(r->d_cmp, d_k_cmp, act, Nc, Hkv, D), ACT(r->d_cmp, d_v_cmp, act, Nc, Hkv, Dv);
    add(list, r->d_w != UNUSED && t->w_k != NULL ? r->d_w : UNUSED, "d_w_k", t->d_w_k, VIEW_F32, 3, Hkv, linear ? l * D : D, D, 0);
    add(list, r->d_w != UNUSED && t->w_v != NULL ? r->d_w : UNUSED, "d_w_v", t->d_w_v, VIEW_F32, 3, Hkv, linear ? l * Dv : Dv, Dv, 0);
    add(list, r->d_w != UNUSED && t->pe_k != NULL ? r->d_w : UNUSED, "d_pe_k", t->d_pe_k, VIEW_F32, 3, Hkv, l, D, 0);
    add(list, r->d_w != UNUSED && t->pe_v != NULL ? r->d_w : UNUSED, "d_pe_v", t->d_pe_v, VIEW_F32, 3, Hkv, l, Dv, 0);
    add(list, r->d_w_gate, "d_w_gate", t->d_w_gate, VIEW_F32, 3, H, 3, D, 0);
    ACT(r->d_gates, d_gates, VIEW_F32, N, H, 3);
#undef ACT
}

static void fill_views(nsa_call *c, const quern_nsa_tensors *t, const roles *r)
{
    quern_tensor (*const view)(const quern_tensor *) = c->packed ? view_with_batch : view_or_absent;
    nsa_views *v = &c->views;
#define USE(role_, tensor) ((role_) != UNUSED ? view(tensor) : (quern_tensor){0})
#define USE_FLAT(role_, tensor) ((role_) != UNUSED ? view_or_absent(tensor) : (quern_tensor){0})
    v->q = USE(r->q, t->q), v->k = USE(r->k, t->k), v->v = USE(r->k, t->v);
    v->k_b[NSA_CMP] = USE(r->cmp, t->k_cmp);
    v->v_b[NSA_CMP] = USE(c->op == NSA_SELECT ? UNUSED : r->cmp, t->v_cmp);
    c->separate[NSA_SLC] = r->k_own[NSA_SLC] != UNUSED, c->separate[NSA_WIN] = r->k_own[NSA_WIN] != UNUSED;
    v->k_b[NSA_SLC] = c->separate[NSA_SLC] ? view(t->k_slc) : v->k, v->v_b[NSA_SLC] = c->separate[NSA_SLC] ? view(t->v_slc) : v->v;
    v->k_b[NSA_WIN] = c->separate[NSA_WIN] ? view(t->k_win) : v->k, v->v_b[NSA_WIN] = c->separate[NSA_WIN] ? view(t->v_win) : v->v;
    v->w_k = USE_FLAT(r->w, t->w_k), v->w_v = USE_FLAT(r->w, t->w_v), v->pe_k = USE_FLAT(r->pe, t->pe_k), v->pe_v = USE_FLAT(r->pe, t->pe_v);
    v->w_gate = USE_FLAT(r->w_gate, t->w_gate), v->gates = USE(r->gates, t->gates);
    if (nsa_is_backward(c->op) && c->params.gate == QUERN_NSA_GATE_NONE) v->gates = (quern_tensor){0}; /* an input that says nothing new */
    v->block_idx = USE(r->block_idx, t->block_idx), v->block_count = USE(r->block_count, t->block_count),
    v->group_idx = USE(r->group_idx, t->group_idx);
    const quern_tensor *const o_b[] = {t->o_cmp, t->o_slc, t->o_win}, *const lse[] = {t->lse_cmp, t->lse_slc, t->lse_win};
    const quern_tensor *const d_o_b[] = {t->d_o_cmp, t->d_o_slc, t->d_o_win};
    v->o = USE(r->o, t->o), v->d_o = USE(r->d_o, t->d_o);
    for (int i = 0; i < NSA_BRANCHES; i++) {
        v->o_b[i] = USE(r->o_b, o_b[i]), v->lse_b[i] = USE(r->lse, lse[i]), v->d_o_b[i] = USE(r->d_o_b, d_o_b[i]);
    }
    if (r->lse_cmp_in != UNUSED) v->lse_b[NSA_CMP] = view(t->lse_cmp);
    const bool backward = nsa_is_backward(c->op);
    v->d_q = USE(r->d_q, t->d_q), v->d_k = USE(r->d_k, t->d_k), v->d_v = USE(r->d_k, t->d_v);
    v->d_k_b[NSA_CMP] = USE(r->d_cmp, t->d_k_cmp), v->d_v_b[NSA_CMP] = USE(r->d_cmp, t->d_v_cmp);
    if (backward && c->separate[NSA_SLC]) v->d_k_b[NSA_SLC] = view(t->d_k_slc), v->d_v_b[NSA_SLC] = view(t->d_v_slc);
    if (backward && c->separate[NSA_WIN]) v->d_k_b[NSA_WIN] = view(t->d_k_win), v->d_v_b[NSA_WIN] = view(t->d_v_win);
    v->d_w_k = USE_FLAT(r->d_w, t->d_w_k), v->d_w_v = USE_FLAT(r->d_w, t->d_w_v), v->d_pe_k = USE_FLAT(r->d_w, t->d_pe_k),
    v->d_pe_v = USE_FLAT(r->d_w, t->d_pe_v);
    v->d_w_gate = USE_FLAT(r->d_w_gate, t->d_w_gate), v->d_gates = USE(r->d_gates, t->d_gates);
#undef USE
#undef USE_FLAT
}

/* A tensor that means nothing beside these parameters: the caller expects something that the call would not do.
 * (What another operation of the same struct uses is left alone.) */
static quern_status check_strangers(const nsa_call *c, const quern_nsa_tensors *t)
{
    const quern_nsa_params *p = &c->params;
    static const char *const kinds[] = {"mean", "linear", "given"}, *const gates[] = {"none", "weights", "given"};
    const bool whole = c->op == NSA_FORWARD || c->op == NSA_BACKWARD, compress_alone = c->op == NSA_COMPRESS || c->op == NSA_COMPRESS_BACKWARD;
    const bool linear = p->compress == QUERN_NSA_COMPRESS_LINEAR, given = p->compress == QUERN_NSA_COMPRESS_GIVEN;
    const bool compresses = whole || compress_alone, weighs = p->gate == QUERN_NSA_GATE_WEIGHTS;
    const bool gated = c->op == NSA_BACKWARD || c->op == NSA_GATE_BACKWARD;
    if (compress_alone && given) return error_set(QUERN_ERR_INVALID_ARGUMENT, "compress is given: mean or linear is accepted to compress alone");
    const struct {
        bool applies;
        const quern_tensor *tensor;
        const char *name, *parameter, *value, *accepted;
    } strangers[] = {
        {compresses && !linear, t->pe_k, "pe_k", "compress", kinds[p->compress], "linear"},
        {compresses && !linear, t->pe_v, "pe_v", "compress", kinds[p->compress], "linear"},
        {whole && given, t->w_k, "w_k", "compress", kinds[p->compress], "mean or linear"},
        {whole && given, t->w_v, "w_v", "compress", kinds[p->compress], "mean or linear"},
        {c->op == NSA_BACKWARD && !given, t->d_k_cmp, "d_k_cmp", "compress", kinds[p->compress], "given"},
        {c->op == NSA_BACKWARD && !given, t->d_v_cmp, "d_v_cmp", "compress", kinds[p->compress], "given"},
        {(whole || c->op == NSA_GATE || gated) && !weighs, t->w_gate, "w_gate", "gate", gates[p->gate], "weights"},
        {gated && !weighs, t->d_w_gate, "d_w_gate", "gate", gates[p->gate], "weights"},
        {gated && weighs, t->d_gates, "d_gates", "gate", gates[p->gate], "given or none"},
    };
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++)
        if (strangers[i].applies && strangers[i].tensor != NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given with %s %s: with it %s is accepted", strangers[i].name, strangers[i].parameter,
                             strangers[i].value, strangers[i].accepted);
    return QUERN_OK;
}

/* A gradient of a tensor that was not given. */
static quern_status check_orphans(const nsa_call *c, const quern_nsa_tensors *t)
{
    const bool compresses = c->op == NSA_BACKWARD || c->op == NSA_COMPRESS_BACKWARD, attends = c->op == NSA_BACKWARD || c->op == NSA_ATTEND_BACKWARD;
    const struct {
        bool applies;
        const quern_tensor *gradient, *of;
        const char *name;
    } orphans[] = {
        {compresses, t->d_w_k, t->w_k, "w_k"}, {compresses, t->d_w_v, t->w_v, "w_v"}, {compresses, t->d_pe_k, t->pe_k, "pe_k"},
        {compresses, t->d_pe_v, t->pe_v, "pe_v"}, {attends, t->d_k_slc, t->k_slc, "k_slc"}, {attends, t->d_v_slc, t->v_slc, "v_slc"},
        {attends, t->d_k_win, t->k_win, "k_win"}, {attends, t->d_v_win, t->v_win, "v_win"},
    };
    for (size_t i = 0; i < sizeof orphans / sizeof *orphans; i++)
        if (orphans[i].applies && orphans[i].gradient != NULL && orphans[i].of == NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "d_%s is given and %s is NULL: both or no d_%s are accepted", orphans[i].name,
                             orphans[i].name, orphans[i].name);
    return QUERN_OK;
}

/* Borders of compressed rows that are handed in: every sequence has as many entries as its length makes. */
static quern_status check_entries(const nsa_call *c, const quern_nsa_tensors *t)
{
    const quern_nsa_params *p = &c->params;
    const quern_status status = view_check_borders(t->cu_seqlens_cmp, "cu_seqlens_cmp", c->n_cmp);
    if (status != QUERN_OK || t->cu_seqlens_cmp->device != QUERN_CPU) return status;
    const int32_t *tokens = t->cu_seqlens->data, *entries = t->cu_seqlens_cmp->data;
    for (int64_t b = 0; b < c->batch; b++) {
        const int64_t n = (int64_t)tokens[b + 1] - tokens[b], expected = entries_of(p, n);
        if (entries[b + 1] - entries[b] != expected)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "cu_seqlens_cmp[%lld] is %d after %d: %lld entries of the sequence's %lld tokens are accepted",
                             (long long)b + 1, entries[b + 1], entries[b], (long long)expected, (long long)n);
    }
    return QUERN_OK;
}

/* Whether the workspace's largest tensors can be counted in 64 bits. */
static quern_status check_products(const nsa_call *c)
{
    const int64_t per_query[] = {c->heads, 256}, lists[] = {c->list_heads, c->list_rows, c->params.num_selected};
    int64_t rows = c->packed ? c->n : 0, entries = c->packed ? 1 : c->batch;
    bool fits = c->packed || !__builtin_mul_overflow(c->batch, c->n, &rows);
    for (int i = 0; i < 2; i++) fits = fits && !__builtin_mul_overflow(rows, per_query[i], &rows);
    for (int i = 0; i < 3; i++) fits = fits && !__builtin_mul_overflow(entries, lists[i], &entries);
    if (fits && rows <= INT64_MAX / 64 && entries <= INT64_MAX / 64) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "batch %lld, %lld tokens, %lld heads, num_selected %lld: the sizes overflow: products below 2^57 are accepted",
                     (long long)c->batch, (long long)c->n, (long long)c->heads, (long long)c->params.num_selected);
}

quern_status nsa_plan(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params, const quern_nsa_tensors *tensors, nsa_op op, bool run,
                      nsa_call *c)
{
    quern_status status;
    *c = (nsa_call){.op = op};
    if (ctx == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = nsa_check_params(params, op, &c->params)) != QUERN_OK) return status;
    quern_exec how;
    quern_nsa_tensors own = QUERN_NSA_TENSORS_INIT;
    const quern_nsa_tensors *const t = &own;
    if ((status = op_struct(&own, tensors, "tensors", "QUERN_NSA_TENSORS_INIT")) != QUERN_OK || (status = op_exec(exec, &how)) != QUERN_OK) return status;
    c->packed = t->cu_seqlens != NULL;
    if (c->packed && (t->cu_seqlens->ndim != 1 || t->cu_seqlens->shape[0] < 1))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "cu_seqlens has %d dimensions of %lld: one dimension of batch + 1 borders is accepted",
                         t->cu_seqlens->ndim, t->cu_seqlens->ndim == 1 ? (long long)t->cu_seqlens->shape[0] : 0);
    if (c->packed && t->cu_seqlens->shape[0] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "cu_seqlens.shape[0] is %lld: 1 to %d is accepted", (long long)t->cu_seqlens->shape[0],
                         INT32_MAX);
    if ((status = check_strangers(c, t)) != QUERN_OK) return status;
    const roles r = roles_of(c, t);
    if ((status = find_extents(c, t, &r)) != QUERN_OK) return status;
    if ((status = check_products(c)) != QUERN_OK) return status;
    rule_list list = {.count = 0};
    add_rules(c, t, &r, &list);
    add(&list, OPTIONAL_RESULT, "exec.status", how.status, VIEW_I32, 1, 1, 0, 0, 0);
    if ((status = view_check_all(list.rules, list.count, &c->like, run)) != QUERN_OK) return status;
    if ((status = check_orphans(c, t)) != QUERN_OK) return status;
    if (run && c->packed && (status = view_check_borders(t->cu_seqlens, "cu_seqlens", c->n)) != QUERN_OK) return status;
    if (run && c->packed && r.cu_cmp == NEEDED && (status = check_entries(c, t)) != QUERN_OK) return status;
    if (c->params.scale == 0.0f && c->dim_k > 0) c->params.scale = 1.0f / sqrtf((float)c->dim_k);
    c->backend = context_backend(ctx, c->like.device, c->like.device_id, how.stream, &c->exec);
    if (c->backend == NULL) return error_status();
    fill_views(c, t, &r);
    c->tokens = (stage_seqs){c->batch, c->n, c->n, view_or_absent(t->cu_seqlens), view_or_absent(t->cu_seqlens)};
    c->compressed = (stage_seqs){c->batch, c->n, c->n_cmp, view_or_absent(t->cu_seqlens),
                                 r.cu_cmp != UNUSED ? view_or_absent(t->cu_seqlens_cmp) : (quern_tensor){0}};
    const quern_nsa_params *p = &c->params;
    c->check = (check_args){.seqs = c->compressed, .tile = p->tile, .select_block = p->select_block, .block_size = p->block_size, .stride = p->stride,
                            .status = view_or_absent(how.status)};
    if (r.cu_cmp != NEEDED) c->check.seqs.cu_kv = (quern_tensor){0};
    if (r.block_idx == NEEDED) c->check.blocks = c->views.block_idx;
    if (r.group_idx == NEEDED) c->check.groups = c->views.group_idx;
    return QUERN_OK;
}
