/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f32_rows.h - small matrices that kernels want in f32: the caller's, or a copy. */
#ifndef QUERN_CPU_F32_ROWS_H
#define QUERN_CPU_F32_ROWS_H

#include "core/arena.h"
#include "cpu/kernels/rows/row_kernels.h"

/* [rows, n]. */
typedef struct f32_rows {
    const float *data;
    int64_t stride;
    float *copy; /* NULL: none is needed */
} f32_rows;

/* Plans a copy if t is not f32; fill_rows() writes it. An absent t gives NULL. */
f32_rows carve_rows(const quern_tensor *t, arena *a);
void fill_rows(const row_kernels *kernels, const quern_tensor *t, f32_rows *rows);

#endif
