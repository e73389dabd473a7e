/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* losses.h - what quantisation lost, as a table, as JSON, and as a chart by layer. */
#ifndef QUERN_QUANTIZE_LOSSES_H
#define QUERN_QUANTIZE_LOSSES_H

#include "quantize/outputs.h"

/* The table on standard output, with a line for weights that were left. */
void losses_print(const conversion *c);
/* What would be done: each weight, and the bytes out. */
void losses_plan(const conversion *c, const output_file *files, size_t count);
/* Each returns an exit code. */
int losses_json(const conversion *c, const char *path);
int losses_chart(const conversion *c, const char *path);

#endif
