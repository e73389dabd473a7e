/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the stages of e4m3 weights, for the table in backend.c. They accept any arguments. */
#ifndef QUERN_CPU_E4M3_STAGES_H
#define QUERN_CPU_E4M3_STAGES_H

#include "backend.h"

size_t cpu_e4m3_gemm_workspace(const stage_exec *exec, const e4m3_gemm_args *args);
quern_status cpu_e4m3_gemm(const stage_exec *exec, const e4m3_gemm_args *args, void *workspace);
void cpu_e4m3_gemm_kernel(const stage_exec *exec, const e4m3_gemm_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_e4m3_round_workspace(const stage_exec *exec, const e4m3_round_args *args);
quern_status cpu_e4m3_round(const stage_exec *exec, const e4m3_round_args *args, void *workspace);
quern_status cpu_e4m3_weights(const stage_exec *exec, const e4m3_weights_args *args, void *workspace);

#endif
