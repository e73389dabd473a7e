/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantise_kernels.c - picks the quantisers' table of a level. */
#include "cpu/quantise/quantise_kernels.h"

const quantise_kernels *quantise_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level >= QUERN_CPU_LEVEL_AVX512) return &quantise_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &quantise_kernels_avx2;
#endif
    (void)level;
    return &quantise_kernels_portable;
}
