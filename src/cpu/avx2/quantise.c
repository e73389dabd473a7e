/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantise.c - the quantisers' table compiled for this level. */
#include "cpu/quantise/quantise_rows.h"

const quantise_kernels quantise_kernels_avx2 = {
    .level = QUERN_CPU_LEVEL_AVX2, .rows = &row_kernels_avx2, QUANTISE_KERNELS};
