/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the stage functions of formats and layouts of 4 and 8 bits, for the table in backend.c. All
 * accept any arguments. */
#ifndef QUERN_CPU_QUANTISE_STAGES_H
#define QUERN_CPU_QUANTISE_STAGES_H

#include "backend.h"

size_t cpu_quantise_workspace(const stage_exec *exec, const quantise_args *args);
quern_status cpu_quantise(const stage_exec *exec, const quantise_args *args, void *workspace);
quern_status cpu_dequantise(const stage_exec *exec, const dequantise_args *args, void *workspace);
quern_status cpu_widen_blocks(const stage_exec *exec, const widen_blocks_args *args, void *workspace);
size_t cpu_fused_quantise_workspace(const stage_exec *exec, const fused_quantise_args *args);
quern_status cpu_fused_quantise(const stage_exec *exec, const fused_quantise_args *args, void *workspace);
quern_status cpu_from_mxfp4(const stage_exec *exec, const from_mxfp4_args *args, void *workspace);
quern_status cpu_swizzle(const stage_exec *exec, const swizzle_args *args, void *workspace);
quern_status cpu_interleave(const stage_exec *exec, const interleave_args *args, void *workspace);

#endif
