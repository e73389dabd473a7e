/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mqa_kernels.c - picks the table of a level. */
#include "cpu/attend_mqa/mqa_kernels.h"

const mqa_kernels *mqa_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level == QUERN_CPU_LEVEL_AVX512BF16) return &mqa_kernels_avx512bf16;
    if (level == QUERN_CPU_LEVEL_AVX512) return &mqa_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &mqa_kernels_avx2;
#endif
    (void)level;
    return &mqa_kernels_portable;
}
