/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_options.c - the options of a subject of `quern bench`, and its help. */
#include "bench_options.h"

#include "command.h"
#include "output.h"

#include <stdio.h>
#include <string.h>

#define AT(member) offsetof(bench_options, member)
enum { ROW_N, ROW_REPS, ROW_ROUNDS, ROW_PEER, ROW_PROFILE, ROW_OTHERS };
static const option_row rows[] = {
    {"n", OPTION_TEXT, AT(n), NULL, "lengths or rows, such as 1,512 or 4k,16k,1M"},
    {"reps", OPTION_INT, AT(reps), NULL,
     "instead of rounds: runs that are timed; 0: at least 3 and a second"},
    {"rounds", OPTION_INT, AT(rounds), NULL,
     "of a moment each, in turns with the limits, at most 101; the medians count; 0: reps"},
    {"no-peer", OPTION_FLAG, AT(no_peer), NULL, "leave out what stands beside: "},
    {"profile", OPTION_TEXT, AT(profile), NULL, "preset that is set before the other options: tile256"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"device", OPTION_CHOICE, AT(what.device), device_choices, "where to compute"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
    {"svg", OPTION_TEXT, AT(svg), NULL, "draw the results to this file (gnuplot)"},
};
#undef AT
_Static_assert(sizeof rows / sizeof *rows == BENCH_ROWS, "as many as option_tables holds");

/* Whether an operation's parameter is set by an option of the subject, or follows. */
static bool is_taken(const bench_subject *s, const option_group *before, const char *name)
{
    for (size_t i = 0; i < before->count; i++)
        if (strcmp(before->rows[i].name, name) == 0) return true;
    for (int i = 0; i < WORDS_MAX && s->follow[i][0] != NULL; i++)
        if (strcmp(s->follow[i][0], name) == 0) return true;
    return false;
}

static size_t case_rows(const bench_subject *s, option_row *to)
{
    const bool presence[] = {s->measure == NULL || s->extents != NULL,
                             s->work[1].flops != NULL || s->work[1].bytes != NULL, s->heads != NULL,
                             s->dim != NULL};
    size_t n = 0;
    for (int i = 0; i < CASE_ROWS; i++) {
        if (i < CASE_OTHERS ? !presence[i] : !s->attention) continue;
        to[n] = bench_case_rows[i];
        if (i == CASE_DTYPE && s->dtypes != NULL) to[n].choices = s->dtypes;
        n++;
    }
    for (int i = 0; s->extents != NULL && s->extents[i].option != NULL; i++)
        to[n++] = (option_row){s->extents[i].option, OPTION_INT,
                               offsetof(bench_case, extent) + (size_t)i * sizeof(int64_t), NULL,
                               s->extents[i].help};
    for (int i = 0; i < CHOICES_MAX && s->choices[i].option != NULL; i++)
        to[n++] = (option_row){s->choices[i].option, OPTION_CHOICE,
                               offsetof(bench_case, choice) + (size_t)i * sizeof(int), s->choices[i].words,
                               s->choices[i].help};
    return n;
}

void bench_make_tables(const bench_subject *s, bench_options *o, option_tables *t)
{
    const operation *op = o->what.op;
    const bool presence[] = {s->n != NULL, s->measure == NULL, s->measure == NULL, s->measure == NULL,
                             op != NULL && strcmp(op->info.group, "nsa") == 0};
    size_t n = 0, params = 0;
    for (int i = 0; i < BENCH_ROWS; i++) {
        if (i < ROW_OTHERS && !presence[i]) continue;
        t->own[n] = rows[i];
        if (i == ROW_PEER) {
            snprintf(t->peer_help, sizeof t->peer_help, "%s%s", rows[i].help,
                     s->peer != NULL ? s->peer->name : "nothing here");
            t->own[n].help = t->peer_help;
        }
        n++;
    }
    t->groups[0] = (option_group){t->own, n, o};
    t->groups[1] = (option_group){t->of_case, case_rows(s, t->of_case), &o->what};
    for (size_t i = 0; op != NULL && i < op->option_count; i++)
        if (!is_taken(s, &t->groups[1], op->options[i].name)) t->params[params++] = op->options[i];
    t->groups[2] = (option_group){t->params, params, &o->what.params};
}

int bench_default_rounds(const bench_subject *s)
{
    return s->by_reps ? 0 : 9;
}

bench_options bench_default_options(const bench_subject *s)
{
    bench_options o = {.n = s->n, .threads = "0", .rounds = bench_default_rounds(s)};
    o.what = bench_case_init(s->op != NULL ? operation_named(s->op) : NULL);
    o.what.subject = s;
    o.json = s->json;
    o.svg = s->svg != NULL && have_program("gnuplot") ? s->svg : NULL;
    o.what.dtype = s->dtype;
    if (s->heads != NULL) o.what.heads_text = s->heads;
    if (s->dim != NULL) o.what.dim_text = s->dim;
    memcpy(o.what.extent, s->extent, sizeof o.what.extent);
    for (int i = 0; i < WORDS_MAX && s->set[i][0] != NULL; i++)
        (void)quern_op_set(o.what.op->op, &o.what.params, s->set[i][0], s->set[i][1]);
    return o;
}

int64_t bench_extent_of(const bench_case *c, const char *option)
{
    const bench_extent *e = c->subject->extents;
    for (int i = 0; e[i].option != NULL; i++)
        if (strcmp(e[i].option, option) == 0) return c->extent[i];
    return 0;
}

int bench_choice_of(const bench_case *c, const char *option)
{
    const bench_choice *choices = c->subject->choices;
    for (int i = 0; i < CHOICES_MAX && choices[i].option != NULL; i++)
        if (strcmp(choices[i].option, option) == 0) return c->choice[i];
    return 0;
}

const char *bench_subject_names(const char *between)
{
    static char names[600];
    size_t used = 0;
    for (const bench_subject *s = bench_subjects; s->name != NULL; s++) {
        const int n =
            snprintf(names + used, sizeof names - used, "%s%s", s != bench_subjects ? between : "", s->name);
        used += n > 0 && (size_t)n < sizeof names - used ? (size_t)n : 0;
    }
    return names;
}

static void print_subject(const bench_subject *s, const option_tables *t)
{
    printf("usage: quern bench %s [--key value ...]\n\n%s\n\noptions:\n", s->name, s->help);
    for (int i = 0; i < 3; i++) print_options(&t->groups[i]);
    for (const bench_subject *e = bench_subjects; e->name != NULL && s->measure == bench_all; e++) {
        if (e == bench_subjects)
            printf("\nruns on the CPU (on a GPU those it computes, with longer inputs):\n");
        if (e->all[QUERN_CPU] != NULL) printf("  quern bench %s %s --no-peer\n", e->name, e->all[QUERN_CPU]);
    }
    for (int p = 0; p < 2; p++) {
        const work_row *w = &s->work[p];
        if (w->flops == NULL && w->bytes == NULL) continue;
        printf("%s%s: %s%s%s\n", p == 0 ? "\nleast work" : "backward",
               s->variant != NULL ? " by default" : "", w->flops != NULL ? w->flops : "",
               w->flops != NULL && w->bytes != NULL ? "; bytes " : "", w->bytes != NULL ? w->bytes : "");
    }
}

void bench_print_help(const bench_subject *s, const option_tables *t)
{
    if (s != NULL) {
        print_subject(s, t);
    } else {
        printf(
            "usage: quern bench WHAT [--key value ...]\n\nMedians of repeated runs on random data, as a "
            "fraction "
            "of the machine's limit that is measured in turns\nwith them, and beside a peer where there is "
            "one.\n\nsubjects:\n");
        for (const bench_subject *e = bench_subjects; e->name != NULL; e++)
            printf("  %-22s %s\n", e->name, e->help);
        printf(
            "\nquern bench WHAT --help tells a subject's options; all take --threads, --device, --json and "
            "--svg.\n");
    }
    printf("\nexamples:\n");
    for (const bench_subject *e = bench_subjects; e->name != NULL; e++)
        if (s == NULL ? e->example != NULL : e == s)
            printf("  quern bench %s %s\n", e->name, e->example != NULL ? e->example : "");
    printf(
        "\nexit codes: 0 done, 2 wrong command line, 3 a parameter or a file is not accepted, 4 the machine "
        "lacks\nwhat is needed, 5 a defect.\n");
}
