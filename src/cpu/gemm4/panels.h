/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* panels.h - conversion of weights between callers' layouts and the repacked one of gemm4_kernels.h. */
#ifndef QUERN_CPU_GEMM4_PANELS_H
#define QUERN_CPU_GEMM4_PANELS_H

#include "backend.h"
#include "cpu/gemm4/gemm4_kernels.h"

/* One expert's matrix in the caller's layout. */
typedef struct weight_view {
    uint8_t *codes;
    int64_t pair_stride, column_stride; /* bytes from one pair of K, and from one column, to the next */
    uint8_t *scales;
    bool swizzled;
    int64_t block_stride, scale_column_stride; /* unless swizzled */
    int64_t n, k;
} weight_view;

weight_view weight_of(const quern_tensor *codes, const quern_tensor *scales, bool k_major, scale_order order,
                      int64_t n, int64_t k, int64_t expert);
/* Writes units [first, first + count) of panel `panel`, count * GEMM4_UNIT_BYTES. */
void pack_units(const weight_view *w, int64_t panel, int64_t first, int64_t count, uint8_t *out);
/* The reverse, for one unit. */
void unpack_unit(const weight_view *w, int64_t panel, int64_t unit, const uint8_t *in);
/* The largest scale byte of each column of a panel; 0 past the last column. */
void largest_scales(const weight_view *w, int64_t panel, uint8_t most[GEMM4_PANEL]);

static inline int64_t panels_of(int64_t n)
{
    return (n + GEMM4_PANEL - 1) / GEMM4_PANEL;
}

static inline int64_t units_of(int64_t k)
{
    return (k + GEMM4_UNIT - 1) / GEMM4_UNIT;
}

#endif
