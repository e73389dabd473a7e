/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool_kernels.c - picks the compressors' table of a level. */
#include "cpu/pool/pool_kernels.h"

const pool_kernels *pool_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level >= QUERN_CPU_LEVEL_AVX512) return &pool_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &pool_kernels_avx2;
#endif
    (void)level;
    return &pool_kernels_portable;
}
