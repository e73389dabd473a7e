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

/* Rows in NVFP4: codes [rows, columns / 2], scales [rows, columns / 16]. */
typedef struct coded_rows {
    const uint8_t *codes, *scales;
    float global;    /* G, or R */
    bool reciprocal; /* it is R */
    float largest;   /* about the largest magnitude of x; 0: 2688 G */
    bool any_scale;  /* a block's scale may be any, not its largest value's sixth, rounded */
} coded_rows;

/* Adds to *e what the coded rows lose of x. columns is a multiple of 16. A block saturates where a value
 * is more than half a step beyond its largest code's. */
void add_errors(const matrix_values *x, const coded_rows *coded, int64_t rows, int64_t columns,
                module_error *e);

#endif
