/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_report.c - results as a table and as JSON. */
#include "bench.h"

#include "command.h"
#include "machine.h"
#include "output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

bench_result *bench_add(bench_results *r, const bench_case *c, const quern_context *ctx, const char *op)
{
    bench_result *more = need_memory((r->count + 1) * sizeof *more);
    if (r->count > 0) memcpy(more, r->rows, r->count * sizeof *more);
    free(r->rows);
    r->rows = more;
    bench_result *row = &r->rows[r->count++];
    *row = (bench_result){.subject = c->subject, .what = *c, .threads = quern_context_threads(ctx)};
    row->work = (work){.limit = CEILINGS, .formula = "", .bytes_formula = ""};
    snprintf(row->op, sizeof row->op, "%s", op);
    return row;
}

void bench_free(bench_results *r)
{
    for (size_t i = 0; i < r->count; i++) json_decref(r->rows[i].extra);
    free(r->rows);
}

/* ---- the table ---- */

/* The extents and words of the case that are not 0: "experts 16, width 4096". */
static void print_case(const bench_case *c)
{
    const bench_subject *s = c->subject;
    const char *between = "";
    printf("%s: ", s->name);
    if (s->heads != NULL) {
        printf("heads %" PRId64 "/%" PRId64, c->heads, c->kv_heads);
        between = ", ";
    }
    if (s->dim != NULL) printf("%sdim %" PRId64 "/%" PRId64, between, c->dim, c->dim_v);
    for (int i = 0; s->extents != NULL && s->extents[i].option != NULL; i++) {
        if (c->extent[i] == 0) continue;
        printf("%s%s %" PRId64, between, s->extents[i].option, c->extent[i]);
        between = ", ";
    }
    for (int i = 0; i < CHOICES_MAX && s->choices[i].option != NULL; i++) {
        printf("%s%s %s", between, s->choices[i].option, s->choices[i].words[c->choice[i]]);
        between = ", ";
    }
    printf("\n");
}

static const char *dtype_of(const bench_case *c)
{
    return c->dtype == QUERN_U8 ? "nvfp4" : quern_dtype_name((quern_dtype)c->dtype);
}

/* A bar of a fraction, to see rather than to read. */
static void print_bar(double fraction)
{
    enum { WIDTH = 20 };
    const double shown = fraction < 1 ? fraction : 1;
    printf("  |");
    for (int i = 0; i < WIDTH; i++) putchar(i < (int)(shown * WIDTH + 0.5) ? '#' : ' ');
    printf("|");
}

void report_row(const bench_results *r, const bench_result *row)
{
    const measurement *m = &row->measured;
    const double ms = m->time.median, done = row->work.flops > 0 ? row->work.flops : row->work.bytes;
    char rate[32] = "-";
    if (row == r->rows)
        printf("%-26s %9s %6s %3s %11s %10s %10s %16s  %s\n", "op", "n", "dtype", "thr", "ms median", "p10",
               "p90", "rate", "of limit, mover, peer");
    if (done > 0)
        snprintf(rate, sizeof rate, "%.1f %s", done / ms * 1e-6, row->work.flops > 0 ? "GFLOP/s" : "GB/s");
    printf("%-26s %9" PRId64 " %6s %3d %11.4f %10.4f %10.4f %16s", row->op, row->what.n, dtype_of(&row->what),
           row->threads, ms, m->time.p10, m->time.p90, rate);
    if (r->page) print_bar(m->fraction);
    if (m->ceiling > 0) printf("  %.3f of %s %.1f", m->fraction, ceiling_name(m->limit), m->ceiling);
    if (m->moved > 0) printf("  %.3f of mover", m->moved);
    if (row->peer != NULL) printf("  %.2fx %s", m->over_beside, row->peer);
    printf("\n");
    fflush(stdout);
}

void report_formulas(const bench_results *r)
{
    if (r->count > 0 && r->rows[0].subject->n != NULL) print_case(&r->rows[0].what);
    for (size_t i = 0; i < r->count; i++) {
        const bench_result *row = &r->rows[i];
        bool said = *row->work.formula == '\0';
        for (size_t k = 0; k < i && !said; k++) said = strcmp(r->rows[k].op, row->op) == 0;
        if (said) continue;
        printf("G/s of %s: %s%s%s\n", row->op, row->work.formula,
               *row->work.bytes_formula != '\0' ? "; bytes " : "", row->work.bytes_formula);
    }
}

/* ---- JSON ---- */

/* A parameter's value as the library's text for it. */
static json_t *param_json(const char *takes, const char *text)
{
    char *end;
    if (strcmp(takes, "true|false") == 0) return json_boolean(*text == 't');
    const long long integer = strtoll(text, &end, 10);
    if (end != text && *end == '\0' && strcmp(takes, "NUMBER") != 0) return json_integer(integer);
    const double number = strtod(text, &end);
    return end != text && *end == '\0' ? output_number(number) : json_string(text);
}

json_t *bench_option_json(const option_row *row, const void *base)
{
    char text[60];
    option_current_text(row, base, text, sizeof text);
    switch (row->type) {
    case OPTION_PARAM: return param_json(row->choices[1], text);
    case OPTION_INT: return json_integer(atoll(text));
    case OPTION_BOOL: return json_boolean(*text == 't');
    default: return json_string(text);
    }
}

static void set_integer(json_t *object, const char *name, int64_t value)
{
    json_object_set_new(object, name, json_integer(value));
}

/* The shape of attention and NSA: sizes by their letters, options by their names. */
static json_t *attention_shape(const bench_case *c)
{
    json_t *shape = json_object();
    set_integer(shape, "B", c->batch);
    set_integer(shape, "N", c->n);
    set_integer(shape, "H", c->heads);
    set_integer(shape, "Hkv", c->kv_heads);
    set_integer(shape, "D", c->dim);
    set_integer(shape, "Dv", c->dim_v);
    for (int i = CASE_OTHERS; i < CASE_ROWS; i++) {
        const char *name = bench_case_rows[i].name;
        const bool every = strcmp(name, "documents") == 0 || strcmp(name, "data") == 0;
        if (every || (strcmp(c->op->info.group, "nsa") == 0 && strcmp(name, "batch") != 0))
            json_object_set_new(shape, name, bench_option_json(&bench_case_rows[i], c));
    }
    for (size_t i = 0; i < c->op->option_count; i++)
        json_object_set_new(shape, c->op->options[i].name, bench_option_json(&c->op->options[i], &c->params));
    return shape;
}

/* Whether a parameter is no option, but follows. */
static bool follows(const bench_subject *s, const char *option)
{
    for (int i = 0; i < WORDS_MAX && s->follow[i][0] != NULL; i++)
        if (strcmp(s->follow[i][0], option) == 0) return true;
    return false;
}

/* Of the others: integers and words by their options' names, parameters by their fields. */
static json_t *shape_json(const bench_case *c, int pass)
{
    const bench_subject *s = c->subject;
    char name[40];
    if (s->attention) return attention_shape(c);
    json_t *shape = json_object();
    if (s->n != NULL) set_integer(shape, "n", c->n);
    for (size_t i = 0; c->op != NULL && i < c->op->option_count; i++)
        if (!follows(s, c->op->options[i].name))
            json_object_set_new(shape, c->op->params[c->op->options[i].offset].field,
                                bench_option_json(&c->op->options[i], &c->params));
    if (s->heads != NULL) {
        set_integer(shape, "heads", c->heads);
        set_integer(shape, "kv_heads", c->kv_heads);
    }
    for (int i = 0; s->extents != NULL && s->extents[i].option != NULL; i++) {
        snprintf(name, sizeof name, "%s", s->extents[i].option);
        for (char *at = name; (at = strchr(at, '-')) != NULL;) *at = '_';
        set_integer(shape, name, c->extent[i]);
    }
    for (int i = 0; i < CHOICES_MAX && s->choices[i].option != NULL; i++) {
        snprintf(name, sizeof name, "%s", s->choices[i].option);
        for (char *at = name; (at = strchr(at, '-')) != NULL;) *at = '_';
        json_object_set_new(shape, name, json_string(s->choices[i].words[c->choice[i]]));
    }
    if (s->n != NULL) json_object_set_new(shape, "backward", json_boolean(pass == 1));
    return shape;
}

static json_t *number_or_null(double x)
{
    return x > 0 ? output_number(x) : json_null();
}

static json_t *text_or_null(const char *text)
{
    return text != NULL && *text != '\0' ? json_string(text) : json_null();
}

static json_t *result_json(const bench_result *row, const quern_context *ctx)
{
    const measurement *m = &row->measured;
    const double ms = m->time.median;
    const struct {
        const char *name;
        json_t *value;
    } fields[] = {
        {"op", json_string(row->op)},
        {"shape", shape_json(&row->what, row->pass)},
        {"dtype", json_string(dtype_of(&row->what))},
        {"level", json_string(quern_cpu_level_name(quern_context_cpu_level(ctx)))},
        {"threads", json_integer(row->threads)},
        {"reps", json_integer(m->time.reps)},
        {"ms_median", number_or_null(ms)},
        {"ms_p10", number_or_null(m->time.p10)},
        {"ms_p90", number_or_null(m->time.p90)},
        {"gflops", number_or_null(ms > 0 ? row->work.flops / ms * 1e-6 : 0)},
        {"gbps", number_or_null(ms > 0 ? row->work.bytes / ms * 1e-6 : 0)},
        {"ceiling", m->ceiling > 0 ? json_string(ceiling_name(m->limit)) : json_null()},
        {"fraction", number_or_null(m->ceiling > 0 ? m->fraction : 0)},
        {"read_fraction", number_or_null(m->of_read)},
        {"mover_fraction", number_or_null(m->moved)},
        {"peer", text_or_null(row->peer)},
        {"peer_ms", number_or_null(m->beside_ms)},
        {"over_peer", number_or_null(m->over_beside)},
        {"of_peer", number_or_null(m->over_beside > 0 ? 1 / m->over_beside : 0)},
        {"formula", text_or_null(row->work.formula)},
        {"bytes_formula", text_or_null(row->work.bytes_formula)},
        {"workspace_bytes", json_integer((json_int_t)row->workspace_bytes)},
    };
    json_t *o = json_object();
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        json_object_set_new(o, fields[i].name, fields[i].value);
    if (row->extra != NULL) json_object_update(o, row->extra);
    return o;
}

static json_t *ceilings_json(const bench_results *r)
{
    json_t *ceilings = json_object();
    for (int c = 0; c < CEILINGS; c++)
        for (int i = 0; i < r->thread_counts; i++) {
            char name[16];
            if (r->ceilings[c][i] <= 0) continue;
            json_t *of = json_object_get(ceilings, ceiling_name((ceiling)c));
            if (of == NULL) {
                of = json_pack("{s:s}", "unit", ceiling_unit((ceiling)c));
                json_object_set_new(ceilings, ceiling_name((ceiling)c), of);
            }
            snprintf(name, sizeof name, "%" PRId64, r->threads[i]);
            json_object_set_new(of, name, json_real(r->ceilings[c][i]));
        }
    return ceilings;
}

int report_json(const char *path, const bench_results *r, const bench_case *c, const quern_context *ctx)
{
    json_t *list = json_array();
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    for (size_t i = 0; i < r->count; i++)
        if (r->rows[i].measured.time.reps > 0 || r->rows[i].extra != NULL)
            json_array_append_new(list, result_json(&r->rows[i], ctx));
    json_t *root = json_pack("{s:i, s:s, s:s, s:o, s:s, s:o, s:o, s:I}", "schema", 1, "version",
                             quern_version(), "commit", machine_commit(), "machine", machine_json(ctx),
                             "device", device_choices[c->device], "ceilings", ceilings_json(r), "results",
                             list, "peak_bytes", (json_int_t)usage.ru_maxrss * 1024);
    output_last(path);
    const int code = output_json(path, root, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(root);
    return code;
}
