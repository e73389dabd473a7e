/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * scenario.h - what `quern run` does beyond one call of an operation: a sequence in pieces, decoding, a whole
 * layer. A scenario is a file with one of these structs, and a row of scenarios.c.
 */
#ifndef QUERN_TOOLS_SCENARIO_H
#define QUERN_TOOLS_SCENARIO_H

#include "job.h"

/* A tensor that the scenario writes itself, for the list. */
typedef struct scenario_output {
    const char *name, *dtype, *shape;
} scenario_output;

typedef struct scenario {
    const char *name; /* OP of the command line */
    const char
        *op; /* the operation whose inputs and options it takes; with the same name it stands in its place */
    const char *help;       /* NULL: the operation's */
    const option_row *rows; /* its own options, before the operation's of the same name */
    size_t row_count;
    void *options;                  /* static: what the rows fill, at the defaults */
    const char *without;            /* options of the operation that it does not have: "tile scope" */
    const scenario_output *outputs; /* ends with a name of NULL; NULL: the operation's */
    bool cpu_only;
    int (*inputs)(job *j); /* looks at inputs, sets parameters; NULL: nothing to do */
    int (*compute)(job *j,
                   quern_context *ctx); /* sizes outputs (job_prepare(), or job_add_output()) and computes */
} scenario;

extern const scenario scenario_csa_compress, scenario_hca_compress;   /* compressor.c */
extern const scenario scenario_v4_attention;                          /* v4_attention.c */
extern const scenario scenario_nsa_decode, scenario_attention_decode; /* decode.c */

/* Ends with NULL. */
extern const scenario *const scenarios[];
const scenario *scenario_named(const char *name);
/* The operation's options that the scenario has, too, in `to` (QUERN_OP_PARAMS_MAX rows); returns how many. s
 * NULL: all. */
size_t scenario_params(const scenario *s, const operation *op, option_row *to);

#endif
