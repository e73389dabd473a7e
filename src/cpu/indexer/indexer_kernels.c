/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_kernels.c - picks the indexer's table of a level. */
#include "cpu/indexer/indexer_kernels.h"

const indexer_kernels *indexer_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level == QUERN_CPU_LEVEL_AVX512BF16) return &indexer_kernels_avx512bf16;
    if (level == QUERN_CPU_LEVEL_AVX512) return &indexer_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &indexer_kernels_avx2;
#endif
    (void)level;
    return &indexer_kernels_portable;
}
