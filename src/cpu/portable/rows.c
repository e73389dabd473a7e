/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.c - the table of rows compiled for this level. */
#include "cpu/kernels/rows/norm_rows.h"
#include "cpu/kernels/rows/row_loops.h"

const row_kernels row_kernels_portable = {.level = QUERN_CPU_LEVEL_PORTABLE, ROW_KERNELS, NORM_ROW_KERNELS};
