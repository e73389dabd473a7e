/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.c - the table of rows compiled for this level. */
#include "cpu/kernels/row_loops.h"

const row_kernels row_kernels_portable = {.level = QUERN_CPU_LEVEL_PORTABLE, ROW_KERNELS};
