/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "cpu/kernels/rows/f32_rows.h"

#include "cpu/rows_at.h"

f32_rows carve_rows(const quern_tensor *t, arena *a)
{
    f32_rows rows = {NULL, 0, NULL};
    if (!is_present(t)) return rows;
    const int64_t n = t->shape[t->ndim - 1], count = t->ndim > 1 ? t->shape[0] : 1;
    rows.data = t->data;
    rows.stride = t->ndim > 1 ? t->strides[0] : 0;
    if (t->dtype == QUERN_F32) return rows;
    rows.data = rows.copy = arena_take(a, (size_t)(n * count) * sizeof(float));
    rows.stride = n;
    return rows;
}

void fill_rows(const row_kernels *kernels, const quern_tensor *t, f32_rows *rows)
{
    if (rows->copy == NULL) return;
    const int64_t n = t->shape[t->ndim - 1], count = t->ndim > 1 ? t->shape[0] : 1,
                  stride = t->ndim > 1 ? t->strides[0] : 0;
    for (int64_t r = 0; r < count; r++)
        kernels->convert((const char *)t->data + r * stride * (int64_t)quern_dtype_size(t->dtype), t->dtype,
                         rows->copy + r * n, QUERN_F32, n);
}
