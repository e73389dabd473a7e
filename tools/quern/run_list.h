/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* run_list.h - `quern run --list`, and docs/run.md, from the library's description and scenarios.c. */
#ifndef QUERN_TOOLS_RUN_LIST_H
#define QUERN_TOOLS_RUN_LIST_H

#include <stdbool.h>

/* What options of results do, in --help and in the list. */
#define RESULT_EXTENT_HELP "extent of a result that no input says"
#define RESULT_ASIDE_HELP "also write what is not written otherwise"

void run_list(bool markdown);
/* A line an operation, for the help. */
void run_names(void);

#endif
