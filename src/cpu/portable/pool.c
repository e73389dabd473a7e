/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool.c - the compressors' table compiled for this level. */
#include "cpu/pool/pool_rows.h"

const pool_kernels pool_kernels_portable = {.level = QUERN_CPU_LEVEL_PORTABLE, POOL_ROW_KERNELS};
