/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the stages of hyper-connections, for the table in backend.c. They accept any arguments. */
#ifndef QUERN_CPU_HYPER_STAGES_H
#define QUERN_CPU_HYPER_STAGES_H

#include "backend.h"

void cpu_hyper_kernel(const stage_exec *exec, const hyper_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_hyper_workspace(const stage_exec *exec, const hyper_args *args);
quern_status cpu_hyper(const stage_exec *exec, const hyper_args *args, void *workspace);
size_t cpu_hyper_backward_workspace(const stage_exec *exec, const hyper_args *args);
quern_status cpu_hyper_backward(const stage_exec *exec, const hyper_args *args, void *workspace);

#endif
