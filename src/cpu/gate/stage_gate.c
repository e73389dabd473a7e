/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_gate.c - the gate_forward stage: o = sum_b g_b o_b, with gates from q . w_gate, the caller's gates,
 * or 1/3.
 *
 * A task has about 1024 rows: a thread reads its q, then all its o_b, as runs of memory. The gates stay in L1
 * meanwhile (gate_rows.h), and non-temporal stores write o. Limit: the copy bandwidth on q, o_b and o.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/gate/gate.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { PIECE_ROWS = 1024 };

typedef struct gate_job {
    const gate_args *args;
    const nsa_kernels *kernels;
    int64_t rows, heads, tokens, pieces; /* tokens of a piece */
    bool stream, prefetch_l2;
} gate_job;

static void gate_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const gate_job *job = arg;
    const gate_args *args = job->args;
    const int64_t b = index / job->pieces, first = index % job->pieces * job->tokens;
    const int64_t tokens = job->rows - first < job->tokens ? job->rows - first : job->tokens;
    for (int64_t h = 0; h < job->heads; h += PIECE_ROWS) {
        const int64_t heads = job->heads - h < PIECE_ROWS ? job->heads - h : PIECE_ROWS;
        float made[3 * PIECE_ROWS];
        gate_block t = gate_block_at(args, b, first, tokens, h, heads);
        t.prefetch_l2 = job->prefetch_l2;
        t.gates =
            is_present(&args->gates) ? grid_at(&args->gates, b, first, h) : (row_grid){made, 3 * heads, 3};
        if (args->kind == GATE_NONE) {
            for (int64_t i = 0; is_present(&args->gates) && i < tokens * heads; i++)
                memcpy(row_at(&args->gates, b, first + i / heads, h + i % heads), gate_third,
                       sizeof gate_third);
            t.gates = (row_grid){(void *)(uintptr_t)gate_third, 0, 0};
        }
        if (is_present(&args->o)) {
            t.dim_v = args->o.shape[3];
            t.out = grid_at(&args->o, b, first, h);
            t.stream = job->stream;
            for (int i = 0; i < 3; i++) t.o[i] = grid_at(&args->o_b[i], b, first, h);
        }
        job->kernels->gate_rows(&t);
    }
    job->kernels->rows->fence();
}

void cpu_gate_kernel(const stage_exec *exec, const gate_args *args, char text[STAGE_NAME_BYTES])
{
    (void)args;
    cpu_name_kernels(text, "gate", false, cpu_kernels_for(exec->cpu_level)->nsa->level);
}

quern_status cpu_gate_forward(const stage_exec *exec, const gate_args *args, void *workspace)
{
    const quern_status status = check_queries(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    (void)workspace;
    gate_job job = {
        .args = args, .kernels = cpu_kernels_for(exec->cpu_level)->nsa, .prefetch_l2 = exec->prefetch_l2};
    const quern_tensor *like = is_present(&args->o) ? &args->o : &args->gates;
    if (!is_present(like) || like->shape[2] == 0) return QUERN_OK;
    job.heads = like->shape[2];
    job.rows = args->seqs.cu_q.data != NULL ? token_rows(&args->seqs) : like->shape[1];
    job.tokens = job.heads < PIECE_ROWS ? PIECE_ROWS / job.heads : 1;
    job.pieces = (job.rows + job.tokens - 1) / job.tokens;
    job.stream = all_may_stream(&args->o);
    parallel_for(exec, like->shape[0] * job.pieces, gate_piece, &job);
    if (is_present(&args->o)) zero_rows(&args->o, job.rows);
    if (is_present(&args->gates) && args->kind != GATE_GIVEN) zero_rows(&args->gates, job.rows);
    return QUERN_OK;
}
