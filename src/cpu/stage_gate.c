/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_gate.c - the gate_forward stage: o = sum_b g_b o_b, the gates from q . w_gate, handed in, or 1/3.
 *
 * Tasks of 32 tokens; a token's gates are made 64 heads at a time, so that the sigmoid runs on full vectors, then
 * its o rows are combined in f32 and stored past the caches. Limit: the copy bandwidth on q, o_b and o.
 */
#include "core/parallel.h"
#include "cpu/gate.h"
#include "cpu/stages.h"

#include <string.h>

enum { GATE_TOKENS = 32, GATE_HEADS = 64 };

typedef struct gate_job {
    const gate_args *args;
    const nsa_kernels *kernels;
    int64_t rows, pieces, heads;
} gate_job;

void gate_make(const gate_args *args, const nsa_kernels *kernels, int64_t b, int64_t n, int64_t h0, int64_t heads, float *gates)
{
    const quern_tensor *g = &args->gates;
    if (args->kind == QUERN_NSA_GATE_GIVEN) {
        for (int64_t h = 0; h < heads; h++) memcpy(gates + 3 * h, row_at(g, b, n, h0 + h), 3 * sizeof *gates);
        return;
    }
    if (args->kind == QUERN_NSA_GATE_WEIGHTS) {
        for (int64_t h = 0; h < heads; h++)
            kernels->gate_logits(row_at(&args->q, b, n, h0 + h), args->q.dtype, gate_weights_at(args, h0 + h), args->w_gate.dtype,
                                 args->w_gate.strides[1], args->q.shape[3], gates + 3 * h);
        kernels->sigmoid(gates, 3 * heads);
    } else {
        for (int64_t i = 0; i < 3 * heads; i++) gates[i] = 1.0f / 3.0f;
    }
    if (!is_present(g)) return;
    for (int64_t h = 0; h < heads; h++) memcpy(row_at(g, b, n, h0 + h), gates + 3 * h, 3 * sizeof *gates);
}

static void gate_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const gate_job *job = arg;
    const gate_args *args = job->args;
    const quern_tensor *o = &args->o;
    const int64_t b = index / job->pieces, first = index % job->pieces * GATE_TOKENS;
    const int64_t end = first + GATE_TOKENS < job->rows ? first + GATE_TOKENS : job->rows;
    float gates[3 * GATE_HEADS];
    for (int64_t n = first; n < end; n++)
        for (int64_t h0 = 0; h0 < job->heads; h0 += GATE_HEADS) {
            const int64_t heads = job->heads - h0 < GATE_HEADS ? job->heads - h0 : GATE_HEADS;
            gate_make(args, job->kernels, b, n, h0, heads, gates);
            if (!is_present(o)) continue;
            for (int64_t h = 0; h < heads; h++) {
                const void *o_b[3];
                for (int i = 0; i < 3; i++) o_b[i] = is_present(&args->o_b[i]) ? row_at(&args->o_b[i], b, n, h0 + h) : NULL;
                void *dst = row_at(o, b, n, h0 + h);
                job->kernels->gate_combine(o_b, o->dtype, gates + 3 * h, o->shape[3], dst, may_stream(dst, o->dtype, o->shape[3]));
            }
        }
    job->kernels->fence();
}

bool cpu_gate_supports(const quern_exec *exec, const gate_args *args, char why[STAGE_WHY_BYTES])
{
    (void)exec;
    (void)args;
    (void)why;
    return true;
}

size_t cpu_gate_forward_workspace(const quern_exec *exec, const gate_args *args)
{
    (void)exec;
    (void)args;
    return 0;
}

quern_status cpu_gate_forward(const quern_exec *exec, const gate_args *args, void *workspace)
{
    (void)workspace;
    gate_job job = {.args = args, .kernels = nsa_kernels_for(exec->cpu_level)};
    const quern_tensor *like = is_present(&args->o) ? &args->o : &args->gates;
    if (!is_present(like)) return QUERN_OK;
    job.heads = like->shape[2];
    job.rows = args->seqs.cu_q.data != NULL ? token_rows(&args->seqs) : like->shape[1];
    job.pieces = (job.rows + GATE_TOKENS - 1) / GATE_TOKENS;
    parallel_for(exec->threads, like->shape[0] * job.pieces, gate_piece, &job);
    if (is_present(&args->o)) zero_rows(&args->o, job.rows);
    if (is_present(&args->gates) && args->kind != QUERN_NSA_GATE_GIVEN) zero_rows(&args->gates, job.rows);
    return QUERN_OK;
}
