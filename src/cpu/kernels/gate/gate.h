/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gate.h - the gates of NSA's branches: what the stages that make or use them share. */
#ifndef QUERN_CPU_GATE_H
#define QUERN_CPU_GATE_H

#include "cpu/kernels/nsa_kernels.h"
#include "cpu/rows_at.h"

static inline gate_weights gate_weights_at(const gate_args *args, int64_t h)
{
    const quern_tensor *w = &args->w_gate;
    return (gate_weights){(const char *)w->data + h * w->strides[0] * (int64_t)quern_dtype_size(w->dtype),
                          w->dtype, w->strides[0], w->strides[1]};
}

/* The grid of rows from token n and head h on. */
static inline row_grid grid_at(const quern_tensor *t, int64_t b, int64_t n, int64_t h)
{
    if (!is_present(t)) return (row_grid){NULL, 0, 0};
    return (row_grid){row_at(t, b, n, h), t->strides[1], t->strides[2]};
}

/* What gates are where a call neither gives nor makes them. */
extern const float gate_third[3];
/* The q and weights of tokens from n and heads from h0 on, where gates are made from these. */
gate_block gate_block_at(const gate_args *args, int64_t b, int64_t n, int64_t tokens, int64_t h0,
                         int64_t heads);
/* The gates of heads [h0, h0 + heads) of tokens [n, n + tokens), three a head. Reads them, or makes them and
 * writes those that the caller wants. */
void gate_make(const gate_args *args, const nsa_kernels *kernels, int64_t b, int64_t n, int64_t tokens,
               int64_t h0, int64_t heads, float *gates);

/* Whether all rows of a view may_stream(). */
static inline bool all_may_stream(const quern_tensor *t)
{
    bool whole = is_present(t) && may_stream(t->data, t->dtype, t->shape[3]);
    for (int i = 0; i < 3; i++)
        whole = whole && t->strides[i] * (int64_t)quern_dtype_size(t->dtype) % 64 == 0;
    return whole;
}

#endif
