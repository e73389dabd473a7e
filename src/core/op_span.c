/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/op_span.h"

op_span op_span_of(const quern_tensor *t, bool written)
{
    const int64_t size = (int64_t)quern_dtype_size(t->dtype);
    int64_t down = 0, up = size;
    for (int32_t i = 0; i < t->ndim; i++) {
        const int64_t reach = (t->shape[i] - 1) * t->strides[i] * size;
        if (reach < 0) down += reach;
        else up += reach;
    }
    op_span x = {.low = (uintptr_t)t->data + (uintptr_t)down,
                 .high = (uintptr_t)t->data + (uintptr_t)up,
                 .written = written};
    if (t->ndim == 2 && t->strides[1] == 1 && t->strides[0] >= t->shape[1]) {
        x.width = (uintptr_t)(t->shape[1] * size);
        x.period = (uintptr_t)(t->strides[0] * size);
    }
    return x;
}

bool op_spans_meet(const op_span *x, const op_span *y)
{
    if (!x->written && !y->written) return false;
    if (x->low >= y->high || y->low >= x->high) return false;
    if (x->period == 0 || x->period != y->period) return true;
    const uintptr_t apart =
        x->low <= y->low ? (y->low - x->low) % x->period : x->period - (x->low - y->low) % x->period;
    return apart % x->period < x->width || apart + y->width > x->period;
}
