/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * convert.h - the computation: modules of one output file become bytes at their offsets.
 *
 * Modules go in batches that a cache holds. A batch takes two sweeps over its values: the largest magnitude
 * of each group, which is the global scale, then quantisation by rows, each piece's error, and its bytes.
 */
#ifndef QUERN_QUANTIZE_CONVERT_H
#define QUERN_QUANTIZE_CONVERT_H

#include "quantize/outputs.h"
#include "quantize/progress.h"

#include <quern/file.h>

/* How a group's weights become NVFP4. */
typedef enum group_method {
    METHOD_QUANTISE, /* through values */
    METHOD_MXFP4,    /* codes stay, exponents become scales */
    METHOD_NVFP4     /* codes stay, so do scales unless the globals of the group differ */
} group_method;
group_method group_method_of(const module_list *list, const module_group *g);

/* Finds the globals of groups that have none yet; `groups` are their numbers. Returns an exit code. */
int find_globals(conversion *c, const size_t *groups, size_t count);
/* Writes every tensor of a file that is laid out. Returns an exit code. */
int convert_file(conversion *c, const output_file *f, quern_file *out, progress *p);

/* Rows of a module that are one piece of work. */
int64_t rows_a_piece(const matrix *m);

#endif
