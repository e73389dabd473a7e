/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* machine.h - the machine and the build, for results. */
#ifndef QUERN_TOOLS_MACHINE_H
#define QUERN_TOOLS_MACHINE_H

#include <quern/quern.h>

#include <jansson.h>

/* The CPU's model name. */
void machine_cpu(char *text, size_t room);
/* The commit that the command was built from; "unknown" outside a repository. Static storage. */
const char *machine_commit(void);
/* {"cpu", "isa", "threads"} of the bench's schema. */
json_t *machine_json(const quern_context *ctx);

#endif
