/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_kernels.c - picks the NSA table of a level. */
#include "cpu/kernels/nsa_kernels.h"

const nsa_kernels *nsa_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level >= QUERN_CPU_LEVEL_AVX512) return &nsa_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &nsa_kernels_avx2;
#endif
    (void)level;
    return &nsa_kernels_portable;
}
