/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the grouped product with matrices of floats, for the table in backend.c. It accepts any
 * arguments. */
#ifndef QUERN_CPU_GROUPED_DENSE_STAGES_H
#define QUERN_CPU_GROUPED_DENSE_STAGES_H

#include "backend.h"

size_t cpu_grouped_dense_workspace(const stage_exec *exec, const grouped_dense_args *args);
quern_status cpu_grouped_dense(const stage_exec *exec, const grouped_dense_args *args, void *workspace);

#endif
