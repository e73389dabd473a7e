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

attend_args nsa_attend_of_pass(const nsa_call *c, int branch, int64_t pass)
{
    attend_args a = c->attend[branch];
    quern_tensor *const rows[] = {&a.q, &a.o, &a.d_o, &a.d_q},
                        *const statistics[] = {&a.lse, &a.delta, &a.row_scale},
                        *const keys[] = {&a.k, &a.v, &a.d_k, &a.d_v};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = nsa_of_pass(c, *rows[i], 2, c->heads, pass);
    for (size_t i = 0; i < sizeof statistics / sizeof *statistics; i++)
        *statistics[i] = nsa_of_pass(c, *statistics[i], 1, c->heads, pass);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        *keys[i] = nsa_of_pass(c, *keys[i], 2, c->kv_heads, pass);
    a.list = nsa_of_pass(c, a.list, 1, c->list_heads, pass);
    return a;
}

gate_args nsa_gate_of_pass(const nsa_call *c, int64_t pass)
{
    gate_args g = c->gate;
    quern_tensor *const rows[] = {&g.q, &g.gates, &g.o, &g.d_o, &g.d_q, &g.d_gates};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = nsa_of_pass(c, *rows[i], 2, c->heads, pass);
    g.w_gate = nsa_of_pass(c, g.w_gate, 0, c->heads, pass);
    g.d_w_gate = nsa_of_pass(c, g.d_w_gate, 0, c->heads, pass);
    for (int i = 0; i < NSA_BRANCHES; i++) {
        g.o_b[i] = nsa_of_pass(c, g.o_b[i], 2, c->heads, pass);
        g.d_o_b[i] = nsa_of_pass(c, g.d_o_b[i], 2, c->heads, pass);
        g.delta[i] = nsa_of_pass(c, g.delta[i], 1, c->heads, pass);
    }
    return g;
}
