/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* levels.h - the tables of tile kernels of a CPU level, and the levels that this build and this machine
 * have. */
#ifndef QUERN_CPU_LEVELS_H
#define QUERN_CPU_LEVELS_H

#include <quern/quern.h>

/* A level's tables. Each begins with the level that last overrode an entry of it. */
typedef struct cpu_kernels {
    const struct row_kernels *rows;
    const struct format_kernels *formats;
    const struct swiglu_kernels *swiglu;
    const struct attention_kernels *attention;
    const struct nsa_kernels *nsa;
    const struct pool_kernels *pool;
    const struct indexer_kernels *indexer;
    const struct gemm4_kernels *gemm4;
    const struct mqa_kernels *mqa;
    const struct e4m3_kernels *e4m3;
    const struct hyper_kernels *hyper;
} cpu_kernels;

/* The tables of a level, with what it inherits; those of the first level where this build lacks its code. */
const cpu_kernels *cpu_kernels_for(quern_cpu_level level);

/* Row i of levels.inc; AUTO past the last. */
quern_cpu_level cpu_level_at(int i);
/* Whether this build has the level's code and this machine what that needs. */
bool cpu_has_level(quern_cpu_level level);
/* The level of a context: the one asked for, for AUTO the one that QUERN_CPU names, else the last that this
 * machine has. */
quern_status cpu_choose_level(quern_cpu_level asked, quern_cpu_level *level);

#endif
