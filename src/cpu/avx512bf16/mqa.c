/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mqa.c - the row kernels of attention whose heads share their keys, compiled for this level. */
#include "cpu/attend_mqa/mqa_rows.h"

const mqa_kernels mqa_kernels_avx512bf16 = {.level = QUERN_CPU_LEVEL_AVX512BF16, MQA_ROW_KERNELS_BF16};
