/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.c - hyper-connections' rows compiled for this level, which rounds to bf16 in one instruction. */
#include "cpu/hyper/hyper_row_loops.h"

const hyper_kernels hyper_kernels_avx512bf16 = {.level = QUERN_CPU_LEVEL_AVX512BF16, HYPER_ROWS};
