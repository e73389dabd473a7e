/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * convert.h - the computation: modules of a few output files become bytes at their offsets.
 *
 * Modules go in batches that a cache holds. A batch takes two sweeps over its values: the largest magnitude
 * of each group, which is the global scale, then quantisation by rows, each piece's error, and its bytes.
 */
#ifndef QUERN_QUANTIZE_CONVERT_H
#define QUERN_QUANTIZE_CONVERT_H

#include "quantize/outputs.h"
#include "quantize/progress.h"
#include "quantize/work.h"

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
/* A file that is laid out, and what is written of it. */
typedef struct open_output {
    const output_file *file;
    quern_file *out;
} open_output;

enum { FILES_AT_ONCE = WORK_LANES };
/* Writes every tensor of the files, at most FILES_AT_ONCE. Returns an exit code. */
int convert_files(conversion *c, const open_output *outputs, size_t count, progress *p);

/* Rows of a module that are one piece of work. */
int64_t rows_a_piece(const matrix *m);

#endif
