/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* row_kernels.c - picks the table of rows of a level. */
#include "cpu/kernels/row_kernels.h"

const row_kernels *row_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level >= QUERN_CPU_LEVEL_AVX512) return &row_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &row_kernels_avx2;
#endif
    (void)level;
    return &row_kernels_portable;
}
