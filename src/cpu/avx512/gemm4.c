/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm4.c - the table of products with NVFP4 weights, compiled for this level. */
#include "cpu/gemm4/gemm4_integers.h"

const gemm4_kernels gemm4_kernels_avx512 = {.level = QUERN_CPU_LEVEL_AVX512, GEMM4_ROW_KERNELS};
