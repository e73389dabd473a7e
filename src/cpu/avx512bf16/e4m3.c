/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* e4m3.c - the table of e4m3 weights compiled for this level. */
#include "cpu/e4m3/e4m3_row.h"

const e4m3_kernels e4m3_kernels_avx512bf16 = {
    .level = QUERN_CPU_LEVEL_AVX512BF16, .panel_bf16 = panel_bf16, .row_bf16 = row_bf16};
