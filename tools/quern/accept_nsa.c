/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* accept_nsa.c - the figures of NSA on the CPU. */
#include "accept.h"

#include "command.h"

#include <fcntl.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { N16 = 16384, N32 = 32768, N128 = 131072 };

/* Dense attention, timed once per length: the numerator of every speed-up of that length. */
typedef struct dense_times {
    double ms[3];
} dense_times;

static bench_case nsa_case(int64_t n, quern_dtype dtype, int64_t tile)
{
    bench_case c = accept_case("nsa", n, n >= N128 ? 4 : 8, n >= N128 ? 1 : 2, dtype);
    c.params.nsa.tile = tile;
    if (tile > 1) c.params.nsa.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    return c;
}

static int time_alone(const bench_case *c, quern_context *ctx, int reps, double ms[3])
{
    job j;
    timing forward, backward;
    int code = bench_open(&j, c, ctx, false);
    if (code == EXIT_DONE) code = bench_time(&j, ctx, reps, c->op->name, &forward, &backward);
    job_free(&j);
    if (code != EXIT_DONE) return code;
    ms[FORWARD] = forward.median;
    ms[BACKWARD] = backward.median;
    ms[BOTH] = forward.median + backward.median;
    return EXIT_DONE;
}

/* Speed-ups of one NSA case over dense; a target of 0 is not printed. The forward pass is that of inference, which
 * keeps no branch for a backward pass. */
static int speed_up(acceptance *a, const bench_case *c, const char *what, const dense_times *dense, double forward_target,
                    double both_target)
{
    static const char *const names[] = {"forward", "forward + backward"};
    const double targets[] = {forward_target, both_target};
    const int of_dense[] = {FORWARD, BOTH};
    for (int p = 0; p < 2; p++) {
        bench_case timed = *c;
        char line[120];
        double best = 0;
        timed.backward = p == 1;
        for (int try = 0; try < ACCEPT_TRIES && best < targets[p] && (try == 0 || accept_may_retry(a)); try++) {
            double ms[3];
            const int code = time_alone(&timed, a->all, c->n >= N128 ? 1 : 3, ms);
            if (code != EXIT_DONE) return code;
            const double ratio = dense->ms[of_dense[p]] / ms[of_dense[p]];
            if (ratio > best) best = ratio;
        }
        snprintf(line, sizeof line, "%s, N %" PRId64 ", %s over dense", what, c->n, names[p]);
        if (targets[p] > 0) accept_figure(a, line, false, targets[p], best, "x");
    }
    return EXIT_DONE;
}

static int speed_ups(acceptance *a, int64_t n)
{
    const bool large = n >= N128;
    dense_times dense;
    bench_case c = accept_case("attention", n, large ? 4 : 8, large ? 1 : 2, QUERN_F32);
    c.backward = true;
    int code = time_alone(&c, a->all, large ? 0 : 1, dense.ms); /* large: minutes, so once and without warming up */
    if (code != EXIT_DONE) return code;
    c = nsa_case(n, QUERN_F32, 64);
    code = speed_up(a, &c, "tile 64, mean_logit", &dense, large ? 18 : 6.5, large ? 14 : 6);
    if (code != EXIT_DONE) return code;
    c = nsa_case(n, QUERN_F32, 1);
    code = speed_up(a, &c, "T 1, softmax, noise", &dense, large ? 9 : 4.5, large ? 8 : 3.5);
    if (code != EXIT_DONE) return code;
    c.data = DATA_SMOOTH;
    return speed_up(a, &c, "T 1, softmax, smooth", &dense, large ? 13 : 5.5, 0);
}

static int bf16_over_f32(acceptance *a)
{
    const bench_case f32 = nsa_case(N32, QUERN_F32, 64), bf16 = nsa_case(N32, QUERN_BF16, 64);
    double best = 0;
    for (int try = 0; try < ACCEPT_TRIES && best < 1.5 && (try == 0 || accept_may_retry(a)); try++) {
        double ms_f32[3], ms_bf16[3];
        const int code = accept_times(&f32, a->all, &bf16, a->all, 5, ms_f32, ms_bf16);
        if (code != EXIT_DONE) return code;
        if (ms_f32[FORWARD] / ms_bf16[FORWARD] > best) best = ms_f32[FORWARD] / ms_bf16[FORWARD];
    }
    accept_figure(a, "bf16 over f32 NSA, tile 64, N 32768, forward", false, 1.5, best, "x");
    return EXIT_DONE;
}

/* Runs `quern bench nsa` at the length in a process of its own, so that its peak memory is its own. Its JSON comes
 * through a pipe. */
static int bench_child(const char *n, double *ms, double *peak_gib)
{
    enum { JSON_FD = 3 };
    char *const arguments[] = {"quern",    "bench",    "nsa",   "--n",    (char *)(uintptr_t)n, "--heads", "4/1", "--dim", "64", "--dtype", "bf16",
                               "--tile",   "64",       "--metric", "mean_logit", "--max-compressed-groups", "16", "--backward", "--no-peer",
                               "--reps",   "0",        "--json", "/dev/fd/3", NULL};
    int ends[2], how = -1;
    if (pipe2(ends, O_CLOEXEC) != 0) return fail(EXIT_MACHINE, "no pipe for bench nsa --n %s", n);
    posix_spawn_file_actions_t actions;
    pid_t child = 0;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], JSON_FD);
    const bool started = posix_spawn(&child, "/proc/self/exe", &actions, NULL, arguments, environ) == 0;
    command_child = started ? child : 0;
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    json_t *root = json_loadfd(ends[0], JSON_DISABLE_EOF_CHECK, NULL);
    close(ends[0]);
    const bool done = started && waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0;
    command_child = 0;
    const json_t *rows = json_object_get(root, "results");
    *ms = json_number_value(json_object_get(json_array_get(rows, 0), "ms_median")) +
          json_number_value(json_object_get(json_array_get(rows, 1), "ms_median"));
    *peak_gib = json_number_value(json_object_get(root, "peak_bytes")) * 0x1p-30;
    const int code = done && root != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "bench nsa --n %s failed", n);
    json_decref(root);
    return code;
}

static int million(acceptance *a)
{
    double ratio = 1e9, peak = 1e9;
    for (int try = 0; try < ACCEPT_TRIES && ratio >= 2.3 && (try == 0 || accept_may_retry(a)); try++) {
        double half_ms = 0, ms = 0, half_peak = 0;
        int code = bench_child("512k", &half_ms, &half_peak);
        if (code == EXIT_DONE) code = bench_child("1M", &ms, &peak);
        if (code != EXIT_DONE) return code;
        if (ms / half_ms < ratio) ratio = ms / half_ms;
    }
    accept_figure(a, "N 1M, H 4/1, D 64, bf16, tile 64, c 16, forward + backward: peak memory", true, 12, peak, "GiB");
    accept_figure(a, "the same: time over that of N 512k", true, 2.3, ratio, "x");
    return EXIT_DONE;
}

static void leave_out_all_but_o(job *j)
{
    for (int32_t i = 0; i < j->op->info.tensor_count; i++)
        if (!j->input[i] && strcmp(j->op->tensors[i].name, "O") != 0) j->tensors.t[i] = NULL;
}

/* Forward workspace of a call that asks for O alone, so that all the rest stands in it, against what it may hold: one
 * packed copy of K and V in the compute dtype, compressed K and V, indices, statistics (LSE of three branches,
 * gates), 4 MiB a thread. */
static int workspace(acceptance *a, const char *what, const bench_case *c)
{
    job j;
    char line[120];
    size_t bytes = 0;
    int code = bench_open(&j, c, a->all, true);
    if (code == EXIT_DONE) {
        leave_out_all_but_o(&j);
        const quern_status status = quern_op_workspace(a->all, j.op->op, QUERN_OP_FORWARD, &j.params, &j.tensors, &bytes);
        if (status != QUERN_OK) code = fail_status(status);
    }
    if (code == EXIT_DONE) {
        const quern_nsa_params *p = &c->params.nsa;
        const double n = (double)c->n, h = (double)c->heads, kv = (double)c->kv_heads, width = (double)(c->dim + c->dim_v);
        const double element = (double)quern_dtype_size((quern_dtype)c->dtype), tiles = (n + (double)p->tile - 1) / (double)p->tile;
        const double computed = c->dtype == QUERN_BF16 && quern_context_cpu_level(a->all) == QUERN_CPU_LEVEL_AVX512BF16 ? 2 : 4;
        const double lists = p->scope == QUERN_NSA_SCOPE_HEAD ? h : kv;
        const double packed = n * kv * width * computed, compressed = n / (double)(p->stride > 0 ? p->stride : p->block_size) * kv * width * element;
        const double indices = lists * tiles * (double)(p->num_selected + 1 + p->max_compressed_groups) * 4;
        const double statistics = n * h * 6 * 4, threads = (double)a->threads * 4 * 0x1p20;
        snprintf(line, sizeof line, "%s: forward workspace of what it may take", what);
        accept_figure(a, line, true, 1, (double)bytes / (packed + compressed + indices + statistics + threads), "");
    }
    job_free(&j);
    return code;
}

/* Fractions of a bandwidth. Where the operation has a mover the targets are of it, and the bandwidth is information. */
static int bandwidth(acceptance *a, const char *op, int64_t n, const double target[2])
{
    bench_case c = accept_case(op, n, 8, 2, QUERN_F32);
    measurement measured[2];
    char line[120];
    c.backward = true;
    const int code = accept_fraction(&c, a->all, measured);
    if (code != EXIT_DONE) return code;
    for (int p = 0; p < 2; p++) {
        const char *direction = p == BACKWARD ? "backward" : "forward";
        const char *limit = ceiling_name(bench_work(&c, p == BACKWARD, QUERN_CPU_LEVEL_AVX512).limit);
        const bool mover = measured[p].moved > 0;
        snprintf(line, sizeof line, "%s %s, N %" PRId64 ", of a loop that only moves its lines", op, direction, n);
        if (mover) accept_figure(a, line, false, target[p], measured[p].moved, "");
        snprintf(line, sizeof line, "%s %s, N %" PRId64 ", of the %s bandwidth", op, direction, n, limit);
        if (mover) accept_information(line, measured[p].fraction, "");
        else accept_figure(a, line, false, target[p], measured[p].fraction, "");
    }
    return EXIT_DONE;
}

/* All threads over one, forward alone and with its backward. */
static int scaling(acceptance *a, const char *what, const bench_case *c, double target)
{
    static const char *const names[] = {"forward", "forward + backward"};
    for (int p = 0; p < 2; p++) {
        bench_case timed = *c;
        char line[120];
        double best = 0;
        timed.backward = p == 1;
        for (int try = 0; try < ACCEPT_TRIES && best < target && (try == 0 || accept_may_retry(a)); try++) {
            double all[3], one[3];
            const int code = accept_times(&timed, a->all, NULL, a->one, 3, all, one);
            if (code != EXIT_DONE) return code;
            const double ratio = p == 1 ? one[BOTH] / all[BOTH] : one[FORWARD] / all[FORWARD];
            if (ratio > best) best = ratio;
        }
        snprintf(line, sizeof line, "%s, N %" PRId64 ", %s, %d threads over 1", what, c->n, names[p], a->threads);
        accept_figure(a, line, false, target, best, "x");
    }
    return EXIT_DONE;
}

/* The long ones first: what is left of the time goes to trying the short ones again. */
int accept_nsa(acceptance *a)
{
    const double compress_target[2] = {0.8, 0.7}, gate_target[2] = {0.93, 0.93};
    const bench_case tile64 = nsa_case(N32, QUERN_F32, 64), tile1 = nsa_case(N32, QUERN_F32, 1), half = nsa_case(N32, QUERN_BF16, 64);
    int code = speed_ups(a, N128);
    if (code == EXIT_DONE) code = million(a);
    if (code == EXIT_DONE) code = speed_ups(a, N32);
    if (code == EXIT_DONE) code = bf16_over_f32(a);
    if (a->threads > 1) {
        const bench_case short64 = nsa_case(N16, QUERN_F32, 64), short1 = nsa_case(N16, QUERN_F32, 1);
        if (code == EXIT_DONE) code = scaling(a, "tile 64", &short64, 1.85);
        if (code == EXIT_DONE) code = scaling(a, "T 1", &short1, 1.5);
    }
    if (code == EXIT_DONE) code = bandwidth(a, "nsa-compress", N128, compress_target);
    if (code == EXIT_DONE) code = bandwidth(a, "nsa-gate", N32, gate_target);
    if (code == EXIT_DONE) code = workspace(a, "tile 64, f32, N 32768", &tile64);
    if (code == EXIT_DONE) code = workspace(a, "tile 64, bf16, N 32768", &half);
    return code == EXIT_DONE ? workspace(a, "T 1, f32, N 32768", &tile1) : code;
}
