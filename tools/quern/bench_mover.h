/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_mover.h - the time of moving the lines that a pass of a job reads and writes. */
#ifndef QUERN_TOOLS_BENCH_MOVER_H
#define QUERN_TOOLS_BENCH_MOVER_H

#include "job.h"

/* Milliseconds of bench/mover.h over the tensors that the pass reads and writes; 0 if the operation has no
 * mover. The outputs hold garbage afterwards. */
double bench_mover_ms(const job *j, bool backward, int threads);

#endif
