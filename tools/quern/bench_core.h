/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_core.h - DeepSeek-V4's indexer and attention core, measured. */
#ifndef QUERN_TOOLS_BENCH_CORE_H
#define QUERN_TOOLS_BENCH_CORE_H

/* `quern bench` v4-index, v4-attention. */
int bench_core(int argc, char **argv, const char *subject);

#endif
