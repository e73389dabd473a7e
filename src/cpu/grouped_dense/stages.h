/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the grouped product with matrices of floats, and these matrices' gradient, for the table in
 * backend.c. Both accept any arguments. */
#ifndef QUERN_CPU_GROUPED_DENSE_STAGES_H
#define QUERN_CPU_GROUPED_DENSE_STAGES_H

#include "backend.h"

size_t cpu_grouped_dense_workspace(const stage_exec *exec, const grouped_dense_args *args);
quern_status cpu_grouped_dense(const stage_exec *exec, const grouped_dense_args *args, void *workspace);
size_t cpu_grouped_outer_workspace(const stage_exec *exec, const grouped_outer_args *args);
quern_status cpu_grouped_outer(const stage_exec *exec, const grouped_outer_args *args, void *workspace);

#endif
