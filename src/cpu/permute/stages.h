/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the stages that move rows between tokens and experts, for the table in backend.c. All accept any
 * arguments. */
#ifndef QUERN_CPU_PERMUTE_STAGES_H
#define QUERN_CPU_PERMUTE_STAGES_H

#include "backend.h"

quern_status cpu_permute(const stage_exec *exec, const permute_args *args, void *workspace);
size_t cpu_combine_workspace(const stage_exec *exec, const combine_args *args);
quern_status cpu_combine(const stage_exec *exec, const combine_args *args, void *workspace);
size_t cpu_expert_sums_workspace(const stage_exec *exec, const expert_sums_args *args);
quern_status cpu_expert_sums(const stage_exec *exec, const expert_sums_args *args, void *workspace);

#endif
