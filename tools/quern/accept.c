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

/* The ceilings of a case's passes, 0 where there is none. */
static void limits_of(const work *w, int passes, int threads, double limit[2])
{
    for (int p = 0; p < passes; p++)
        limit[p] = p == 1 && w[1].limit == w[0].limit ? limit[0] : w[p].limit < CEILINGS ? ceiling_measure(w[p].limit, threads) : 0;
}

/* A round's times: the median of as many runs as take as long as the ceiling beside them, of long ones one. */
static int time_round(job *j, quern_context *ctx, double ms[2])
{
    enum { RUNS = 8 };
    static const double enough_ms = 100;
    double times[2][RUNS];
    int runs = 0;
    for (const double start = now_ms(); runs == 0 || (runs < RUNS && now_ms() - start < enough_ms); runs++) {
        const int code = job_run(j, ctx);
        if (code != EXIT_DONE) return code;
        times[FORWARD][runs] = j->forward_ms;
        times[BACKWARD][runs] = j->backward_ms;
    }
    for (int p = 0; p < 2; p++) ms[p] = timing_of(times[p], runs).median;
    return EXIT_DONE;
}

int accept_fraction(const bench_case *c, quern_context *ctx, double fraction[2])
{
    enum { ROUNDS = 21 };
    job j;
    double ratio[2][ROUNDS], before[2];
    const int threads = quern_context_threads(ctx), passes = c->backward ? 2 : 1;
    const work w[2] = {bench_work(c, false, quern_context_cpu_level(ctx)), bench_work(c, true, quern_context_cpu_level(ctx))};
    int code = bench_open(&j, c, ctx, false);
    if (code == EXIT_DONE) code = job_run(&j, ctx); /* warm-up */
    if (code == EXIT_DONE) limits_of(w, passes, threads, before);
    for (int r = 0; r < ROUNDS && code == EXIT_DONE; r++) {
        progress("%s N %lld: round %d of %d", c->op->name, (long long)c->n, r + 1, ROUNDS);
        double after[2], ms[2] = {0, 0};
        code = time_round(&j, ctx, ms);
        limits_of(w, passes, threads, after);
        for (int p = 0; p < passes; p++) {
            const double limit = 0.5 * (before[p] + after[p]);
            ratio[p][r] = limit > 0 ? (w[p].flops > 0 ? w[p].flops : w[p].bytes) / ms[p] * 1e-6 / limit : 0;
            before[p] = after[p];
        }
    }
    progress_clear();
    job_free(&j);
    for (int p = 0; p < passes && code == EXIT_DONE; p++) fraction[p] = timing_of(ratio[p], ROUNDS).median;
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
    printf("usage: quern accept attention|nsa\n\n"
           "Measures what this machine must reach: a line per figure with target, measured and PASS or FAIL.\n"
           "make accept-attention and make accept-nsa call it and add the figures that need the tests' oracle\n"
           "and the language model.\n\nexample:\n  quern accept attention\n\n"
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
    return fail(EXIT_USAGE, "one of attention and nsa is accepted");
}
