/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gate.c - the gates of some tokens. */
#include "cpu/kernels/gate/gate.h"

#include <string.h>

gate_block gate_block_at(const gate_args *args, int64_t b, int64_t n, int64_t tokens, int64_t h0,
                         int64_t heads)
{
    gate_block t = {.dtype = args->o.dtype, .tokens = tokens, .heads = heads};
    if (args->kind != GATE_WEIGHTS) return t;
    t.dtype = args->q.dtype;
    t.dim = args->q.shape[3];
    t.q = grid_at(&args->q, b, n, h0);
    t.w = gate_weights_at(args, h0);
    return t;
}

const float gate_third[3] = {1.0f / 3.0f, 1.0f / 3.0f, 1.0f / 3.0f};

void gate_make(const gate_args *args, const nsa_kernels *kernels, int64_t b, int64_t n, int64_t tokens,
               int64_t h0, int64_t heads, float *gates)
{
    gate_block t = gate_block_at(args, b, n, tokens, h0, heads);
    t.gates = (row_grid){gates, 3 * heads, 3};
    if (args->kind == GATE_WEIGHTS) kernels->gate_rows(&t);
    for (int64_t r = 0; r < tokens * heads; r++, gates += 3) {
        if (args->kind == GATE_NONE) memcpy(gates, gate_third, sizeof gate_third);
        if (args->kind == GATE_GIVEN)
            memcpy(gates, row_at(&args->gates, b, n + r / heads, h0 + r % heads), sizeof gate_third);
        else if (is_present(&args->gates))
            memcpy(row_at(&args->gates, b, n + r / heads, h0 + r % heads), gates, sizeof gate_third);
    }
}
