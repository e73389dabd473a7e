/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* roles.c - what each NSA operation does with each tensor, by the parameters and by which tensors are
 * there. */
#include "core/error.h"
#include "nsa/call.h"
#include "nsa/schema.h"

#include <stdio.h>

static const int32_t o_b[] = {T(o_cmp), T(o_slc), T(o_win)}, lse_b[] = {T(lse_cmp), T(lse_slc), T(lse_win)};
static const int32_t d_o_b[] = {T(d_o_cmp), T(d_o_slc), T(d_o_win)};

/* What decides the roles of all tensors. */
typedef struct context {
    nsa_op op;
    const quern_nsa_params *p;
    /* the branch is computed; it has a pair of keys and values of its own */
    bool on[NSA_BRANCHES], own[NSA_BRANCHES];
    bool whole, backward, attends, compresses, selects, indexes, reads_k, weights;
} context;

static context context_of(const op_call *call)
{
    const quern_nsa_params *p = &((const nsa_call *)call)->params;
    const nsa_op op = (nsa_op)call->operation;
    context x = {.op = op, .p = p};
    for (int i = 0; i < NSA_BRANCHES; i++) x.on[i] = (p->branches & (1u << i)) != 0;
    x.whole = op == NSA_FORWARD || op == NSA_BACKWARD;
    x.backward = nsa_is_backward(op);
    x.attends = x.whole || op == NSA_ATTEND || op == NSA_ATTEND_BACKWARD;
    x.compresses = op == NSA_COMPRESS || op == NSA_COMPRESS_BACKWARD ||
                   (x.whole && p->compress != QUERN_NSA_COMPRESS_GIVEN && nsa_has_entries(p));
    x.selects = op == NSA_SELECT || (op == NSA_FORWARD && nsa_scores_entries(p));
    x.indexes = op == NSA_FORWARD && x.on[NSA_SLC] && p->selection == QUERN_NSA_LIST_INDEXED;
    x.own[NSA_SLC] = call->given[T(k_slc)] != NULL || call->given[T(v_slc)] != NULL;
    x.own[NSA_WIN] = call->given[T(k_win)] != NULL || call->given[T(v_win)] != NULL;
    x.reads_k = x.compresses;
    for (int i = NSA_SLC; i <= NSA_WIN; i++) x.reads_k = x.reads_k || (x.attends && x.on[i] && !x.own[i]);
    x.weights = p->gate == QUERN_NSA_GATE_WEIGHTS;
    return x;
}

static void set_pair(uint8_t *r, int32_t k, op_role role)
{
    r[k] = (uint8_t)role;
    r[k + 1] = (uint8_t)role;
}

/* Queries, keys and values, compressed ones, and the offsets of these. */
static void roles_of_keys(const context *x, const op_call *call, uint8_t *r)
{
    const nsa_op op = x->op;
    if (x->attends || op == NSA_SELECT || op == NSA_GATES ||
        ((op == NSA_GATE || op == NSA_GATE_BACKWARD) && x->weights))
        r[T(q)] = OP_NEEDED;
    if (x->reads_k) set_pair(r, T(k), OP_NEEDED);
    if (x->attends && x->on[NSA_SLC] && x->own[NSA_SLC]) set_pair(r, T(k_slc), OP_NEEDED);
    if (x->attends && x->on[NSA_WIN] && x->own[NSA_WIN]) set_pair(r, T(k_win), OP_NEEDED);
    op_role cmp = OP_UNUSED, cu = OP_UNUSED;
    if (op == NSA_COMPRESS) cmp = OP_RESULT;
    else if (op == NSA_FORWARD)
        cmp = x->compresses ? OP_OPTIONAL_RESULT : x->on[NSA_CMP] || x->selects ? OP_NEEDED : OP_UNUSED;
    else if (op == NSA_SELECT || (x->attends && x->on[NSA_CMP])) cmp = OP_NEEDED;
    if (op == NSA_COMPRESS) cu = OP_RESULT;
    else if (op == NSA_FORWARD && x->compresses) cu = OP_OPTIONAL_RESULT;
    else if (cmp == OP_NEEDED || op == NSA_COMPRESS_BACKWARD) cu = OP_NEEDED;
    set_pair(r, T(k_cmp), cmp);
    if (op == NSA_SELECT) r[T(v_cmp)] = OP_UNUSED;
    if (call->varlen) {
        r[T(cu_seqlens)] = OP_NEEDED;
        r[T(cu_seqlens_cmp)] = (uint8_t)cu;
    }
}

static void roles_of_weights(const context *x, uint8_t *r)
{
    const bool linear = x->p->compress == QUERN_NSA_COMPRESS_LINEAR,
               given = x->p->compress == QUERN_NSA_COMPRESS_GIVEN;
    const bool gate_mode = x->op == NSA_GATE || x->op == NSA_GATE_BACKWARD;
    if (x->compresses) set_pair(r, T(w_k), linear ? OP_NEEDED : OP_OPTIONAL);
    if (x->compresses && linear) set_pair(r, T(pe_k), OP_OPTIONAL);
    if (x->whole && given) set_pair(r, T(w_k), OP_REFUSED);
    if ((x->whole || x->op == NSA_COMPRESS || x->op == NSA_COMPRESS_BACKWARD) && !linear)
        set_pair(r, T(pe_k), OP_REFUSED);
    if (x->whole || gate_mode) r[T(w_gate)] = x->weights ? OP_NEEDED : OP_REFUSED;
    if (x->op == NSA_GATES) r[T(w_gate)] = OP_NEEDED;
    if (x->op == NSA_GATES) r[T(gates)] = OP_RESULT;
    if (x->op == NSA_COMBINE) r[T(gates)] = OP_OPTIONAL;
    if (x->op == NSA_FORWARD || x->op == NSA_GATE)
        r[T(gates)] = x->p->gate == QUERN_NSA_GATE_GIVEN ? OP_NEEDED : OP_OPTIONAL_RESULT;
    if (x->op == NSA_BACKWARD || x->op == NSA_GATE_BACKWARD)
        r[T(gates)] = x->p->gate == QUERN_NSA_GATE_NONE ? OP_UNUSED : OP_NEEDED;
    if (x->whole && x->p->ungated) r[T(gates)] = OP_UNUSED;
}

static void roles_of_lists(const context *x, uint8_t *r)
{
    const bool groups = x->p->max_compressed_groups > 0;
    if (x->indexes) r[T(q_index)] = r[T(k_index)] = OP_NEEDED;
    if (x->selects || x->indexes) {
        r[T(block_idx)] = x->op == NSA_SELECT ? OP_RESULT : OP_OPTIONAL_RESULT;
        r[T(block_count)] = OP_OPTIONAL_RESULT;
    } else if (x->attends && x->on[NSA_SLC]) {
        r[T(block_idx)] = OP_NEEDED;
    }
    if (groups && x->on[NSA_CMP] && x->attends)
        r[T(group_idx)] =
            x->op == NSA_FORWARD && x->p->groups == QUERN_NSA_LIST_COMPUTED ? OP_OPTIONAL_RESULT : OP_NEEDED;
    if (groups && x->op == NSA_SELECT) r[T(group_idx)] = OP_OPTIONAL_RESULT;
}

/* Outputs of the branches and of the gate, and the gradients that come in. */
static void roles_of_results(const context *x, uint8_t *r)
{
    const nsa_op op = x->op;
    const bool gates =
        op == NSA_COMBINE || op == NSA_GATE || op == NSA_GATE_BACKWARD; /* these take any subset as given */
    op_role o = OP_UNUSED, lse = OP_UNUSED, d_o = OP_UNUSED;
    if (op == NSA_FORWARD) o = lse = OP_OPTIONAL_RESULT;
    if (op == NSA_ATTEND) {
        o = OP_RESULT;
        lse = OP_OPTIONAL_RESULT;
    }
    if (op == NSA_BACKWARD || gates) o = OP_OPTIONAL;
    if (op == NSA_ATTEND_BACKWARD) o = d_o = OP_NEEDED;
    if (op == NSA_BACKWARD || op == NSA_ATTEND_BACKWARD) lse = OP_NEEDED;
    if (op == NSA_GATE_BACKWARD) d_o = OP_OPTIONAL_RESULT;
    for (int i = 0; i < NSA_BRANCHES; i++) {
        if (!x->on[i]) continue;
        r[o_b[i]] = (uint8_t)o;
        r[lse_b[i]] = (uint8_t)lse;
        r[d_o_b[i]] = (uint8_t)d_o;
    }
    if (op == NSA_SELECT && x->p->metric == QUERN_NSA_METRIC_SOFTMAX) r[T(lse_cmp)] = OP_OPTIONAL;
    if (op == NSA_FORWARD || op == NSA_COMBINE || op == NSA_GATE) r[T(o)] = OP_RESULT;
    if (op == NSA_BACKWARD || op == NSA_GATE_BACKWARD) r[T(d_o)] = OP_NEEDED;
    if (op == NSA_BACKWARD && x->p->ungated) r[T(o)] = OP_OPTIONAL;
}

static op_role if_given(const op_call *call, int32_t source, op_role role)
{
    return call->given[source] != NULL ? role : OP_SOURCE_MISSING;
}

static void roles_of_gradients(const context *x, const op_call *call, uint8_t *r)
{
    const nsa_op op = x->op;
    const bool gated = op == NSA_BACKWARD || op == NSA_GATE_BACKWARD;
    if (!x->backward) return;
    if (op == NSA_BACKWARD || op == NSA_ATTEND_BACKWARD) r[T(d_q)] = OP_RESULT;
    if (op == NSA_GATE_BACKWARD && x->weights) r[T(d_q)] = OP_OPTIONAL_RESULT;
    if (x->reads_k) set_pair(r, T(d_k), op == NSA_COMPRESS_BACKWARD ? OP_OPTIONAL_RESULT : OP_RESULT);
    for (int i = 0; i < 4 && x->attends; i++) {
        const bool used = i < 2 ? x->on[NSA_SLC] : x->on[NSA_WIN];
        r[T(d_k_slc) + i] = (uint8_t)if_given(call, T(k_slc) + i, used ? OP_RESULT : OP_UNUSED);
    }
    if (op == NSA_COMPRESS_BACKWARD) set_pair(r, T(d_k_cmp), OP_NEEDED);
    if (op == NSA_ATTEND_BACKWARD && x->on[NSA_CMP]) set_pair(r, T(d_k_cmp), OP_RESULT);
    if (op == NSA_BACKWARD) {
        const bool given = x->p->compress == QUERN_NSA_COMPRESS_GIVEN;
        set_pair(r, T(d_k_cmp), !given ? OP_REFUSED : x->on[NSA_CMP] ? OP_RESULT : OP_UNUSED);
    }
    for (int i = 0; i < 4 && (op == NSA_BACKWARD || op == NSA_COMPRESS_BACKWARD); i++)
        r[T(d_w_k) + i] = (uint8_t)if_given(call, T(w_k) + i, x->compresses ? OP_OPTIONAL_RESULT : OP_UNUSED);
    if (gated) r[T(d_w_gate)] = x->weights ? OP_OPTIONAL_RESULT : OP_REFUSED;
    if (gated && !(x->whole && x->p->ungated)) r[T(d_gates)] = x->weights ? OP_REFUSED : OP_OPTIONAL_RESULT;
}

void nsa_roles(op_call *call)
{
    const context x = context_of(call);
    roles_of_keys(&x, call, call->role);
    roles_of_weights(&x, call->role);
    roles_of_lists(&x, call->role);
    roles_of_results(&x, call->role);
    roles_of_gradients(&x, call, call->role);
}

/* A tensor that has no meaning with these parameters: the caller expects something that the call would not
 * do. (Tensors that another operation of the same struct uses are accepted.) */
const char *nsa_refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    const quern_nsa_params *p = &((const nsa_call *)call)->params;
    static const char *const kinds[] = {"mean", "linear", "given"}, *const gates[] = {"none", "weights",
                                                                                      "given"};
    const char *accepted = "weights"; /* W_GATE and its gradient */
    const bool gate = tensor == T(w_gate) || tensor == T(d_w_gate) || tensor == T(d_gates);
    if (tensor == T(w_k) || tensor == T(w_v)) accepted = "mean or linear";
    if (tensor == T(pe_k) || tensor == T(pe_v)) accepted = "linear";
    if (tensor == T(d_k_cmp) || tensor == T(d_v_cmp)) accepted = "given";
    if (tensor == T(d_gates)) accepted = "given or none";
    snprintf(text, OP_REASON, " with %s %s: with it %s is accepted", gate ? "gate" : "compress",
             gate ? gates[p->gate] : kinds[p->compress], accepted);
    return text;
}
