/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* e4m3.c - the table of e4m3 weights compiled for this level. */
#include "cpu/e4m3/e4m3_row.h"

const e4m3_kernels e4m3_kernels_portable = {
    .level = QUERN_CPU_LEVEL_PORTABLE, .panel_f32 = panel_f32, .row_f32 = row_f32};
