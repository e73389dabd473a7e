/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_kernels.c - picks the attention table of a level. */
#include "cpu/kernels/attention_kernels.h"

const attention_kernels *attention_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level == QUERN_CPU_LEVEL_AVX512BF16) return &attention_kernels_avx512bf16;
    if (level == QUERN_CPU_LEVEL_AVX512) return &attention_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &attention_kernels_avx2;
#endif
    (void)level;
    return &attention_kernels_portable;
}
