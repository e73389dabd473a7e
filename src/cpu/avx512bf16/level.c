/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* level.c - the level's own tables: products of bf16 pairs and of bytes, and what packs their operands. */
#include "cpu/levels.h"

extern const struct attention_kernels attention_kernels_avx512bf16;
extern const struct indexer_kernels indexer_kernels_avx512bf16;
extern const struct gemm4_kernels gemm4_kernels_avx512bf16;
extern const struct mqa_kernels mqa_kernels_avx512bf16;
extern const struct e4m3_kernels e4m3_kernels_avx512bf16;
extern const struct hyper_kernels hyper_kernels_avx512bf16;

const cpu_kernels cpu_kernels_avx512bf16 = {.attention = &attention_kernels_avx512bf16,
                                            .indexer = &indexer_kernels_avx512bf16,
                                            .gemm4 = &gemm4_kernels_avx512bf16,
                                            .mqa = &mqa_kernels_avx512bf16,
                                            .e4m3 = &e4m3_kernels_avx512bf16,
                                            .hyper = &hyper_kernels_avx512bf16};
