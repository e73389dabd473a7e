/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* run_list.h - `quern run --list`, and docs/run.md, from the library's description and scenarios.c. */
#ifndef QUERN_TOOLS_RUN_LIST_H
#define QUERN_TOOLS_RUN_LIST_H

#include <stdbool.h>

void run_list(bool markdown);
/* A line an operation, for the help. */
void run_names(void);

#endif
