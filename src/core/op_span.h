/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_span.h - the memory that steps and calls have in common, by which they wait for each other. */
#ifndef QUERN_CORE_OP_SPAN_H
#define QUERN_CORE_OP_SPAN_H

#include <quern/quern.h>

/* The memory of a view: [low, high), of which a matrix has `width` bytes every `period`; else both are 0. */
typedef struct op_span {
    uintptr_t low, high, width, period;
    bool written;
} op_span;

op_span op_span_of(const quern_tensor *t, bool written);
/* Whether two views may have memory in common of which one is written: columns of one matrix have not. */
bool op_spans_meet(const op_span *x, const op_span *y);

#endif
