/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * list.c - lists of blocks in another block length. The stage takes 2-D lists: leading dimensions that stand one after
 * the other in all tensors are merged, and the stage runs for every index of the others.
 */
#include "core/context.h"
#include "core/error.h"
#include "core/op.h"
#include "core/view.h"

#include <quern/nsa.h>

enum { IN, OUT, COUNT, TENSORS };

typedef struct list_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_nsa_list_params params;
    const quern_tensor *all[TENSORS];
    quern_tensor status; /* absent where the caller does not ask */
} list_call;

static quern_status check_blocks(int64_t from, int64_t to, int64_t n)
{
    if (from < 1 || to < 1 || (from % to != 0 && to % from != 0) || from > INT32_MAX || to > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "from %lld, to %lld: positive block sizes of which one divides the other are accepted",
                         (long long)from, (long long)to);
    if (n < 0 || n > INT32_MAX) return error_set(QUERN_ERR_INVALID_ARGUMENT, "n is %lld: 0 to %d is accepted", (long long)n, INT32_MAX);
    return QUERN_OK;
}

static quern_status check_tensors(const quern_tensor *const all[TENSORS], const quern_tensor *asked, int64_t from, int64_t to, bool run)
{
    const quern_tensor *in = all[IN];
    if (in == NULL || all[OUT] == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", in == NULL ? "in" : "out");
    if (in->ndim < 1 || in->ndim > QUERN_MAX_DIMS)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "in has %d dimensions: 1 to %d are accepted", in->ndim, QUERN_MAX_DIMS);
    const int32_t last = in->ndim - 1;
    int64_t k_out = in->shape[last];
    if (from > to && __builtin_mul_overflow(in->shape[last], from / to, &k_out))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "in.shape[%d] is %lld: at most 2^63 - 1 entries after the expansion by %lld are accepted", last,
                         (long long)in->shape[last], (long long)(from / to));
    view_rule rules[TENSORS + 1] = {{"in", in, VIEW_I32, in->ndim, {0}, false, false}, {"out", all[OUT], VIEW_I32, in->ndim, {0}, false, true},
                                {"count", all[COUNT], VIEW_I32, last, {0}, true, true},
                                    {"exec.status", asked, VIEW_I32, 1, {1}, true, true}};
    for (int32_t i = 0; i < in->ndim; i++) {
        rules[IN].shape[i] = VIEW_ANY;
        rules[OUT].shape[i] = i == last ? k_out : in->shape[i];
        rules[COUNT].shape[i] = in->shape[i];
    }
    return view_check_all(rules, TENSORS + 1, in, run);
}

/* Leading dimensions from *first on stand one after the other in all tensors: how many lists they hold, and the strides
 * from one to the next. */
static int64_t merge(const quern_tensor *const all[TENSORS], int32_t *first, int64_t strides[TENSORS])
{
    int64_t lists = 1;
    for (*first = all[IN]->ndim - 1; *first > 0; --*first) {
        const int32_t dim = *first - 1;
        const int64_t extent = all[IN]->shape[dim];
        for (int t = 0; t < TENSORS; t++)
            if (all[t] != NULL && lists > 1 && extent > 1 && all[t]->strides[dim] != strides[t] * lists) return lists;
        for (int t = 0; t < TENSORS && lists == 1; t++)
            if (all[t] != NULL) strides[t] = all[t]->strides[dim];
        lists *= extent;
    }
    return lists;
}

/* Checks everything visible to the host. */
static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_nsa_list_params *params, const quern_nsa_list_tensors *tensors,
                         bool run, list_call *c)
{
    quern_exec how;
    quern_nsa_list_tensors t = QUERN_NSA_LIST_TENSORS_INIT;
    *c = (list_call){.params = QUERN_NSA_LIST_PARAMS_INIT};
    if (ctx == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    quern_status status = op_struct(&c->params, params, "params", "QUERN_NSA_LIST_PARAMS_INIT");
    if (status == QUERN_OK) status = check_blocks(c->params.from, c->params.to, c->params.n);
    if (status == QUERN_OK) status = op_struct(&t, tensors, "tensors", "QUERN_NSA_LIST_TENSORS_INIT");
    if (status == QUERN_OK) status = op_exec(exec, &how);
    if (status != QUERN_OK) return status;
    c->all[IN] = t.in;
    c->all[OUT] = t.out;
    c->all[COUNT] = t.count;
    if ((status = check_tensors(c->all, how.status, c->params.from, c->params.to, run)) != QUERN_OK) return status;
    c->backend = context_backend(ctx, t.in->device, t.in->device_id, how.stream, &c->exec);
    if (c->backend == NULL) return error_status();
    c->status = view_or_absent(how.status);
    return QUERN_OK;
}

/* The status word of entries outside the sequence: each list is a head of one row. */
static quern_status report(const list_call *c, const list_convert_args *args)
{
    if (c->status.ndim == 0) return QUERN_OK;
    quern_tensor lists = args->in;
    lists.ndim = 4;
    lists.shape[0] = lists.shape[2] = 1;
    lists.shape[1] = args->in.shape[0], lists.strides[1] = args->in.strides[0];
    lists.shape[3] = args->in.shape[1], lists.strides[3] = 1;
    lists.strides[0] = lists.strides[2] = 0;
    const check_args check = {.seqs = {1, args->n, args->n, {0}, {0}}, .blocks = lists, .tile = args->n > 0 ? args->n : 1,
                              .select_block = args->from, .block_size = 1, .stride = 1, .status = c->status};
    return c->backend->check.run(&c->exec, &check, NULL);
}

/* The conversion of one stage run: the merged dimensions at one index of the others. */
static quern_status convert(const list_call *c, int32_t first, int64_t lists, const int64_t strides[TENSORS], int64_t run)
{
    const int32_t dims = c->all[IN]->ndim;
    list_convert_args args = {.from = c->params.from, .to = c->params.to, .n = c->params.n};
    quern_tensor *const flat[TENSORS] = {&args.in, &args.out, &args.count};
    char why[STAGE_WHY_BYTES];
    for (int t = 0; t < TENSORS; t++) {
        if (c->all[t] == NULL) continue;
        *flat[t] = *c->all[t];
        int64_t index = run;
        for (int32_t i = first - 1; i >= 0; index /= c->all[IN]->shape[i], i--) view_narrow(flat[t], i, index % c->all[IN]->shape[i], 1);
        flat[t]->ndim = t == COUNT ? 1 : 2;
        flat[t]->shape[0] = lists, flat[t]->strides[0] = strides[t];
        flat[t]->shape[1] = t == COUNT ? 0 : c->all[t]->shape[dims - 1], flat[t]->strides[1] = 1;
    }
    if (!c->backend->list_convert.supports(&c->exec, &args, why)) return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    const quern_status status = report(c, &args);
    return status != QUERN_OK ? status : c->backend->list_convert.run(&c->exec, &args, NULL);
}

quern_status quern_nsa_list_convert_workspace(quern_context *ctx, const quern_nsa_list_params *params, const quern_nsa_list_tensors *tensors,
                                              size_t *bytes)
{
    list_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, false, &call);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = 0; /* the stage needs none on any backend */
    return QUERN_OK;
}

quern_status quern_nsa_list_convert(quern_context *ctx, const quern_exec *exec, const quern_nsa_list_params *params,
                                    const quern_nsa_list_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    list_call call;
    int64_t strides[TENSORS] = {0, 0, 0}, runs = 1;
    int32_t first;
    (void)workspace;
    (void)workspace_bytes;
    quern_status status = plan(ctx, exec, params, tensors, true, &call);
    if (status != QUERN_OK) return status;
    const int64_t lists = merge(call.all, &first, strides);
    for (int32_t i = 0; i < first; i++) runs *= call.all[IN]->shape[i];
    for (int64_t run = 0; run < runs && status == QUERN_OK; run++) status = convert(&call, first, lists, strides, run);
    return status;
}
