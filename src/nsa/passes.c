/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* passes.c - long calls go over the key/value heads in passes that share memory: what stages take of one. */
#include "nsa/call.h"

int64_t nsa_passes_of(const nsa_build *c, int64_t bytes, int64_t most)
{
    int64_t passes = 1;
    while (passes < c->kv_heads && (bytes / passes > most || c->kv_heads % passes != 0)) passes++;
    return passes;
}

void nsa_passes_begin(nsa_build *c)
{
    if (c->passes > 1) op_loop_begin(c->b, 1, &c->passes);
}

/* Cuts `count` tensors that have all `heads` along `dim`. */
static void cut(const nsa_build *c, quern_tensor *const *tensors, int count, int32_t dim, int64_t heads)
{
    for (int i = 0; i < count; i++)
        if (tensors[i]->ndim > 0 && tensors[i]->shape[dim] == heads) op_cut(c->b, tensors[i], dim);
}

void nsa_cut_attend(const nsa_build *c, attend_args *a)
{
    enum { ROWS = 4, STATISTICS = 3, KEYS = 4 };
    quern_tensor *const rows[ROWS] = {&a->q, &a->o, &a->d_o, &a->d_q},
                        *const statistics[STATISTICS] = {&a->lse, &a->delta, &a->row_scale},
                        *const keys[KEYS] = {&a->k, &a->v, &a->d_k, &a->d_v}, *const list = &a->list;
    if (c->passes == 1) return;
    cut(c, rows, ROWS, 2, c->heads);
    cut(c, statistics, STATISTICS, 1, c->heads);
    cut(c, keys, KEYS, 2, c->kv_heads);
    cut(c, &list, 1, 1, c->list_heads);
}

void nsa_cut_select(const nsa_build *c, select_args *s)
{
    enum { LISTS = 3 };
    quern_tensor *const lists[LISTS] = {&s->blocks, &s->count, &s->groups}, *const q = &s->q,
                        *const keys = &s->keys, *const lse = &s->lse;
    if (c->passes == 1) return;
    cut(c, &q, 1, 2, c->heads);
    cut(c, &keys, 1, 2, c->kv_heads);
    cut(c, &lse, 1, 1, c->heads);
    cut(c, lists, LISTS, 1, c->list_heads);
}

void nsa_cut_gate(const nsa_build *c, gate_args *g)
{
    enum { ROWS = 12, WEIGHTS = 2 };
    quern_tensor *const rows[ROWS] = {&g->q,      &g->gates,    &g->o,        &g->d_o,
                                      &g->d_q,    &g->d_gates,  &g->o_b[0],   &g->o_b[1],
                                      &g->o_b[2], &g->d_o_b[0], &g->d_o_b[1], &g->d_o_b[2]},
                        *const weights[WEIGHTS] = {&g->w_gate, &g->d_w_gate},
                        *const delta[NSA_BRANCHES] = {&g->delta[0], &g->delta[1], &g->delta[2]};
    if (c->passes == 1) return;
    cut(c, rows, ROWS, 2, c->heads);
    cut(c, weights, WEIGHTS, 0, c->heads);
    cut(c, delta, NSA_BRANCHES, 1, c->heads);
}
