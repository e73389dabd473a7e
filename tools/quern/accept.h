/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * accept.h - acceptance figures: each is measured, compared with its target, printed on a line.
 *
 * What is divided is measured in turns in one run, because machines change speed while they are measured: a kernel and
 * its ceiling, one thread and two. (accept_nsa.c takes the time of dense attention once per length: it takes minutes.)
 * A fraction of a ceiling is the median over a fixed number of rounds; of the other figures one that misses is measured
 * again, at most six times in all, and the best counts.
 */
#ifndef QUERN_TOOLS_ACCEPT_H
#define QUERN_TOOLS_ACCEPT_H

#include "bench.h"

typedef struct acceptance {
    quern_context *one, *all; /* contexts on 1 thread, and on all */
    int threads;
    int failed, passed;
    double start_ms;
} acceptance;

enum { ACCEPT_TRIES = 6, FORWARD = 0, BACKWARD = 1, BOTH = 2 };

/* Prints the line of a figure and counts it. at_most: the target is an upper bound. */
void accept_figure(acceptance *a, const char *what, bool at_most, double target, double measured, const char *unit);
/* Prints a figure that has no target. */
void accept_information(const char *what, double measured, const char *unit);
/* True while there is time for another try. */
bool accept_may_retry(const acceptance *a);

/* A case with the defaults of the acceptance tables: B 1, D 128, seed 1, noise. */
bench_case accept_case(const char *op, int64_t n, int64_t heads, int64_t kv_heads, quern_dtype dtype);

/* The passes of a case over 21 rounds, in turns with their limits. */
int accept_fraction(const bench_case *c, quern_context *ctx, measurement measured[2]);
/* Median times in ms by pass (BOTH: their sum): `first` and `second` take turns. second NULL: first alone on both
 * contexts, for the ratio of thread counts. */
int accept_times(const bench_case *first, quern_context *ctx_first, const bench_case *second, quern_context *ctx_second,
                 int rounds, double ms_first[3], double ms_second[3]);

int accept_attention(acceptance *a);
int accept_nsa(acceptance *a);
int accept_dsv4(acceptance *a); /* bench_compressor.c */

#endif
