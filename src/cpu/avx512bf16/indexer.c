/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer.c - the indexer's table compiled for this level. */
#include "cpu/indexer/indexer_rows.h"

const indexer_kernels indexer_kernels_avx512bf16 = {.level = QUERN_CPU_LEVEL_AVX512BF16,
                                                    INDEXER_ROW_KERNELS_BF16};
