/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_chart.c - results as a chart, by gnuplot: time, and speed-up over the peer, against length; bars of a
 * subject that has no lengths, and of several subjects. */
#include "bench.h"

#include "command.h"
#include "output.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SERIES_MAX = 8 };

/* Results of the same operation and thread count. */
static bool same_series(const bench_result *a, const bench_result *b)
{
    return strcmp(a->op, b->op) == 0 && a->threads == b->threads;
}

/* The first result of each series; prints their points: length, time, peer's time. */
static int print_series(FILE *f, const bench_results *r, const bench_result *first[SERIES_MAX])
{
    int series = 0;
    for (size_t i = 0; i < r->count && series < SERIES_MAX; i++) {
        bool seen = false;
        for (int k = 0; k < series && !seen; k++) seen = same_series(first[k], &r->rows[i]);
        if (seen) continue;
        fprintf(f, "$s%d << EOD\n", series);
        for (size_t k = i; k < r->count; k++)
            if (same_series(&r->rows[i], &r->rows[k]))
                fprintf(f, "%" PRId64 " %.6g %.6g\n", r->rows[k].what.n, r->rows[k].measured.time.median,
                        r->rows[k].peer != NULL ? r->rows[k].measured.beside_ms : -1.0);
        fprintf(f, "EOD\n");
        first[series++] = &r->rows[i];
    }
    return series;
}

static void print_lines(FILE *f, const bench_results *r)
{
    const bench_result *first[SERIES_MAX];
    const char *peer = r->rows[0].peer;
    int64_t least = INT64_MAX, most = 0;
    fprintf(f, "set terminal svg size %d,480 background '#ffffff' font 'sans-serif,13'\n",
            peer != NULL ? 960 : 520);
    for (size_t i = 0; i < r->count; i++) {
        least = r->rows[i].what.n < least ? r->rows[i].what.n : least;
        most = r->rows[i].what.n > most ? r->rows[i].what.n : most;
    }
    fprintf(f, "set xrange [%g:%g]\n", (double)least / 1.5, (double)most * 1.5);
    fprintf(f, "set logscale x 2\nset grid\nset key below Left reverse noenhanced\nset xlabel 'n'\n");
    const int series = print_series(f, r, first);
    if (peer != NULL) fprintf(f, "set multiplot layout 1,2\n");
    fprintf(f, "set logscale y\nset ylabel 'milliseconds'\nplot ");
    for (int i = 0; i < series; i++) {
        fprintf(f, "%s$s%d using 1:2 with linespoints linewidth 2 linecolor %d title '%s, %d thread%s'",
                i > 0 ? ", " : "", i, i + 1, first[i]->op, first[i]->threads,
                first[i]->threads > 1 ? "s" : "");
        if (first[i]->peer != NULL)
            fprintf(f, ", $s%d using 1:3 with linespoints dashtype 2 linecolor %d title '%s beside it'", i,
                    i + 1, first[i]->peer);
    }
    if (peer != NULL) {
        fprintf(f,
                "\nunset logscale y\nset yrange [0:*]\nset ylabel 'times as fast as %s'\nplot 1 with lines "
                "linecolor 'gray' notitle",
                peer);
        for (int i = 0; i < series; i++)
            if (first[i]->peer != NULL)
                fprintf(f, ", $s%d using 1:($3/$2) with linespoints linewidth 2 linecolor %d title '%s'", i,
                        i + 1, first[i]->op);
        fprintf(f, "\nunset multiplot");
    }
    fprintf(f, "\n");
}

static void print_bars(FILE *f, const bench_results *r)
{
    double most = 0;
    bool one = true; /* operation: then the labels tell all */
    for (size_t i = 0; i < r->count; i++) {
        most = r->rows[i].value > most ? r->rows[i].value : most;
        one = one && strcmp(r->rows[i].op, r->rows[0].op) == 0;
    }
    fprintf(f, "set terminal svg size 760,%zu background '#ffffff' font 'sans-serif,13'\n$bars << EOD\n",
            120 + 22 * r->count);
    for (size_t i = 0; i < r->count; i++)
        fprintf(f, "\"%s %s\" %.4g\n", one ? "" : r->rows[i].op, r->rows[i].label, r->rows[i].value);
    fprintf(f,
            "EOD\nset yrange [%zu.5:-0.5]\nset xrange [0:%g]\nset grid x\nset xlabel '%s'\n"
            "set ytics noenhanced\nplot $bars using (0.5*$2):0:(0.5*$2):(0.35):ytic(1) with boxxyerror "
            "fill solid 0.6 notitle, $bars using 2:0:2 with labels left offset 0.5,0 notitle\n",
            r->count - 1, 1.2 * most, r->page ? "fraction of the limit" : r->rows[0].subject->unit);
}

int report_svg(const char *path, const bench_results *r)
{
    FILE *f = tmpfile();
    if (f == NULL) return fail(EXIT_MACHINE, "no temporary file for gnuplot's script: %s", strerror(errno));
    if (!r->page && r->rows[0].subject->n != NULL) print_lines(f, r);
    else print_bars(f, r);
    output_last(path);
    const int code = output_chart(path, f);
    fclose(f);
    return code;
}
