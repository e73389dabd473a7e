/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * convert.h - the computation: modules of a few output files become bytes at their offsets.
 *
 * A group takes two sweeps over its values: their largest magnitude, from which the global scale follows,
 * then quantisation by rows, each piece's error, and its bytes. The second follows on the first, so that it
 * finds much in the caches. No thread waits for others but at the end of a group's first sweep.
 */
#ifndef QUERN_QUANTIZE_CONVERT_H
#define QUERN_QUANTIZE_CONVERT_H

#include "quantize/outputs.h"
#include "quantize/progress.h"
#include "quantize/thread_team.h"

#include <quern/file.h>

/* How a group's weights become NVFP4. */
typedef enum group_method {
    METHOD_QUANTISE, /* through values */
    METHOD_MXFP4,    /* codes stay, exponents become scales */
    METHOD_NVFP4     /* codes stay, so do scales unless the globals of the group differ */
} group_method;
group_method group_method_of(const module_list *list, const module_group *g);

/* The first sweep. A group's pieces are swept by whichever threads need its global, together. */
typedef struct sweep sweep;
/* NULL without memory. */
sweep *sweep_new(const conversion *c);
void sweep_free(sweep *s);
/* Forgets the pieces; groups whose global is known stay so. */
void sweep_begin(sweep *s);
/* Adds a group's pieces unless its global is known; *values grows to the largest that needs a buffer. Returns
 * an exit code. */
int sweep_add(conversion *c, sweep *s, size_t group, int64_t *values);
/* Ends when the group's global is known, after taking part in finding it. From any thread. Returns an exit
 * code, and after a failure has written `sentence`. */
int sweep_find(const conversion *c, sweep *s, size_t group, void *buffer, char sentence[1024]);

/* A file that is laid out, and what is written of it. */
typedef struct open_output {
    const output_file *file;
    quern_file *out;
} open_output;

enum { FILES_AT_ONCE = TEAM_LANES };
/* Writes every tensor of the files, at most FILES_AT_ONCE. Returns an exit code. */
int convert_files(conversion *c, const open_output *outputs, size_t count, progress *p);

/* Rows of a module that are one piece of work; copied: codes that stay as they are. */
int64_t rows_a_piece(const matrix *m, bool copied);

#endif
