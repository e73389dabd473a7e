/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* run_list.h - `quern run --list`, and docs/run.md, from the library's description and scenarios.c. */
#ifndef QUERN_TOOLS_RUN_LIST_H
#define QUERN_TOOLS_RUN_LIST_H

#include "scenario.h"

/* What options of results do, in --help and in the list. */
#define RESULT_EXTENT_HELP "extent of a result that no input says"
#define RESULT_ASIDE_HELP "also write what is not written otherwise"

void run_list(bool markdown);
/* A line an operation, for the help. */
void run_names(void);
/* The tensors of one operation, a line each. s NULL: it has no scenario. */
void run_tensors(const operation *op, const scenario *s);

#endif
