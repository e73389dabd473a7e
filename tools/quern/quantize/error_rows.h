/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * error_rows.h - the two sweeps over values that the report and the global scales need: the largest
 * magnitude, and what quantised values lose.
 */
#ifndef QUERN_QUANTIZE_ERROR_ROWS_H
#define QUERN_QUANTIZE_ERROR_ROWS_H

#include "quantize/modules.h"

/* The f32 bits of the largest magnitude of [rows, columns]; 0x7f800000 and more: some value is not finite. */
uint32_t largest_of_values(const matrix_values *x, int64_t rows, int64_t columns);

/* What y [rows, columns] loses of x, both times `unit`, a power of two that keeps squares within f32;
 * `scales` [rows, columns / 16] are E4M3 bytes, and step * scale is the distance from 6 beyond which a
 * value saturates: a code's half step. columns is a multiple of 16. Adds to *e. */
void add_errors(const matrix_values *x, const float *y, const uint8_t *scales, float step, float unit,
                int64_t rows, int64_t columns, module_error *e);

#endif
