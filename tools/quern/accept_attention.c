/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* accept_attention.c - the figures of dense attention, and of NSA's slice beside it. */
#include "accept.h"

#include "command.h"

#include <stdio.h>

/* One fraction-of-ceiling figure per target that is > 0. */
static int fraction_figure(acceptance *a, const char *what, const bench_case *c, quern_context *ctx, const double target[2])
{
    measurement measured[2];
    char line[120];
    const int code = accept_fraction(c, ctx, measured);
    if (code != EXIT_DONE) return code;
    for (int p = 0; p < 2; p++) {
        if (target[p] <= 0) continue;
        snprintf(line, sizeof line, "%s %s, %d thread%s, of the %s peak", what, p == BACKWARD ? "backward" : "forward",
                 (int)quern_context_threads(ctx), quern_context_threads(ctx) > 1 ? "s" : "",
                 ceiling_name(bench_work(c, p == BACKWARD, quern_context_cpu_level(ctx)).limit));
        accept_figure(a, line, false, target[p], measured[p].fraction, "");
    }
    return EXIT_DONE;
}

/* All threads over one. */
static int scaling_figure(acceptance *a, const char *what, const bench_case *c, double target)
{
    double best[2] = {0, 0};
    char line[120];
    const int passes = c->backward ? 2 : 1;
    for (int try = 0; try < ACCEPT_TRIES && (try == 0 || accept_may_retry(a)); try++) {
        double all[3], one[3];
        const int code = accept_times(c, a->all, NULL, a->one, 5, all, one);
        if (code != EXIT_DONE) return code;
        for (int p = 0; p < passes; p++)
            if (one[p] / all[p] > best[p]) best[p] = one[p] / all[p];
        if (best[0] >= target && (passes == 1 || best[1] >= target)) break;
    }
    for (int p = 0; p < passes; p++) {
        snprintf(line, sizeof line, "%s %s, %d threads over 1", what, p == BACKWARD ? "backward" : "forward", a->threads);
        accept_figure(a, line, false, target, best[p], "x");
    }
    return EXIT_DONE;
}

static int nsa_over_dense(acceptance *a)
{
    bench_case nsa = accept_case("nsa", 32768, 8, 2, QUERN_F32), dense = accept_case("attention", 32768, 8, 2, QUERN_F32);
    nsa.params.nsa.tile = 64;
    nsa.params.nsa.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    nsa.backward = dense.backward = true;
    double forward = 0, both = 0;
    for (int try = 0; try < ACCEPT_TRIES && (forward < 5 || both < 4) && (try == 0 || accept_may_retry(a)); try++) {
        double ms_nsa[3], ms_dense[3];
        const int code = accept_times(&nsa, a->all, &dense, a->all, 1, ms_nsa, ms_dense);
        if (code != EXIT_DONE) return code;
        if (ms_dense[FORWARD] / ms_nsa[FORWARD] > forward) forward = ms_dense[FORWARD] / ms_nsa[FORWARD];
        if (ms_dense[BOTH] / ms_nsa[BOTH] > both) both = ms_dense[BOTH] / ms_nsa[BOTH];
    }
    accept_figure(a, "NSA forward over dense, f32, H 8/2, tile 64, mean_logit, N 32768", false, 5, forward, "x");
    accept_figure(a, "NSA forward + backward over dense, same", false, 4, both, "x");
    return EXIT_DONE;
}

int accept_attention(acceptance *a)
{
    bench_case f32 = accept_case("attention", 4096, 8, 8, QUERN_F32), bf16 = accept_case("attention", 16384, 4, 1, QUERN_BF16);
    const double f32_target[2] = {0.85, 0.72}, bf16_target[2] = {0.78, 0.60}, avx2_target[2] = {0.75, 0};
    f32.backward = bf16.backward = true;
    int code = fraction_figure(a, "dense f32 N 4096 H 8/8", &f32, a->one, f32_target);
    if (code == EXIT_DONE) code = fraction_figure(a, "dense f32 N 4096 H 8/8", &f32, a->all, f32_target);
    if (code == EXIT_DONE) code = fraction_figure(a, "dense bf16 N 16384 H 4/1", &bf16, a->one, bf16_target);
    if (code == EXIT_DONE) code = fraction_figure(a, "dense bf16 N 16384 H 4/1", &bf16, a->all, bf16_target);
    for (int t = 0; t < 2 && code == EXIT_DONE; t++) {
        bench_case forward = f32;
        quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
        quern_context *ctx = NULL;
        params.threads = t == 0 ? 1 : a->threads;
        params.cpu_level = QUERN_CPU_LEVEL_AVX2;
        forward.backward = false;
        const quern_status status = quern_context_create(&params, &ctx);
        code = status == QUERN_OK ? fraction_figure(a, "dense f32 N 4096 H 8/8, AVX2", &forward, ctx, avx2_target) : fail_status(status);
        quern_context_destroy(ctx);
    }
    if (a->threads > 1) {
        if (code == EXIT_DONE) code = scaling_figure(a, "dense f32 N 4096 H 8/8", &f32, 1.85);
        if (code == EXIT_DONE) code = scaling_figure(a, "dense bf16 N 16384 H 4/1", &bf16, 1.85);
    }
    return code == EXIT_DONE ? nsa_over_dense(a) : code;
}
