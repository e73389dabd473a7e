/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_measure.c - times of an operation, and its fraction of the machine's ceilings.
 *
 * Machines change speed while they are measured, memory by a factor of two from second to second. So
 * operation and limits are measured in turns: a round is the limits of all passes, some runs, and the limits
 * again; the round's fraction is that of its median run and the mean of the limits around it, and the result
 * the median over rounds. Where runs are far shorter than a ceiling's, their mean counts instead: so both
 * have their share of what else a busy machine does.
 */
#include "bench.h"

#include "command.h"

#include <quern/cuda.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

timing timing_of(double *ms, int count)
{
    timing t = {count, 0, 0, 0};
    if (count == 0) return t;
    qsort(ms, (size_t)count, sizeof *ms, ascending);
    t.median = count % 2 == 1 ? ms[count / 2] : 0.5 * (ms[count / 2 - 1] + ms[count / 2]);
    t.p10 = ms[(count - 1) / 10];
    t.p90 = ms[(count * 9 + 9) / 10 - 1]; /* the least time that 90% do not exceed */
    return t;
}

void progress(const char *format, ...)
{
    if (!isatty(STDERR_FILENO)) return;
    va_list args;
    va_start(args, format);
    fputs("\r\033[K", stderr);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

void progress_clear(void)
{
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}

/* ---- limits ---- */

double bench_ceiling_cuda(ceiling limit)
{
    const size_t bytes = (size_t)1 << 31;
    void *a = NULL, *b = NULL, *from = NULL, *to = NULL;
    double best = 0, ms = 0;
    if (limit != CEILING_READ && limit != CEILING_COPY && limit != CEILING_WRITE) return 0;
    bool ok = quern_cuda_allocate(0, bytes, &a) == QUERN_OK &&
              quern_cuda_allocate(0, bytes, &b) == QUERN_OK &&
              quern_cuda_event_create(0, &from) == QUERN_OK && quern_cuda_event_create(0, &to) == QUERN_OK;
    for (int i = 0; i < 6 && ok; i++) {
        const bool write = limit == CEILING_WRITE;
        ok = quern_cuda_event_record(0, from, NULL) == QUERN_OK &&
             (write ? quern_cuda_fill(0, b, (uint8_t)i, bytes, NULL)
                    : quern_cuda_copy(0, b, a, bytes, NULL)) == QUERN_OK &&
             quern_cuda_event_record(0, to, NULL) == QUERN_OK &&
             quern_cuda_event_elapsed(0, from, to, &ms) == QUERN_OK;
        const double rate = ok ? (write ? 1 : 2) * (double)bytes / ms * 1e-6 : 0;
        if (i > 0 && rate > best) best = rate;
    }
    (void)quern_cuda_event_destroy(0, from);
    (void)quern_cuda_event_destroy(0, to);
    (void)quern_cuda_free(0, a);
    (void)quern_cuda_free(0, b);
    return ok ? best : 0;
}

/* The limits of each pass at one moment. */
typedef struct limits {
    double rate[2];     /* of the work's ceiling; 0: none */
    double read;        /* of memory, where a pass has flops and bytes */
    double mover_ms[2]; /* 0: none */
} limits;

static double ceiling_now(const bench_run *r, ceiling limit, int threads)
{
    return r->what->device == QUERN_CUDA ? bench_ceiling_cuda(limit) : ceiling_measure(limit, threads);
}

static limits limits_now(const bench_run *r, const work w[2], int threads)
{
    limits l = {.read = 0};
    for (int p = 0; p < r->passes; p++) {
        const bool again = p == 1 && w[1].limit == w[0].limit;
        if (again) l.rate[p] = l.rate[0];
        else if (w[p].limit < CEILINGS) l.rate[p] = ceiling_now(r, w[p].limit, threads);
        if (w[p].flops > 0 && w[p].bytes > 0 && l.read == 0) l.read = ceiling_now(r, CEILING_READ, threads);
        if (r->what->subject->mover_ms != NULL)
            l.mover_ms[p] = r->what->subject->mover_ms(&r->job, p == 1, threads);
    }
    return l;
}

/* ---- turns ---- */

enum { FEW_RUNS = BENCH_REPS_MAX / 3 }; /* of a round without --rounds, which has three or more */

/* A measurement in progress. */
typedef struct turns {
    int rounds, runs;
    double times[2][BENCH_REPS_MAX]; /* of the runs, by pass */
    double rate[2][BENCH_REPS_MAX], fraction[2][BENCH_REPS_MAX], moved[2][BENCH_REPS_MAX],
        round_ms[2][BENCH_REPS_MAX]; /* of the rounds */
    double of_read[2][BENCH_REPS_MAX];
    int read_bound[2]; /* rounds in which reading was the slower limit */
    double beside_ms[2][BENCH_REPS_MAX], over_beside[2][BENCH_REPS_MAX];
    double run_ms; /* of all runs */
} turns;

/* The time of a round with these runs. */
static double round_time(const bench_run *r, double *ms, int runs)
{
    double sum = 0;
    if (!r->what->subject->mean) return timing_of(ms, runs).median;
    for (int i = 0; i < runs; i++) sum += ms[i];
    return sum / runs;
}

/* A pass's limits in a round that took it `ms`. */
static void judge_round(turns *t, int p, const work *w, double ms, const limits *before, const limits *after)
{
    const double rate = 0.5 * (before->rate[p] + after->rate[p]), read = 0.5 * (before->read + after->read);
    const double done = w->flops > 0 ? w->flops : w->bytes;
    const double work_ms = rate > 0 ? done / rate * 1e-6 : 0,
                 read_ms = w->flops > 0 && w->bytes > 0 && read > 0 ? w->bytes / read * 1e-6 : 0;
    t->rate[p][t->rounds] = read_ms > work_ms ? read : rate;
    t->read_bound[p] += read_ms > work_ms;
    t->round_ms[p][t->rounds] = ms;
    t->fraction[p][t->rounds] = (read_ms > work_ms ? read_ms : work_ms) / ms;
    t->of_read[p][t->rounds] = read_ms / ms;
    t->moved[p][t->rounds] = 0.5 * (before->mover_ms[p] + after->mover_ms[p]) / ms;
}

static void end_round(turns *t, const bench_run *r, const work w[2], int first_run, const limits *before,
                      const limits *after)
{
    for (int p = 0; p < r->passes; p++) {
        double round[BENCH_REPS_MAX];
        const int runs = t->runs - first_run;
        for (int i = 0; i < runs; i++) round[i] = t->times[p][first_run + i];
        judge_round(t, p, &w[p], round_time(r, round, runs), before, after);
        t->over_beside[p][t->rounds] = t->beside_ms[p][t->rounds] / t->round_ms[p][t->rounds];
    }
    t->rounds++;
}

/* The peer, for as long as a round of the passes. */
static int run_peer(turns *t, const bench_run *r, quern_context *ctx, double enough_ms, int most)
{
    double ms[2][BENCH_REPS_MAX];
    const double start = now_ms();
    int n = 0;
    while (n == 0 || (n < most && n < BENCH_REPS_MAX && now_ms() - start < enough_ms)) {
        double now[2] = {0, 0};
        if (!r->peer->run(r->peer_data, ctx, now)) return fail(EXIT_DEFECT, "%s failed", r->peer->name);
        for (int p = 0; p < 2; p++) ms[p][n] = now[p];
        n++;
    }
    for (int p = 0; p < 2; p++) t->beside_ms[p][t->rounds] = round_time(r, ms[p], n);
    return EXIT_DONE;
}

/* One run; keeps its times. */
static int run_once(turns *t, bench_run *r, quern_context *ctx)
{
    double ms[2] = {0, 0};
    const int code = r->once(r, ctx, ms);
    if (code != EXIT_DONE) return code;
    for (int p = 0; p < 2; p++) t->times[p][t->runs] = ms[p];
    t->runs++;
    t->run_ms += ms[0] + ms[1];
    return code;
}

/* A round is as many runs as fit into enough_ms, at least one. */
static int run_round(turns *t, bench_run *r, quern_context *ctx, double enough_ms, int most)
{
    int code = EXIT_DONE;
    const double start = now_ms();
    for (int n = 0; code == EXIT_DONE && n < most && t->runs < BENCH_REPS_MAX &&
                    (n == 0 || now_ms() - start < enough_ms);
         n++)
        code = run_once(t, r, ctx);
    return code;
}

static bool enough(const turns *t, int rounds, int reps)
{
    if (t->rounds == BENCH_REPS_MAX || t->runs == BENCH_REPS_MAX) return true;
    if (rounds > 0) return t->rounds >= rounds;
    return reps > 0 ? t->runs >= reps : t->runs >= 3 && t->run_ms >= 1000;
}

static measurement result_of(turns *t, int p, const work *w, bool by_rounds)
{
    const ceiling limit = 2 * t->read_bound[p] > t->rounds ? CEILING_READ : w->limit;
    return (measurement){.time = by_rounds ? timing_of(t->round_ms[p], t->rounds)
                                           : timing_of(t->times[p], t->runs),
                         .limit = limit,
                         .ceiling = timing_of(t->rate[p], t->rounds).median,
                         .fraction = timing_of(t->fraction[p], t->rounds).median,
                         .of_read = timing_of(t->of_read[p], t->rounds).median,
                         .moved = timing_of(t->moved[p], t->rounds).median,
                         .beside_ms = timing_of(t->beside_ms[p], t->rounds).median,
                         .over_beside = timing_of(t->over_beside[p], t->rounds).median};
}

int bench_measure(bench_run *r, const work w[2], quern_context *ctx, int rounds, int reps, const char *label,
                  measurement out[2])
{
    const double long_run_ms = 8000, round_ms = rounds > 0 ? 100 : 300;
    const int threads = quern_context_threads(ctx);
    turns *t = calloc(1, sizeof *t);
    if (t == NULL) return fail(EXIT_MACHINE, "no memory for the times");
    progress("%s: warming up", label);
    limits before = {.read = 0};
    if (rounds == 0) before = limits_now(r, w, threads);
    int code = run_once(t, r, ctx);
    const bool one = code == EXIT_DONE && rounds == 0 && reps == 0 && t->run_ms > long_run_ms;
    if (!one) {
        t->runs = 0;
        t->run_ms = 0;
        if (rounds > 0) before = limits_now(r, w, threads);
    }
    do {
        progress("%s: round %d", label, t->rounds + 1);
        const int first = one ? 0 : t->runs, most = rounds > 0 ? BENCH_REPS_MAX
                                                    : reps > 0 ? reps - t->runs
                                                               : FEW_RUNS;
        if (code == EXIT_DONE && !one) code = run_round(t, r, ctx, round_ms, most);
        if (code == EXIT_DONE && r->peer_data != NULL) code = run_peer(t, r, ctx, round_ms, one ? 1 : most);
        if (code != EXIT_DONE) break;
        const limits after = limits_now(r, w, threads);
        end_round(t, r, w, first, &before, &after);
        before = after;
        if (rounds > 0) t->runs = 0; /* their times are in the round's fractions */
    } while (!one && !enough(t, rounds, reps));
    progress_clear();
    for (int p = 0; p < r->passes && code == EXIT_DONE; p++) out[p] = result_of(t, p, &w[p], rounds > 0);
    free(t);
    return code;
}
