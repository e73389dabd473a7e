/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa.c - the NSA table compiled for this level. */
#include "cpu/kernels/nsa_rows.h"

const nsa_kernels nsa_kernels_avx2 = {.level = QUERN_CPU_LEVEL_AVX2, NSA_ROW_KERNELS};
