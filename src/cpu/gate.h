/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gate.h - what the gate stages share. */
#ifndef QUERN_CPU_GATE_H
#define QUERN_CPU_GATE_H

#include "cpu/nsa_kernels.h"
#include "cpu/rows_at.h"

/* The three rows of head h. */
static inline const void *gate_weights_at(const gate_args *args, int64_t h)
{
    const quern_tensor *w = &args->w_gate;
    return (const char *)w->data + h * w->strides[0] * (int64_t)quern_dtype_size(w->dtype);
}

/* The gates of heads [h0, h0 + heads) of a token, three a head: read, or made and written where they are wanted. */
void gate_make(const gate_args *args, const nsa_kernels *kernels, int64_t b, int64_t n, int64_t h0, int64_t heads, float *gates);

/* Whether a row of n elements can be stored past the caches. */
static inline bool may_stream(const void *row, quern_dtype dtype, int64_t n)
{
    return n % 16 == 0 && (uintptr_t)row % (16 * quern_dtype_size(dtype)) == 0;
}

#endif
