/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_measure.c - times of an operation, and its fraction of the machine's ceilings.
 *
 * Machines change speed while they are measured, memory by a factor of two from second to second. So
 * operation and limits are measured in turns: a round is the limits of all passes, some runs, and the limits
 * again; the round's fraction is its median run over the mean of the limits around it, and the result the
 * median over rounds.
 */
#include "bench.h"

#include "bench_mover.h"
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

/* GB/s of a copy or a fill of 2 GiB, the best of five: a read is bounded by the copy. 0 for arithmetic. */
static double ceiling_cuda(ceiling limit)
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

static double ceiling_now(const job *j, ceiling limit, int threads)
{
    return j->device == QUERN_CUDA ? ceiling_cuda(limit) : ceiling_measure(limit, threads);
}

static limits limits_now(const job *j, const work w[2], int passes, int threads)
{
    limits l = {.read = 0};
    for (int p = 0; p < passes; p++) {
        const bool again = p == 1 && w[1].limit == w[0].limit;
        if (again) l.rate[p] = l.rate[0];
        else if (w[p].limit < CEILINGS) l.rate[p] = ceiling_now(j, w[p].limit, threads);
        if (w[p].flops > 0 && w[p].bytes > 0 && l.read == 0) l.read = ceiling_now(j, CEILING_READ, threads);
        l.mover_ms[p] = bench_mover_ms(j, p == 1, threads);
    }
    return l;
}

/* ---- turns ---- */

enum {
    ROUND_RUNS = 8,
    BENCH_ROUND_RUNS = BENCH_REPS_MAX / 3
}; /* at most; the bench has three rounds or more of short runs */

/* A measurement in progress. */
typedef struct turns {
    int rounds, runs;
    double times[2][BENCH_REPS_MAX]; /* of the runs, by pass */
    double rate[2][BENCH_REPS_MAX], fraction[2][BENCH_REPS_MAX], moved[2][BENCH_REPS_MAX],
        round_ms[2][BENCH_REPS_MAX]; /* of the rounds */
    double of_read[2][BENCH_REPS_MAX];
    int read_bound[2]; /* rounds in which reading was the slower limit */
    double beside_ms[BENCH_REPS_MAX], over_beside[BENCH_REPS_MAX];
    double run_ms; /* of all runs */
} turns;

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

static void end_round(turns *t, int passes, const work w[2], int first_run, const limits *before,
                      const limits *after)
{
    for (int p = 0; p < passes; p++) {
        double round[BENCH_REPS_MAX];
        const int runs = t->runs - first_run;
        for (int i = 0; i < runs; i++) round[i] = t->times[p][first_run + i];
        judge_round(t, p, &w[p], timing_of(round, runs).median, before, after);
    }
    t->over_beside[t->rounds] = t->beside_ms[t->rounds] / t->round_ms[0][t->rounds];
    t->rounds++;
}

/* What stands beside, for as long as a round of the passes. */
static int run_beside(turns *t, const bench_beside *beside, double enough_ms, int most)
{
    double ms[BENCH_REPS_MAX];
    const double start = now_ms();
    int n = 0;
    while (n == 0 || (n < most && n < BENCH_REPS_MAX && now_ms() - start < enough_ms)) {
        ms[n] = beside->ms(beside->arg);
        if (ms[n++] < 0) return fail(EXIT_DEFECT, "%s failed", beside->name);
    }
    t->beside_ms[t->rounds] = timing_of(ms, n).median;
    return EXIT_DONE;
}

/* One run; keeps its times. */
static int run_once(turns *t, job *j, quern_context *ctx)
{
    int code = job_flush(j);
    if (code == EXIT_DONE) code = job_run(j, ctx);
    if (code != EXIT_DONE) return code;
    t->times[0][t->runs] = j->forward_ms;
    t->times[1][t->runs++] = j->backward_ms;
    t->run_ms += j->forward_ms + j->backward_ms;
    return code;
}

/* A round is as many runs as fit into enough_ms, at least one. */
static int run_round(turns *t, job *j, quern_context *ctx, double enough_ms, int most)
{
    int code = EXIT_DONE;
    const double start = now_ms();
    for (int n = 0; code == EXIT_DONE && n < most && t->runs < BENCH_REPS_MAX &&
                    (n == 0 || now_ms() - start < enough_ms);
         n++)
        code = run_once(t, j, ctx);
    return code;
}

static bool enough(const turns *t, int rounds, int reps)
{
    if (t->rounds == BENCH_REPS_MAX || t->runs == BENCH_REPS_MAX) return true;
    if (rounds > 0) return t->rounds >= rounds;
    return reps > 0 ? t->runs >= reps : t->runs >= 3 && t->run_ms >= 1000;
}

static measurement result_of(turns *t, int p, const work *w, bool by_rounds, bool beside)
{
    const ceiling limit = 2 * t->read_bound[p] > t->rounds ? CEILING_READ : w->limit;
    return (measurement){.time = by_rounds ? timing_of(t->round_ms[p], t->rounds)
                                           : timing_of(t->times[p], t->runs),
                         .limit = limit,
                         .ceiling = timing_of(t->rate[p], t->rounds).median,
                         .fraction = timing_of(t->fraction[p], t->rounds).median,
                         .of_read = timing_of(t->of_read[p], t->rounds).median,
                         .moved = timing_of(t->moved[p], t->rounds).median,
                         .beside_ms = beside ? timing_of(t->beside_ms, t->rounds).median : 0,
                         .over_beside = beside ? timing_of(t->over_beside, t->rounds).median : 0};
}

int bench_measure(job *j, const work w[2], const bench_beside *beside, quern_context *ctx, int rounds,
                  int reps, const char *label, measurement out[2])
{
    const double long_run_ms = 8000, round_ms = rounds > 0 ? 100 : 300;
    const int threads = quern_context_threads(ctx), passes = j->backward ? 2 : 1;
    turns *t = calloc(1, sizeof *t);
    if (t == NULL) return fail(EXIT_MACHINE, "no memory for the times");
    progress("%s: warming up", label);
    limits before = {.read = 0};
    if (rounds == 0) before = limits_now(j, w, passes, threads);
    int code = run_once(t, j, ctx);
    if (code == EXIT_DONE && rounds == 0 && reps == 0 && beside == NULL &&
        t->run_ms > long_run_ms) { /* so long that one is enough */
        const limits after = limits_now(j, w, passes, threads);
        end_round(t, passes, w, 0, &before, &after);
    } else {
        t->runs = 0;
        t->run_ms = 0;
        if (rounds > 0) before = limits_now(j, w, passes, threads);
        while (code == EXIT_DONE && !enough(t, rounds, reps)) {
            progress("%s: round %d", label, t->rounds + 1);
            const int first = t->runs, most = rounds > 0 ? ROUND_RUNS
                                              : reps > 0 ? reps - t->runs
                                                         : BENCH_ROUND_RUNS;
            code = run_round(t, j, ctx, round_ms, most);
            if (code == EXIT_DONE && beside != NULL) code = run_beside(t, beside, round_ms, most);
            const limits after = limits_now(j, w, passes, threads);
            if (code == EXIT_DONE) end_round(t, passes, w, first, &before, &after);
            before = after;
            if (rounds > 0) t->runs = 0; /* their times are in the round's fractions */
        }
    }
    progress_clear();
    for (int p = 0; p < passes && code == EXIT_DONE; p++)
        out[p] = result_of(t, p, &w[p], rounds > 0, beside != NULL && p == 0);
    free(t);
    return code;
}

int bench_time(job *j, quern_context *ctx, int reps, const char *label, timing *forward, timing *backward)
{
    const double long_run = 8000, enough = 1000;
    double f[BENCH_REPS_MAX], b[BENCH_REPS_MAX];
    const double start = now_ms();
    progress("%s: warming up", label);
    int code = job_run(j, ctx), n = 0;
    const double first = now_ms() - start;
    const bool keep_first = reps == 0 && first > long_run;
    if (keep_first) {
        f[n] = j->forward_ms;
        b[n++] = j->backward_ms;
    }
    const double measured_from = now_ms();
    while (code == EXIT_DONE && !keep_first && n < BENCH_REPS_MAX &&
           (reps > 0 ? n < reps : n < 3 || now_ms() - measured_from < enough)) {
        if ((code = job_flush(j)) != EXIT_DONE) break;
        if (now_ms() - start > 2000) progress("%s: run %d, %.0f s", label, n + 1, (now_ms() - start) / 1000);
        code = job_run(j, ctx);
        f[n] = j->forward_ms;
        b[n++] = j->backward_ms;
    }
    progress_clear();
    *forward = timing_of(f, n);
    *backward = timing_of(b, n);
    return code;
}
