/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "accept.h"

#include "command.h"

#include <stdio.h>
#include <string.h>

static const double retry_until_ms = 10 * 60 * 1000.0; /* an area takes at most 15 minutes */

void accept_figure(acceptance *a, const char *what, bool at_most, double target, double measured, const char *unit)
{
    const bool passed = at_most ? measured <= target : measured >= target;
    printf("%-74s target %s %-8.3g measured %-8.3g %-8s %s\n", what, at_most ? "<=" : ">=", target, measured, unit, passed ? "PASS" : "FAIL");
    fflush(stdout);
    if (passed) a->passed++;
    else a->failed++;
}

void accept_information(const char *what, double measured, const char *unit)
{
    printf("%-74s target    %-8s measured %-8.3g %-8s %s\n", what, "none", measured, unit, "INFORMATION");
    fflush(stdout);
}

bool accept_may_retry(const acceptance *a)
{
    return now_ms() - a->start_ms < retry_until_ms;
}

bench_case accept_case(const char *op, int64_t n, int64_t heads, int64_t kv_heads, quern_dtype dtype)
{
    bench_case c = bench_case_init(operation_named(op));
    c.n = n;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.dim = c.dim_v = 128;
    c.dtype = (int)dtype;
    return c;
}

int accept_fraction(const bench_case *c, quern_context *ctx, measurement measured[2])
{
    enum { ROUNDS = 21 };
    job j;
    char label[80];
    snprintf(label, sizeof label, "%s N %lld, of %d", c->op->name, (long long)c->n, ROUNDS);
    int code = bench_open(&j, c, ctx, false);
    if (code == EXIT_DONE) code = bench_measure(&j, c, ctx, ROUNDS, 0, label, measured);
    job_free(&j);
    return code;
}

static void medians(double times[3][BENCH_REPS_MAX], int rounds, double out[3])
{
    for (int p = 0; p < 3; p++) out[p] = timing_of(times[p], rounds).median;
}

int accept_times(const bench_case *first, quern_context *ctx_first, const bench_case *second, quern_context *ctx_second,
                 int rounds, double ms_first[3], double ms_second[3])
{
    job jobs[2];
    memset(jobs, 0, sizeof jobs);
    double times[2][3][BENCH_REPS_MAX];
    quern_context *const contexts[2] = {ctx_first, ctx_second};
    int code = bench_open(&jobs[0], first, ctx_first, false);
    if (code == EXIT_DONE && second != NULL) code = bench_open(&jobs[1], second, ctx_second, false);
    for (int r = -1; r < rounds && code == EXIT_DONE; r++) { /* round -1 warms up */
        if (r == -1 && rounds == 1) continue;
        for (int s = 0; s < 2 && code == EXIT_DONE; s++) {
            job *j = &jobs[second != NULL ? s : 0];
            progress("%s N %lld: round %d of %d", j->op->name, (long long)first->n, r + 1, rounds);
            code = job_run(j, contexts[s]);
            if (r < 0) continue;
            times[s][FORWARD][r] = j->forward_ms;
            times[s][BACKWARD][r] = j->backward_ms;
            times[s][BOTH][r] = j->forward_ms + j->backward_ms;
        }
    }
    progress_clear();
    job_free(&jobs[0]);
    if (second != NULL) job_free(&jobs[1]);
    if (code != EXIT_DONE) return code;
    medians(times[0], rounds, ms_first);
    medians(times[1], rounds, ms_second);
    return EXIT_DONE;
}

static void print_help(void)
{
    printf("usage: quern accept attention|nsa|dsv4\n\n"
           "Measures what this machine must reach: a line per figure with target, measured and PASS or FAIL.\n"
           "make accept-attention, make accept-nsa and make accept-dsv4 call it; the first two add the figures\n"
           "that need the tests' oracle and the language model.\n\nexample:\n  quern accept attention\n\n"
           "exit codes: 0 every figure passed, 1 one failed, 2 wrong command line, 4 the machine lacks what is needed.\n");
}

static int accept_area(int (*area)(acceptance *a), int64_t threads)
{
    acceptance a = {.start_ms = now_ms()};
    int code = open_context(&(machine_options){.threads = 1}, &a.one);
    if (code == EXIT_DONE) code = open_context(&(machine_options){.threads = threads}, &a.all);
    if (code == EXIT_DONE) {
        a.threads = quern_context_threads(a.all);
        code = area(&a);
    }
    if (code == EXIT_DONE) printf("%d passed, %d failed, %.0f s\n", a.passed, a.failed, (now_ms() - a.start_ms) / 1000);
    quern_context_destroy(a.one);
    quern_context_destroy(a.all);
    return code != EXIT_DONE ? code : a.failed > 0 ? EXIT_MISMATCH : EXIT_DONE;
}

int verb_accept(int argc, char **argv)
{
    int64_t threads = 0;
    const option_row row = {"threads", OPTION_INT, 0, NULL, "the greater thread count; 0: all CPUs"};
    int first;
    bool help;
    const int code = parse_options(argc, argv, &(option_group){&row, 1, &threads}, 1, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (argc - first == 1 && strcmp(argv[first], "attention") == 0) return accept_area(accept_attention, threads);
    if (argc - first == 1 && strcmp(argv[first], "nsa") == 0) return accept_area(accept_nsa, threads);
    if (argc - first == 1 && strcmp(argv[first], "dsv4") == 0) return accept_area(accept_dsv4, threads);
    return fail(EXIT_USAGE, "one of attention, nsa and dsv4 is accepted");
}
