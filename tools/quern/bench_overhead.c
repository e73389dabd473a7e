/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_overhead.c - `quern bench overhead`: the cost of a call besides its kernels. On the CPU the calls
 * have no tokens. On a GPU they have a few and the stream is idle; the time ends when the call returns, with
 * its kernels launched. There the workspace also moves from call to call, for a call whose addresses are all
 * those of the last one starts faster.
 */
#include "bench.h"

#include "command.h"
#include "machine.h"
#include "output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <quern/cuda.h>
#include <quern/plan.h>

enum {
    ROUNDS = 301,
    CALLS = 16 /* of a round on the CPU, where one call is short for the clock */,
    GPU_TOKENS = 64
};
enum { H = 32, HKV = 8, D = 128 };

/* An operation on tensors that share one block of memory. */
typedef struct subject {
    const char *name;
    quern_operation op;
    quern_context *ctx;
    bool gpu;
    quern_attention_params attention;
    quern_nsa_params nsa;
    quern_tensor q, k, v, o, gate;
    quern_attention_tensors attention_tensors;
    quern_nsa_tensors nsa_tensors;
    quern_plan *plan;
    void *data[64], *workspace;
    char *memory;
    size_t bytes;
} subject;

static void *allocate(const subject *s, size_t bytes)
{
    void *p = NULL;
    if (s->gpu)
        return quern_cuda_allocate(0, bytes, &p) == QUERN_OK &&
                       quern_cuda_fill(0, p, 0, bytes, NULL) == QUERN_OK
                   ? p
                   : NULL;
    return calloc(1, bytes + 64);
}

static void release(const subject *s, void *p)
{
    if (s->gpu) (void)quern_cuda_free(0, p);
    else free(p);
}

static quern_tensor tensor_of(subject *s, size_t *used, int32_t ndim, const int64_t *shape)
{
    size_t bytes = 2;
    for (int32_t i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    quern_tensor t = quern_tensor_contiguous(s->memory + *used, QUERN_BF16, ndim, shape);
    t.device = s->gpu ? QUERN_CUDA : QUERN_CPU;
    *used += (bytes + 255) & ~(size_t)255;
    return t;
}

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
enum { WAYS = sizeof ways / sizeof *ways, MOVE = 256 };

static quern_status call_once(const subject *s, const struct way *way, int round)
{
    void *workspace = (char *)s->workspace + (way->moves ? round % 2 * MOVE : 0);
    if (way->plan) return quern_plan_run(s->plan, NULL, s->data, workspace, s->bytes);
    if (s->op == QUERN_OP_ATTENTION_FORWARD)
        return quern_attention_forward(s->ctx, NULL, &s->attention, &s->attention_tensors, workspace,
                                       s->bytes);
    return quern_nsa_forward(s->ctx, NULL, &s->nsa, &s->nsa_tensors, workspace, s->bytes);
}

static quern_status open_subject(subject *s)
{
    const int64_t n = s->gpu ? GPU_TOKENS : 0, q_shape[] = {1, n, H, D}, k_shape[] = {1, n, HKV, D},
                  gate_shape[] = {H, 3, D};
    size_t used = 0;
    s->attention = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    s->nsa = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    s->nsa.gate = QUERN_NSA_GATE_WEIGHTS;
    if ((s->memory = allocate(s, (size_t)4 << 20)) == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    s->q = tensor_of(s, &used, 4, q_shape);
    s->k = tensor_of(s, &used, 4, k_shape);
    s->v = tensor_of(s, &used, 4, k_shape);
    s->o = tensor_of(s, &used, 4, q_shape);
    s->gate = tensor_of(s, &used, 3, gate_shape);
    s->attention_tensors = (quern_attention_tensors){
        .size = sizeof s->attention_tensors, .q = &s->q, .k = &s->k, .v = &s->v, .o = &s->o};
    s->nsa_tensors = (quern_nsa_tensors){
        .size = sizeof s->nsa_tensors, .q = &s->q, .k = &s->k, .v = &s->v, .o = &s->o, .w_gate = &s->gate};
    const bool dense = s->op == QUERN_OP_ATTENTION_FORWARD;
    const void *params = dense ? (const void *)&s->attention : &s->nsa,
               *tensors = dense ? (const void *)&s->attention_tensors : &s->nsa_tensors;
    const size_t fields = (dense ? sizeof s->attention_tensors : sizeof s->nsa_tensors) / sizeof(void *) - 1;
    quern_status status = quern_plan_create(s->ctx, s->op, params, tensors, &s->plan);
    if (status == QUERN_OK) status = quern_plan_workspace(s->plan, &s->bytes);
    if (status == QUERN_OK && (s->workspace = allocate(s, s->bytes + MOVE)) == NULL)
        status = QUERN_ERR_OUT_OF_MEMORY;
    for (size_t i = 0; i < fields && i < 64; i++) { /* fields are pointers after `size` */
        const quern_tensor *t = ((const quern_tensor *const *)((const char *)tensors + sizeof(size_t)))[i];
        s->data[i] = t != NULL ? t->data : NULL;
    }
    return status;
}

static quern_status time_calls(const subject *s, const struct way *way, timing *out)
{
    double ms[ROUNDS];
    const int calls = s->gpu ? 1 : CALLS;
    quern_status status = QUERN_OK;
    for (int r = -10; r < ROUNDS && status == QUERN_OK; r++) {
        if (s->gpu) status = quern_cuda_synchronize(0, NULL);
        const double start = now_ms();
        for (int i = 0; i < calls && status == QUERN_OK; i++) status = call_once(s, way, r + 10);
        if (r >= 0) ms[r] = (now_ms() - start) / calls;
    }
    if (status == QUERN_OK && s->gpu) status = quern_cuda_synchronize(0, NULL);
    if (status == QUERN_OK) *out = timing_of(ms, ROUNDS);
    return status;
}

static int measure(quern_context *ctx, bool gpu, const char *name, quern_operation op, json_t *list)
{
    subject s = {.name = name, .op = op, .ctx = ctx, .gpu = gpu};
    char line[400] = "";
    quern_status status = open_subject(&s);
    for (int i = 0; i < WAYS && status == QUERN_OK; i++) {
        timing t;
        if (ways[i].gpu_alone && !gpu) continue;
        if ((status = time_calls(&s, &ways[i], &t)) != QUERN_OK) break;
        printf("%-18s %-12s %8.3f us  (p10 %.3f, p90 %.3f)\n", name, ways[i].name, t.median * 1e3,
               t.p10 * 1e3, t.p90 * 1e3);
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:i, s:f, s:f, s:f}", "op", name, "subject",
                                              "overhead", "by", ways[i].name, "reps", ROUNDS, "ms_median",
                                              t.median, "ms_p10", t.p10, "ms_p90", t.p90));
    }
    if (status == QUERN_OK && quern_plan_describe(s.plan, line, sizeof line) == QUERN_OK)
        printf("  %s\n", line);
    quern_plan_destroy(s.plan);
    if (s.workspace != NULL) release(&s, s.workspace);
    if (s.memory != NULL) release(&s, s.memory);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

int bench_overhead(int device, int64_t threads, const char *json)
{
    quern_context *ctx = NULL;
    int code = output_check(json);
    if (code == EXIT_DONE)
        code = open_context(&(machine_options){.threads = threads, .device = device}, &ctx);
    if (code != EXIT_DONE) return code;
    json_t *list = json_array();
    code = measure(ctx, device == QUERN_CUDA, "attention_forward", QUERN_OP_ATTENTION_FORWARD, list);
    if (code == EXIT_DONE)
        code = measure(ctx, device == QUERN_CUDA, "nsa_forward", QUERN_OP_NSA_FORWARD, list);
    json_t *root = json_pack("{s:i, s:s, s:s, s:o, s:s, s:{}, s:o}", "schema", 1, "version", quern_version(),
                             "commit", machine_commit(), "machine", machine_json(ctx), "device",
                             device == QUERN_CUDA ? "cuda" : "cpu", "ceilings", "results", list);
    if (code == EXIT_DONE && json != NULL)
        code = output_json(json, root, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(root);
    quern_context_destroy(ctx);
    return code;
}
