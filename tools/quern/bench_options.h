/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_options.h - the options of a subject of `quern bench`, and its help. */
#ifndef QUERN_TOOLS_BENCH_OPTIONS_H
#define QUERN_TOOLS_BENCH_OPTIONS_H

#include "bench.h"

typedef struct bench_options {
    const char *n, *threads, *json, *svg, *profile;
    int64_t reps, rounds;
    bool no_peer;
    bench_case what;
} bench_options;

enum { BENCH_ROWS = 9 }; /* options that do not depend on the subject */
/* The rows of a subject, in a base each. */
typedef struct option_tables {
    option_row own[BENCH_ROWS], of_case[OPTION_MAX], params[QUERN_OP_PARAMS_MAX];
    option_group groups[3];
    char peer_help[80];
} option_tables;

/* The options at the subject's defaults. */
bench_options bench_default_options(const bench_subject *s);
int bench_default_rounds(const bench_subject *s);
/* Rows for parse_options(), which fill `o`. */
void bench_make_tables(const bench_subject *s, bench_options *o, option_tables *t);
/* Every subject's name. */
const char *bench_subject_names(const char *between);
/* s NULL: of all. */
void bench_print_help(const bench_subject *s, const option_tables *t);

#endif
