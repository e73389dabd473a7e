/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * list.c - lists of blocks in another block length. The stage takes 2-D lists. Leading dimensions that are
 * contiguous in all tensors are merged, and the stage runs for every index of the others.
 */
#include "core/error.h"
#include "core/view.h"
#include "nsa/call.h"

#include <stddef.h>

enum { IN, OUT, COUNT, TENSORS };
enum { S_K_IN = 1, S_K_OUT };

typedef struct list_call {
    op_call head;
    quern_nsa_list_params params;
    quern_tensor all[TENSORS];
    int32_t first;                         /* dimensions from here on, but the last, are merged */
    int64_t lists, strides[TENSORS], runs; /* a run's lists, and from one to the next */
} list_call;

static const op_tensor tensors[] = {
    {"in", "block_idx", OP_I32, OP_NONE, {OP_LEAD, S_K_IN}, {0}},
    {"out", "converted_idx", OP_I32, OP_NONE, {OP_LEAD, S_K_OUT}, {0}},
    {"count", "converted_count", OP_I32, OP_NONE, {OP_LEAD}, {0}},
};
_Static_assert(sizeof(quern_nsa_list_tensors) == (1 + TENSORS) * sizeof(void *), "a tensor a field");

#define AT(member) offsetof(quern_nsa_list_params, member)
static const op_param params[] = {
    {"from", AT(from), OP_INTEGER, INT64_MIN, INT64_MAX, NULL, "block length of the list"},
    {"to", AT(to), OP_INTEGER, INT64_MIN, INT64_MAX, NULL, "block length wanted; one divides the other"},
    {"n", AT(n), OP_INTEGER, 0, INT32_MAX, NULL, "tokens of the sequence"},
};
#undef AT
static const quern_nsa_list_params defaults = QUERN_NSA_LIST_PARAMS_INIT;
static const char *const operations[] = {"nsa_list_convert"};

static const char *const symbols[] = {"", [S_K_IN] = "k", [S_K_OUT] = "k_out", NULL};
static const op_entry ops[] = {
    {.name = "nsa-list-convert",
     .help = "convert a list of blocks to another block length",
     .backward = OP_NONE},
};

static quern_status check_params(op_call *call)
{
    const int64_t from = ((list_call *)call)->params.from, to = ((list_call *)call)->params.to;
    if (from < 1 || to < 1 || (from % to != 0 && to % from != 0) || from > INT32_MAX || to > INT32_MAX)
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "from %lld, to %lld: positive block sizes of which one divides the other are accepted",
            (long long)from, (long long)to);
    return QUERN_OK;
}

static void roles(op_call *call)
{
    call->role[IN] = OP_NEEDED;
    call->role[OUT] = OP_RESULT;
    call->role[COUNT] = OP_OPTIONAL_RESULT;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    return error_set(QUERN_ERR_INTERNAL, "%s is refused: no tensor of a list is",
                     call->family->tensors[tensor].field);
}

static quern_status derive(op_call *call)
{
    const quern_nsa_list_params *p = &((const list_call *)call)->params;
    const quern_tensor *in = call->given[IN];
    if (in == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "in is NULL: a tensor is needed");
    if (in->ndim < 1 || in->ndim > QUERN_MAX_DIMS)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "in has %d dimensions: 1 to %d are accepted", in->ndim,
                         QUERN_MAX_DIMS);
    const int32_t last = in->ndim - 1;
    int64_t k_out = in->shape[last];
    if (p->from > p->to && __builtin_mul_overflow(in->shape[last], p->from / p->to, &k_out))
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "in.shape[%d] is %lld: at most 2^63 - 1 entries after the expansion by %lld are accepted", last,
            (long long)in->shape[last], (long long)(p->from / p->to));
    call->like = *in;
    call->like.dtype = QUERN_I32;
    call->lead[0].count = last;
    for (int32_t i = 0; i < last; i++) call->lead[0].extent[i] = in->shape[i];
    call->symbol[S_K_IN] = in->shape[last];
    call->symbol[S_K_OUT] = k_out;
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    (void)call;
    (void)data;
    return QUERN_OK;
}

/* Leading dimensions from c->first on stand one after the other in all tensors. */
static void merge(list_call *c)
{
    const quern_tensor *all = c->all;
    c->lists = 1;
    for (c->first = all[IN].ndim - 1; c->first > 0; c->first--) {
        const int32_t dim = c->first - 1;
        const int64_t extent = all[IN].shape[dim];
        for (int t = 0; t < TENSORS; t++)
            if (all[t].ndim > 0 && c->lists > 1 && extent > 1 &&
                all[t].strides[dim] != c->strides[t] * c->lists)
                return;
        for (int t = 0; t < TENSORS && c->lists == 1; t++)
            c->strides[t] = all[t].ndim > 0 ? all[t].strides[dim] : 0;
        c->lists *= extent;
    }
}

/* The stage's arguments in a run: the merged dimensions at one index of the others. */
static list_convert_args args_of(const list_call *c, int64_t run)
{
    const int32_t last = c->all[IN].ndim - 1;
    list_convert_args args = {.from = c->params.from, .to = c->params.to, .n = c->params.n};
    quern_tensor *const flat[TENSORS] = {&args.in, &args.out, &args.count};
    for (int t = 0; t < TENSORS; t++) {
        if (t == COUNT && c->all[t].data == NULL) continue;
        *flat[t] = c->all[t];
        int64_t index = run;
        for (int32_t i = c->first - 1; i >= 0; index /= c->all[IN].shape[i], i--)
            view_narrow(flat[t], i, index % c->all[IN].shape[i], 1);
        flat[t]->ndim = t == COUNT ? 1 : 2;
        flat[t]->shape[0] = c->lists;
        flat[t]->strides[0] = c->strides[t];
        flat[t]->shape[1] = t == COUNT ? 0 : c->all[t].shape[last];
        flat[t]->strides[1] = 1;
    }
    return args;
}

static quern_status plan(op_call *call)
{
    list_call *c = (list_call *)call;
    char why[STAGE_WHY_BYTES];
    c->strides[IN] = c->strides[OUT] = c->strides[COUNT] = 0;
    for (int t = 0; t < TENSORS; t++) c->all[t] = op_view(call, t, false);
    merge(c);
    c->runs = 1;
    for (int32_t i = 0; i < c->first; i++) c->runs *= c->all[IN].shape[i];
    if (c->lists == 0) c->runs = 0;
    if (c->runs == 0) return QUERN_OK;
    const list_convert_args args = args_of(c, 0);
    return STAGE_TAKES(call->backend->list_convert, &call->exec, &args, why)
               ? QUERN_OK
               : error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
}

/* The status word of entries outside the sequence: each list is a head of one row. */
static quern_status report(const list_call *c, const op_frame *frame, const list_convert_args *args)
{
    quern_tensor lists = args->in;
    lists.ndim = 4;
    lists.shape[0] = lists.shape[2] = 1;
    lists.shape[1] = args->in.shape[0];
    lists.strides[1] = args->in.strides[0];
    lists.shape[3] = args->in.shape[1];
    lists.strides[3] = 1;
    lists.strides[0] = lists.strides[2] = 0;
    const validate_lists_args validate = {.seqs = {1, args->n, args->n, {0}, {0}},
                                          .blocks = lists,
                                          .tile = args->n > 0 ? args->n : 1,
                                          .select_block = args->from,
                                          .block_size = 1,
                                          .stride = 1,
                                          .status = op_status_view(&c->head)};
    return op_validate_lists(&c->head, frame, &validate, NULL);
}

static quern_status run(const op_call *call, const op_frame *frame)
{
    const list_call *c = (const list_call *)call;
    quern_status status = QUERN_OK;
    for (int64_t i = 0; i < c->runs && status == QUERN_OK; i++) {
        const list_convert_args args = args_of(c, i);
        if (frame->asked) status = report(c, frame, &args);
        if (status == QUERN_OK) status = op_list_convert(call, frame, &args, NULL);
    }
    return status;
}

const op_family nsa_list_family = {
    .operations = operations,
    .operation_count = 1,
    .first = QUERN_OP_NSA_LIST_CONVERT,
    .tensors = tensors,
    .tensor_count = TENSORS,
    .varlen_by = OP_NONE,
    .params = params,
    .param_count = sizeof params / sizeof *params,
    .defaults = &defaults,
    .params_init = "QUERN_NSA_LIST_PARAMS_INIT",
    .tensors_init = "QUERN_NSA_LIST_TENSORS_INIT",
    .symbols = symbols,
    .group = "list",
    .entries = ops,
    .entry_count = sizeof ops / sizeof *ops,
    .call_size = sizeof(list_call),
    .params_at = offsetof(list_call, params),
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .plan = plan,
    .run = run,
};

quern_status quern_nsa_list_convert_workspace(quern_context *ctx, const quern_nsa_list_params *given,
                                              const quern_nsa_list_tensors *views, size_t *bytes)
{
    list_call call;
    return op_workspace_of(&call.head, &nsa_list_family, 0, ctx, given, views, bytes);
}

quern_status quern_nsa_list_convert(quern_context *ctx, const quern_exec *exec,
                                    const quern_nsa_list_params *given, const quern_nsa_list_tensors *views,
                                    void *workspace, size_t workspace_bytes)
{
    list_call call;
    return op_run(&call.head, &nsa_list_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
