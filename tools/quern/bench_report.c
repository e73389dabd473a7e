/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_report.c - results as a table, as JSON, as a chart. */
#include "bench.h"

#include "command.h"
#include "machine.h"
#include "output.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *op_name(const bench_row *row, char *text, size_t room)
{
    snprintf(text, room, "%s%s", row->what->op->name, row->backward ? "-backward" : "");
    return text;
}

void report_header(void)
{
    printf("%-22s %9s %7s %5s %4s %11s %10s %10s %9s %9s %9s %9s\n", "op", "N", "heads", "dtype", "thr",
           "ms median", "p10", "p90", "G/s", "of limit", "of mover", "over peer");
}

void report_row(const bench_row *row)
{
    char op[40], heads[24], fraction[24] = "-", moved[24] = "-", peer[24] = "-";
    const bench_case *c = row->what;
    snprintf(heads, sizeof heads, "%" PRId64 "/%" PRId64, c->heads, c->kv_heads);
    if (row->measured.ceiling > 0) snprintf(fraction, sizeof fraction, "%.3f", row->measured.fraction);
    if (row->measured.moved > 0) snprintf(moved, sizeof moved, "%.3f", row->measured.moved);
    if (row->peer != NULL) snprintf(peer, sizeof peer, "%.2fx", row->peer_ms / row->measured.time.median);
    printf("%-22s %9" PRId64 " %7s %5s %4d %11.3f %10.3f %10.3f %9.1f %9s %9s %9s\n",
           op_name(row, op, sizeof op), c->n, heads, quern_dtype_name((quern_dtype)c->dtype), row->threads,
           row->measured.time.median, row->measured.time.p10, row->measured.time.p90, row_rate(row), fraction,
           moved, peer);
    fflush(stdout);
}

void report_formulas(const bench_row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char op[40];
        bool said = false;
        for (size_t k = 0; k < i && !said; k++) said = rows[k].backward == rows[i].backward;
        if (!said) printf("G/s of %s: %s\n", op_name(&rows[i], op, sizeof op), rows[i].work.formula);
    }
}

/* A parameter's value as the library's text for it. */
static json_t *param_json(const char *takes, const char *text)
{
    if (strcmp(takes, "INT") == 0) return json_integer(atoll(text));
    if (strcmp(takes, "NUMBER") == 0) return json_real(atof(text));
    return strcmp(takes, "true|false") == 0 ? json_boolean(*text == 't') : json_string(text);
}

json_t *report_option(const option_row *row, const void *base)
{
    const void *at = row->type == OPTION_PARAM ? base : (const char *)base + row->offset;
    char text[60];
    option_current_text(row, base, text, sizeof text);
    switch (row->type) {
    case OPTION_PARAM: return param_json(row->choices[1], text);
    case OPTION_INT: return json_integer(*(const int64_t *)at);
    case OPTION_BOOL: return json_boolean(*(const bool *)at);
    case OPTION_FLOAT: return json_real((double)*(const float *)at);
    default: return json_string(text);
    }
}

static void set_option(json_t *object, const option_row *row, const void *base)
{
    json_object_set_new(object, row->name, report_option(row, base));
}

static bool is_of_every_case(const char *option)
{
    return strcmp(option, "batch") == 0 || strcmp(option, "dtype") == 0 || strcmp(option, "backward") == 0;
}

/* The shape: sizes, kinds of inputs, and every parameter of the operation under its option's name. */
static json_t *shape_json(const bench_case *c)
{
    json_t *shape = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "B", (json_int_t)c->batch, "N",
                              (json_int_t)c->n, "H", (json_int_t)c->heads, "Hkv", (json_int_t)c->kv_heads,
                              "D", (json_int_t)c->dim, "Dv", (json_int_t)c->dim_v);
    json_object_set_new(shape, "documents", json_integer((json_int_t)c->documents));
    json_object_set_new(shape, "data", json_string(c->data == DATA_SMOOTH ? "smooth" : "noise"));
    if (strcmp(c->op->info.group, "nsa") == 0)
        for (size_t i = 0; i < bench_case_row_count; i++)
            if (!is_of_every_case(bench_case_rows[i].name)) set_option(shape, &bench_case_rows[i], c);
    for (size_t i = 0; i < c->op->option_count; i++) set_option(shape, &c->op->options[i], &c->params);
    return shape;
}

json_t *report_json(const bench_row *row)
{
    char op[40];
    const bool limited = row->measured.ceiling > 0;
    return json_pack(
        "{s:s, s:o, s:s, s:i, s:i, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:I, s:o, s:o}", "op",
        op_name(row, op, sizeof op), "shape", shape_json(row->what), "dtype",
        quern_dtype_name((quern_dtype)row->what->dtype), "threads", row->threads, "reps",
        row->measured.time.reps, "ms_median", row->measured.time.median, "ms_p10", row->measured.time.p10,
        "ms_p90", row->measured.time.p90, "gflops",
        row->work.flops > 0 ? json_real(row_rate(row)) : json_null(), "gbps",
        row->work.bytes > 0 ? json_real(row_rate(row)) : json_null(), "ceiling",
        limited ? json_string(ceiling_name(row->work.limit)) : json_null(), "fraction",
        limited ? json_real(row->measured.fraction) : json_null(), "peer",
        row->peer != NULL ? json_string(row->peer) : json_null(), "peer_ms",
        row->peer != NULL ? json_real(row->peer_ms) : json_null(), "formula", row->work.formula,
        "workspace_bytes", (json_int_t)row->workspace_bytes, "mover_fraction",
        row->measured.moved > 0 ? json_real(row->measured.moved) : json_null(), "workspace_fraction",
        row->workspace_fraction > 0 ? json_real(row->workspace_fraction) : json_null());
}

/* Points of one pass and thread count: length, time, peer's time. */
static void print_block(FILE *f, const char *name, const bench_row *rows, size_t count, bool backward,
                        int threads)
{
    fprintf(f, "$%s << EOD\n", name);
    for (size_t i = 0; i < count; i++)
        if (rows[i].backward == backward && rows[i].threads == threads)
            fprintf(f, "%" PRId64 " %.6g %.6g\n", rows[i].what->n, rows[i].measured.time.median,
                    rows[i].peer != NULL ? rows[i].peer_ms : -1.0);
    fprintf(f, "EOD\n");
}

int report_svg(const char *path, const bench_row *rows, size_t count)
{
    const bool peers = rows[0].peer != NULL;
    FILE *f = tmpfile();
    if (f == NULL) return fail(EXIT_MACHINE, "no temporary file for gnuplot's script: %s", strerror(errno));
    fprintf(f, "set terminal svg size %d,480 background '#ffffff' font 'sans-serif,13'\n", peers ? 960 : 520);
    int64_t least = INT64_MAX, most = 0;
    for (size_t i = 0; i < count; i++) {
        least = rows[i].what->n < least ? rows[i].what->n : least;
        most = rows[i].what->n > most ? rows[i].what->n : most;
    }
    fprintf(f, "set xrange [%g:%g]\n", (double)least / 1.5, (double)most * 1.5);
    fprintf(f, "set logscale x 2\nset grid\nset key below Left reverse\nset xlabel 'tokens'\n");
    char titles[8][80], blocks[8][16];
    int series = 0;
    for (int pass_index = 0; pass_index < 2; pass_index++) {
        for (size_t i = 0; i < count && series < 8; i++) {
            bool seen = rows[i].backward != (pass_index == 1);
            for (size_t k = 0; k < i && !seen; k++)
                seen = rows[k].backward == rows[i].backward && rows[k].threads == rows[i].threads;
            if (seen) continue;
            snprintf(blocks[series], sizeof blocks[series], "s%d", series);
            snprintf(titles[series], sizeof titles[series], "%s%s, %d thread%s", rows[i].what->op->name,
                     rows[i].backward ? " backward" : "", rows[i].threads, rows[i].threads > 1 ? "s" : "");
            print_block(f, blocks[series++], rows, count, rows[i].backward, rows[i].threads);
        }
    }
    if (peers) fprintf(f, "set multiplot layout 1,2\n");
    fprintf(f, "set logscale y\nset ylabel 'milliseconds'\nplot ");
    for (int i = 0; i < series; i++) {
        fprintf(f, "%s$%s using 1:2 with linespoints linewidth 2 linecolor %d title '%s'", i > 0 ? ", " : "",
                blocks[i], i + 1, titles[i]);
        if (peers)
            fprintf(f, ", $%s using 1:3 with linespoints dashtype 2 linecolor %d title '%s beside it'",
                    blocks[i], i + 1, rows[0].peer);
    }
    if (peers) {
        fprintf(f,
                "\nunset logscale y\nset yrange [0:*]\nset ylabel 'times as fast as %s'\nplot 1 with lines "
                "linecolor 'gray' notitle",
                rows[0].peer);
        for (int i = 0; i < series; i++)
            fprintf(f, ", $%s using 1:($3/$2) with linespoints linewidth 2 linecolor %d title '%s'",
                    blocks[i], i + 1, titles[i]);
        fprintf(f, "\nunset multiplot");
    }
    fprintf(f, "\n");
    const int code = output_chart(path, f);
    fclose(f);
    return code;
}

int report_results(const char *path, const quern_context *ctx, json_t *results)
{
    json_t *root =
        json_pack("{s:i, s:s, s:s, s:o, s:s, s:O}", "schema", 1, "version", quern_version(), "commit",
                  machine_commit(), "machine", machine_json(ctx), "device", "cpu", "results", results);
    const int code = output_json(path, root, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(root);
    return code;
}

int scenario_options(int argc, char **argv, const option_group *group, const char *usage, bool *help)
{
    int first;
    const int code = parse_options(argc, argv, group, 1, &first, help);
    if (code != EXIT_DONE) return code;
    if (*help) {
        printf("%s", usage);
        print_options(group);
        return EXIT_DONE;
    }
    if (argc - first != 1)
        return fail(EXIT_USAGE, "%d words are given: one subject is accepted", argc - first);
    return EXIT_DONE;
}
