/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gate.h - what the gate stages share. */
#ifndef QUERN_CPU_GATE_H
#define QUERN_CPU_GATE_H

#include "core/arena.h"
#include "cpu/nsa_kernels.h"
#include "cpu/rows_at.h"

/* w_gate as f32: itself, or a copy. */
typedef struct gate_weights {
    const float *data;
    float *copy;
    int64_t ld, head_stride;
} gate_weights;

void gate_weights_carve(const gate_args *args, arena *a, gate_weights *w);
void gate_weights_fill(const gate_args *args, const nsa_kernels *k, const gate_weights *w);

/* Whether a row of n elements can be stored past the caches. */
static inline bool may_stream(const void *row, quern_dtype dtype, int64_t n)
{
    return n % 16 == 0 && (uintptr_t)row % (16 * quern_dtype_size(dtype)) == 0;
}

#endif
