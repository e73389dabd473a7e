/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows_nvfp4.h - the library's quantiser on some rows of a matrix whose global scale is known. */
#ifndef QUERN_QUANTIZE_ROWS_NVFP4_H
#define QUERN_QUANTIZE_ROWS_NVFP4_H

#include "quantize/conversion.h"

/* Bytes that quantise_rows needs as `workspace` for any number of rows up to `rows`. */
quern_status quantise_rows_bytes(const conversion *c, int64_t rows, int64_t columns, size_t *bytes);
/* codes [rows, columns / 2], scales [rows, columns / 16]; global is G, or R under compressed-tensors. */
quern_status quantise_rows(const conversion *c, const matrix_values *x, int64_t rows, int64_t columns,
                           float global, uint8_t *codes, uint8_t *scales, void *workspace, size_t bytes);
/* The values of codes and scales whose rows stand code_stride and scale_stride bytes apart. reciprocal:
 * global is R. */
quern_status dequantise_rows(const conversion *c, const matrix *m, int64_t rows, void *out,
                             quern_dtype dtype);

#endif
