/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* level.c - the level's own tables. */
#include "cpu/levels.h"

extern const struct row_kernels row_kernels_portable;
extern const struct format_kernels format_kernels_portable;
extern const struct swiglu_kernels swiglu_kernels_portable;
extern const struct attention_kernels attention_kernels_portable;
extern const struct nsa_kernels nsa_kernels_portable;
extern const struct pool_kernels pool_kernels_portable;
extern const struct indexer_kernels indexer_kernels_portable;
extern const struct gemm4_kernels gemm4_kernels_portable;
extern const struct mqa_kernels mqa_kernels_portable;
extern const struct e4m3_kernels e4m3_kernels_portable;
extern const struct hyper_kernels hyper_kernels_portable;

const cpu_kernels cpu_kernels_portable = {.rows = &row_kernels_portable,
                                          .formats = &format_kernels_portable,
                                          .swiglu = &swiglu_kernels_portable,
                                          .attention = &attention_kernels_portable,
                                          .nsa = &nsa_kernels_portable,
                                          .pool = &pool_kernels_portable,
                                          .indexer = &indexer_kernels_portable,
                                          .gemm4 = &gemm4_kernels_portable,
                                          .mqa = &mqa_kernels_portable,
                                          .e4m3 = &e4m3_kernels_portable,
                                          .hyper = &hyper_kernels_portable};
