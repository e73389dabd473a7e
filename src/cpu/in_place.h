/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* in_place.h - products of up to IN_PLACE_ROWS rows with a weight [out, in], which is read in place. */
#ifndef QUERN_CPU_IN_PLACE_H
#define QUERN_CPU_IN_PLACE_H

#include "cpu/kernels/attention_kernels.h"

enum {
    IN_PLACE_ROWS = 96,
    IN_PLACE_OUTPUTS = 64,               /* of a task, at most */
    IN_PLACE_PITCH = IN_PLACE_ROWS + 16, /* an odd number of lines */
    IN_PLACE_FLOATS = IN_PLACE_OUTPUTS * (IN_PLACE_ROWS + IN_PLACE_PITCH)
};

/* c = a w^T. */
typedef struct in_place_product {
    const attention_kernels *kernels;
    bool pairs; /* bf16 products; else a has any dtype and w is f32 */
    row_source a, w;
} in_place_product;

/* Whether a product of these operands can be computed so, if the weight is aligned. */
bool in_place_takes(const attention_kernels *kernels, const row_source *a, const row_source *w);
bool in_place_aligned(const row_source *w);
in_place_product in_place_of(const attention_kernels *kernels, const row_source *a, const row_source *w);
/* Packs all of a as columns: [panels][words][panel], floats as many as in_place_floats(). */
size_t in_place_floats(const in_place_product *p);
void in_place_pack(const in_place_product *p, float *columns);
/* Outputs first ... first + n - 1 of all rows, n <= IN_PLACE_OUTPUTS. Output i of row r is at
 * sums[(i / panel * rows + r) * panel + i % panel]; `sums` has room for IN_PLACE_FLOATS. */
void in_place_multiply(const in_place_product *p, const float *columns, int64_t first, int64_t n,
                       float *sums);

#endif
