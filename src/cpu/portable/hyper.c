/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.c - hyper-connections' table compiled for this level. */
#include "cpu/hyper/hyper_row_loops.h"
#include "cpu/hyper/hyper_weights.h"

const hyper_kernels hyper_kernels_portable = {.level = QUERN_CPU_LEVEL_PORTABLE, HYPER_ROWS, HYPER_WEIGHTS};
