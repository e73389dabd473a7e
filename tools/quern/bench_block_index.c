/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_block_index.c - the block indexer and its loss: the pairs that their formulas count, and lists. */
#include "bench.h"

#include "command.h"
#include "device.h"
#include "values.h"

#include <quern/cuda.h>

#include <string.h>

static bool is_loss(const bench_case *c)
{
    return strcmp(c->op->name, "nsa-index-loss") == 0;
}

static int64_t select_block(const bench_case *c)
{
    quern_nsa_index_params index;
    quern_nsa_index_loss_params loss;
    memcpy(&index, &c->params, sizeof index);
    memcpy(&loss, &c->params, sizeof loss);
    return is_loss(c) ? loss.select_block : index.select_block;
}

/* Pairs of a query and a key that a list scores: all that are seen, or those of the chosen blocks. */
void bench_count_index(const bench_case *c, const job *ran, formula_symbols *to)
{
    const double n = (double)c->n,
                 chosen = is_loss(c) ? (double)(bench_extent_of(c, "num-selected") * select_block(c)) : n,
                 most = chosen < n ? chosen : n;
    (void)ran;
    formula_set(to, "pairs", most * (most + 1) / 2 + (n - most) * most);
}

static const quern_tensor *input(const bench_run *r, const char *name)
{
    return r->job.tensors.t[tensor_named(r->job.op, name)];
}

/* block_idx and lse_slc as preset msa of NSA gives them for the job's inputs. */
int bench_prepare_lists(bench_run *r, quern_context *ctx)
{
    const bench_case *c = r->what;
    const quern_op *nsa = quern_op_named("nsa");
    const quern_tensor *q = input(r, "Q"), *k = input(r, "K");
    any_params params;
    size_t bytes;
    quern_status status = quern_op_defaults(nsa, &params);
    if (status == QUERN_OK) status = quern_op_preset(nsa, &params, "msa");
    if (status != QUERN_OK) return fail_status(status);
    params.nsa.selection = QUERN_NSA_LIST_INDEXED;
    params.nsa.select_block = select_block(c);
    params.nsa.num_selected = bench_extent_of(c, "num-selected");
    const int device = r->job.device;
    quern_tensor o = device_tensor(device, NULL, q->dtype, q->ndim, q->shape);
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = q;
    t.k = t.v = k;
    t.q_index = input(r, "q_I");
    t.k_index = input(r, "k_I");
    t.block_idx = input(r, "block_idx");
    t.lse_slc = input(r, "lse_slc");
    t.o = &o;
    if ((status = quern_nsa_forward_workspace(ctx, &params.nsa, &t, &bytes)) != QUERN_OK)
        return fail_status(status);
    void *workspace = device_take(device, bytes + 1);
    o.data = device_take(device, (size_t)value_count(q) * quern_dtype_size(q->dtype) + 1);
    if (workspace != NULL && o.data != NULL)
        status = quern_nsa_forward(ctx, NULL, &params.nsa, &t, workspace, bytes);
    const bool room = workspace != NULL && o.data != NULL;
    if (status == QUERN_OK && device == QUERN_CUDA) status = quern_cuda_synchronize(0, NULL);
    device_free(device, workspace);
    device_free(device, o.data);
    if (!room) return fail(EXIT_MACHINE, "no memory to choose the lists");
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
