/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - SwiGLU's stages, for the table in backend.c. They accept any arguments. */
#ifndef QUERN_CPU_SWIGLU_STAGES_H
#define QUERN_CPU_SWIGLU_STAGES_H

#include "backend.h"

quern_status cpu_swiglu(const stage_exec *exec, const swiglu_args *args, void *workspace);
quern_status cpu_swiglu_backward(const stage_exec *exec, const swiglu_args *args, void *workspace);

#endif
