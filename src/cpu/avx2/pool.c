/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool.c - the compressors' table compiled for this level. */
#include "cpu/pool/entry_rows.h"
#include "cpu/pool/pool_rows.h"

const pool_kernels pool_kernels_avx2 = {
    .level = QUERN_CPU_LEVEL_AVX2, .rows = &row_kernels_avx2, POOL_ROW_KERNELS, ENTRY_ROW_KERNELS};
