/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* level.c - the level's own tables. */
#include "cpu/levels.h"

extern const struct row_kernels row_kernels_avx2;
extern const struct format_kernels format_kernels_avx2;
extern const struct swiglu_kernels swiglu_kernels_avx2;
extern const struct attention_kernels attention_kernels_avx2;
extern const struct nsa_kernels nsa_kernels_avx2;
extern const struct pool_kernels pool_kernels_avx2;
extern const struct indexer_kernels indexer_kernels_avx2;
extern const struct gemm4_kernels gemm4_kernels_avx2;
extern const struct mqa_kernels mqa_kernels_avx2;
extern const struct e4m3_kernels e4m3_kernels_avx2;
extern const struct hyper_kernels hyper_kernels_avx2;

const cpu_kernels cpu_kernels_avx2 = {.rows = &row_kernels_avx2,
                                      .formats = &format_kernels_avx2,
                                      .swiglu = &swiglu_kernels_avx2,
                                      .attention = &attention_kernels_avx2,
                                      .nsa = &nsa_kernels_avx2,
                                      .pool = &pool_kernels_avx2,
                                      .indexer = &indexer_kernels_avx2,
                                      .gemm4 = &gemm4_kernels_avx2,
                                      .mqa = &mqa_kernels_avx2,
                                      .e4m3 = &e4m3_kernels_avx2,
                                      .hyper = &hyper_kernels_avx2};
