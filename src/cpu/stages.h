/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the CPU's stage functions, for the table in backend.c. */
#ifndef QUERN_CPU_STAGES_H
#define QUERN_CPU_STAGES_H

#include "backend.h"

bool cpu_attend_supports(const quern_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
size_t cpu_attend_forward_workspace(const quern_exec *exec, const attend_args *args);
quern_status cpu_attend_forward(const quern_exec *exec, const attend_args *args, void *workspace);
size_t cpu_attend_backward_workspace(const quern_exec *exec, const attend_args *args);
quern_status cpu_attend_backward(const quern_exec *exec, const attend_args *args, void *workspace);

bool cpu_rowdot_supports(const quern_exec *exec, const rowdot_args *args, char why[STAGE_WHY_BYTES]);
size_t cpu_rowdot_workspace(const quern_exec *exec, const rowdot_args *args);
quern_status cpu_rowdot(const quern_exec *exec, const rowdot_args *args, void *workspace);

#endif
