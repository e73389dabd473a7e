/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_overhead.c - overhead: the cost of a call besides its kernels. On the CPU the calls have no tokens.
 * On a GPU they have a few and the stream is idle; the time ends when the call returns, with its kernels
 * launched. There the workspace also moves from call to call, for a call whose addresses are all those of the
 * last one starts faster.
 */
#include "bench.h"

#include "command.h"

#include <stdio.h>
#include <stdlib.h>

#include <quern/cuda.h>
#include <quern/plan.h>

enum {
    ROUNDS = 301,
    CALLS = 16,   /* of a round on the CPU, where one call is short for the clock */
    WARM_MS = 20, /* the threads that filled the tensors still look for work, which slows others down */
    GPU_TOKENS = 64,
    MOVE = 256
};

/* An operation, its only result O, and a plan of it. */
typedef struct calls {
    job job;
    quern_operation op;
    quern_plan *plan;
    void *data[QUERN_OP_TENSORS_MAX];
    char *workspace;
    size_t bytes;
} calls;

/* A way to call. `moves`: the workspace is elsewhere at each call, as where an allocator hands it out. */
static const struct way {
    const char *name;
    bool plan, moves, gpu_alone;
} ways[] = {
    {"call", false, false, false},
    {"plan", true, false, false},
    {"call, moving", false, true, true},
    {"plan, moving", true, true, true},
};
enum { WAYS = sizeof ways / sizeof *ways };

static quern_status call_once(const calls *s, quern_context *ctx, const struct way *way, int round)
{
    void *workspace = s->workspace + (way->moves ? round % 2 * MOVE : 0);
    const void *tensors = &s->job.tensors;
    if (way->plan) return quern_plan_run(s->plan, NULL, s->data, workspace, s->bytes);
    if (s->op == QUERN_OP_ATTENTION_FORWARD)
        return quern_attention_forward(ctx, NULL, &s->job.params.attention, tensors, workspace, s->bytes);
    return quern_nsa_forward(ctx, NULL, &s->job.params.nsa, tensors, workspace, s->bytes);
}

static int open_calls(calls *s, const bench_case *c, quern_context *ctx)
{
    job *j = &s->job;
    bench_case what =
        bench_case_init(operation_named(s->op == QUERN_OP_ATTENTION_FORWARD ? "attention" : "nsa"));
    what.n = c->device == QUERN_CUDA ? GPU_TOKENS : 0;
    what.heads = 32;
    what.kv_heads = 8;
    what.dim = what.dim_v = 128;
    what.dtype = QUERN_BF16;
    what.weights = WEIGHTS_INPUT;
    what.device = c->device;
    const int code = bench_open(j, &what, ctx, false);
    if (code != EXIT_DONE) return code;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        if (!j->input[i] && i != tensor_named(j->op, "O")) j->tensors.t[i] = NULL;
        s->data[i] = j->tensors.t[i] != NULL ? j->tensors.t[i]->data : NULL;
    }
    quern_status status = quern_plan_create(ctx, s->op, &j->params, &j->tensors, &s->plan);
    if (status == QUERN_OK) status = quern_plan_workspace(s->plan, &s->bytes);
    if (status != QUERN_OK) return fail_status(status);
    const int64_t bytes = (int64_t)s->bytes + MOVE;
    const quern_tensor *room = job_add_output(j, "workspace", QUERN_U8, 1, &bytes);
    if (room == NULL) return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", s->bytes);
    s->workspace = room->data;
    return EXIT_DONE;
}

static quern_status time_calls(const calls *s, quern_context *ctx, const struct way *way, timing *out)
{
    double ms[ROUNDS];
    const bool gpu = s->job.device == QUERN_CUDA;
    const int count = gpu ? 1 : CALLS;
    quern_status status = QUERN_OK;
    for (const double until = now_ms() + WARM_MS; !gpu && now_ms() < until && status == QUERN_OK;)
        status = call_once(s, ctx, way, 0);
    for (int r = -10; r < ROUNDS && status == QUERN_OK; r++) {
        if (gpu) status = quern_cuda_synchronize(0, NULL);
        const double start = now_ms();
        for (int i = 0; i < count && status == QUERN_OK; i++) status = call_once(s, ctx, way, r + 10);
        if (r >= 0) ms[r] = (now_ms() - start) / count;
    }
    if (status == QUERN_OK && gpu) status = quern_cuda_synchronize(0, NULL);
    if (status == QUERN_OK) *out = timing_of(ms, ROUNDS);
    return status;
}

static int measure(const bench_case *c, quern_context *ctx, const char *name, quern_operation op,
                   bench_results *to)
{
    calls *s = need_memory(sizeof *s);
    char line[400] = "";
    *s = (calls){.op = op};
    int code = open_calls(s, c, ctx);
    for (int i = 0; i < WAYS && code == EXIT_DONE; i++) {
        timing t;
        if (ways[i].gpu_alone && c->device != QUERN_CUDA) continue;
        const quern_status status = time_calls(s, ctx, &ways[i], &t);
        if (status != QUERN_OK) code = fail_status(status);
        if (status != QUERN_OK) break;
        printf("%-18s %-12s %8.3f us  (p10 %.3f, p90 %.3f)\n", name, ways[i].name, t.median * 1e3,
               t.p10 * 1e3, t.p90 * 1e3);
        bench_result *row = bench_add(to, c, ctx, name);
        row->measured.time = t;
        snprintf(row->label, sizeof row->label, "%s", ways[i].name);
        row->value = t.median * 1e3;
        row->extra = json_pack("{s:s, s:s, s:s}", "subject", "overhead", "by", ways[i].name, "dtype", "bf16");
    }
    if (code == EXIT_DONE && quern_plan_describe(s->plan, line, sizeof line) == QUERN_OK)
        printf("  %s\n", line);
    quern_plan_destroy(s->plan);
    job_free(&s->job);
    free(s);
    return code;
}

int bench_overhead(const bench_case *c, quern_context *ctx, bench_results *to)
{
    const int code = measure(c, ctx, "attention_forward", QUERN_OP_ATTENTION_FORWARD, to);
    return code == EXIT_DONE ? measure(c, ctx, "nsa_forward", QUERN_OP_NSA_FORWARD, to) : code;
}
