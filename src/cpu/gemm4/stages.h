/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the stage functions of products with NVFP4 weights, for the table in backend.c. All accept any
 * arguments. */
#ifndef QUERN_CPU_GEMM4_STAGES_H
#define QUERN_CPU_GEMM4_STAGES_H

#include "backend.h"

quern_status cpu_prepack(const stage_exec *exec, const prepack_args *args, void *workspace);
int64_t cpu_repacked_bytes(int64_t n, int64_t k);
size_t cpu_grouped_gemm_workspace(const stage_exec *exec, const grouped_gemm_args *args);
quern_status cpu_grouped_gemm(const stage_exec *exec, const grouped_gemm_args *args, void *workspace);
size_t cpu_grouped_gemm_backward_workspace(const stage_exec *exec, const grouped_gemm_args *args);
quern_status cpu_grouped_gemm_backward(const stage_exec *exec, const grouped_gemm_args *args,
                                       void *workspace);

#endif
