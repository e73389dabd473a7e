/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * scenario.h - runs of `quern run` beyond one call of an operation: a sequence in pieces, decoding, a whole
 * layer. A scenario is a file with one of these structs, and a row of scenarios.c.
 */
#ifndef QUERN_TOOLS_SCENARIO_H
#define QUERN_TOOLS_SCENARIO_H

#include "job.h"

/* A tensor that the scenario itself writes, for --list. */
typedef struct scenario_output {
    const char *name, *dtype, *shape;
} scenario_output;

typedef struct scenario {
    const char *name;       /* OP of the command line */
    const char *op;         /* its operation; one of the same name is replaced */
    const char *help;       /* NULL: the operation's */
    const option_row *rows; /* its own options, before the operation's of the same name */
    size_t row_count;
    void *options;                  /* static: what the rows fill, at the defaults */
    const char *without;            /* options of the operation that it does not have: "tile scope" */
    const scenario_output *outputs; /* ends with a name of NULL; NULL: the operation's */
    int (*set_params)(job *j);                  /* as job.set_params; may be NULL */
    int (*inputs)(job *j);                      /* checks inputs; may be NULL */
    int (*compute)(job *j, quern_context *ctx); /* sizes outputs and computes */
} scenario;

extern const scenario scenario_csa_compress, scenario_hca_compress;   /* compressor.c */
extern const scenario scenario_v4_attention;                          /* v4_attention.c */
extern const scenario scenario_v4_layer;                              /* v4_layer.c */
extern const scenario scenario_nsa_decode, scenario_attention_decode; /* decode.c */

/* Ends with NULL. */
extern const scenario *const scenarios[];
const scenario *scenario_named(const char *name);
/* Writes the operation's options that the scenario also has to `to` (QUERN_OP_PARAMS_MAX rows) and returns
 * how many. s NULL: all. */
size_t scenario_params(const scenario *s, const operation *op, option_row *to);

#endif
