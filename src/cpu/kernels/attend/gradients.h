/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gradients.h - gradients of keys or values, which several tasks add to: the output itself where it is f32,
 * else a contiguous f32 buffer that is converted at the end. */
#ifndef QUERN_CPU_GRADIENTS_H
#define QUERN_CPU_GRADIENTS_H

#include "backend.h"
#include "core/arena.h"
#include "cpu/kernels/rows/row_kernels.h"

typedef struct gradient_rows {
    float *data;        /* NULL: not wanted */
    int64_t strides[3]; /* batch, token, head */
} gradient_rows;

static inline float *gradient_at(const gradient_rows *g, int64_t b, int64_t token, int64_t head)
{
    return g->data + b * g->strides[0] + token * g->strides[1] + head * g->strides[2];
}

/* t: the output, or absent. */
gradient_rows gradient_carve(const quern_tensor *t, arena *a);
/* Sets the rows to 0. */
void gradient_clear(const stage_exec *exec, const quern_tensor *t, const gradient_rows *g);
/* Converts them to the output's dtype, where that is not f32. */
void gradient_write(const stage_exec *exec, const quern_tensor *t, const gradient_rows *g,
                    const row_kernels *kernels);

#endif
