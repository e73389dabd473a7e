/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_linear.c - what the formulas of projections count. */
#include "bench.h"

void bench_count_linear(const bench_case *c, const job *ran, formula_symbols *to)
{
    enum { BLOCK = 128, NVFP4_BLOCK = 16 };
    static const char *const words[] = {"floats", "fp8", "nvfp4"};
    const int64_t groups = bench_extent_of(c, "projections"), n = groups * bench_extent_of(c, "width"),
                  k = bench_extent_of(c, "depth"), blocks_n = (n + BLOCK - 1) / BLOCK,
                  blocks_k = (k + BLOCK - 1) / BLOCK;
    const double activation = formula_symbol(to, "b", 1),
                 bytes[] = {activation, 1, 0.5 + 1.0 / NVFP4_BLOCK}; /* of a weight */
    const int weights = bench_choice_of(c, "weights");
    (void)ran;
    for (int i = 0; i < 3; i++) formula_set(to, words[i], weights == i);
    formula_set(to, "blocks_N", (double)blocks_n);
    formula_set(to, "blocks_K", (double)blocks_k);
    formula_set(to, "weight", bytes[weights]);
}
