/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* formats.c - the tables of formats and of SwiGLU, which quantises, compiled for this level. */
#include "cpu/kernels/formats/code_rows.h"
#include "cpu/kernels/formats/nvfp4_rows.h"
#include "cpu/kernels/swiglu/swiglu_rows.h"

const format_kernels format_kernels_avx2 = {
    .level = QUERN_CPU_LEVEL_AVX2, NVFP4_ROW_KERNELS, CODE_ROW_KERNELS};
const swiglu_kernels swiglu_kernels_avx2 = {.level = QUERN_CPU_LEVEL_AVX2, SWIGLU_ROW_KERNELS};
