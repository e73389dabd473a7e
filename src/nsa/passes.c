/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* passes.c - long calls go over the key/value heads in passes that share memory: what stages take of one. */
#include "core/view.h"
#include "nsa/call.h"

int64_t nsa_passes_of(const nsa_call *c, int64_t bytes, int64_t most)
{
    int64_t passes = 1;
    while (passes < c->kv_heads && (bytes / passes > most || c->kv_heads % passes != 0)) passes++;
    return passes;
}

quern_tensor nsa_of_pass(const nsa_call *c, quern_tensor t, int32_t dim, int64_t heads, int64_t pass)
{
    if (t.ndim == 0 || t.shape[dim] < heads) return t;
    view_narrow(&t, dim, pass * (heads / c->passes), heads / c->passes);
    return t;
}

/* Narrows `count` tensors in place. */
static void cut_to_pass(const nsa_call *c, quern_tensor *const *tensors, int count, int32_t dim,
                        int64_t heads, int64_t pass)
{
    for (int i = 0; i < count; i++) *tensors[i] = nsa_of_pass(c, *tensors[i], dim, heads, pass);
}

attend_args nsa_attend_of_pass(const nsa_call *c, int branch, int64_t pass)
{
    enum { ROWS = 4, STATISTICS = 3, KEYS = 4 };
    attend_args a = c->attend[branch];
    quern_tensor *const rows[ROWS] = {&a.q, &a.o, &a.d_o, &a.d_q},
                        *const statistics[STATISTICS] = {&a.lse, &a.delta, &a.row_scale},
                        *const keys[KEYS] = {&a.k, &a.v, &a.d_k, &a.d_v};
    cut_to_pass(c, rows, ROWS, 2, c->heads, pass);
    cut_to_pass(c, statistics, STATISTICS, 1, c->heads, pass);
    cut_to_pass(c, keys, KEYS, 2, c->kv_heads, pass);
    a.list = nsa_of_pass(c, a.list, 1, c->list_heads, pass);
    return a;
}

gate_args nsa_gate_of_pass(const nsa_call *c, int64_t pass)
{
    enum { ROWS = 6 };
    gate_args g = c->gate;
    quern_tensor *const rows[ROWS] = {&g.q, &g.gates, &g.o, &g.d_o, &g.d_q, &g.d_gates};
    cut_to_pass(c, rows, ROWS, 2, c->heads, pass);
    g.w_gate = nsa_of_pass(c, g.w_gate, 0, c->heads, pass);
    g.d_w_gate = nsa_of_pass(c, g.d_w_gate, 0, c->heads, pass);
    for (int i = 0; i < NSA_BRANCHES; i++) {
        g.o_b[i] = nsa_of_pass(c, g.o_b[i], 2, c->heads, pass);
        g.d_o_b[i] = nsa_of_pass(c, g.d_o_b[i], 2, c->heads, pass);
        g.delta[i] = nsa_of_pass(c, g.delta[i], 1, c->heads, pass);
    }
    return g;
}
