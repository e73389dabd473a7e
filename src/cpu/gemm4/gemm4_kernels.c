/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm4_kernels.c - picks the table of a level. */
#include "cpu/gemm4/gemm4_kernels.h"

const gemm4_kernels *gemm4_kernels_for(quern_cpu_level level)
{
#if defined(QUERN_X86_LEVELS)
    if (level == QUERN_CPU_LEVEL_AVX512BF16) return &gemm4_kernels_avx512bf16;
    if (level == QUERN_CPU_LEVEL_AVX512) return &gemm4_kernels_avx512;
    if (level == QUERN_CPU_LEVEL_AVX2) return &gemm4_kernels_avx2;
#endif
    (void)level;
    return &gemm4_kernels_portable;
}
