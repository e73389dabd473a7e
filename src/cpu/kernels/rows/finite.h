/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* finite.h - the pass over an input before a quantiser writes: finds the largest magnitudes, and refuses
 * infinities and NaN. */
#ifndef QUERN_CPU_QUANTISE_FINITE_H
#define QUERN_CPU_QUANTISE_FINITE_H

#include "backend.h"
#include "cpu/kernels/rows/views.h"

/* The largest magnitude of each row piece of a view's first `rows` rows, as bits. */
typedef struct row_magnitudes {
    row_cut cut;
    uint32_t *bits; /* [rows][pieces_a_row] */
} row_magnitudes;

size_t row_magnitudes_bytes(const quern_tensor *x);
/* Fills bits from x, one of a stage's arguments. Reports the first nonfinite value in row-major order. */
quern_status row_magnitudes_of(const stage_exec *exec, const quern_tensor *x, int64_t rows,
                               row_magnitudes *m);
/* Reports a nonfinite element. */
quern_status report_not_finite(const stage_exec *exec, const quern_tensor *x, int64_t row, int64_t column);
/* The largest magnitude of rows [first, end). */
float largest_of_rows(const row_magnitudes *m, int64_t first, int64_t end);

#endif
