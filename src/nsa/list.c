/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * list.c - lists of blocks in another block length. The stage takes 2-D lists. Leading dimensions that are
 * contiguous in all tensors are merged, and a loop goes over the indices of the others.
 */
#include "core/error.h"
#include "nsa/call.h"

#include <stddef.h>

enum { IN, OUT, COUNT, TENSORS };
enum { S_K_IN = 1, S_K_OUT };

/* The call's tensors, of which the dimensions from `first` on, but the last, are merged: so many lists, each
 * so many elements after the one before. */
typedef struct merged {
    quern_tensor all[TENSORS];
    int32_t first;
    int64_t lists, strides[TENSORS];
} merged;

static const op_tensor tensors[] = {
    {"in", "block_idx", OP_I32, OP_NONE, {OP_LEAD, S_K_IN}, {0}},
    {"out", "converted_idx", OP_I32, OP_NONE, {OP_LEAD, S_K_OUT}, {0}},
    {"count", "converted_count", OP_I32, OP_NONE, {OP_LEAD}, {0}},
};

#define FIELD(member) OP_FIELD(quern_nsa_list_params, member)
static const op_param params[] = {
    {FIELD(from), OP_INTEGER, INT64_MIN, INT64_MAX, NULL, "block length of the list"},
    {FIELD(to), OP_INTEGER, INT64_MIN, INT64_MAX, NULL, "block length wanted; one divides the other"},
    {FIELD(n), OP_INTEGER, 0, INT32_MAX, NULL, "tokens of the sequence"},
};
static const char *const operations[] = {"nsa_list_convert"};

static const char symbols[] = "k k_out";
static const op_entry ops[] = {
    {.name = "nsa-list-convert", .help = "convert a list of blocks to another block length"},
};

static quern_status check_params(op_call *call)
{
    const int64_t from = ((const quern_nsa_list_params *)op_params(call))->from,
                  to = ((const quern_nsa_list_params *)op_params(call))->to;
    if (from < 1 || to < 1 || (from % to != 0 && to % from != 0) || from > INT32_MAX || to > INT32_MAX)
        return error_argument(
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

static quern_status derive(op_call *call)
{
    const quern_nsa_list_params *p = op_params(call);
    const quern_tensor *in = call->given[IN];
    if (in->ndim < 1 || in->ndim > QUERN_MAX_DIMS)
        return error_argument("in has %d dimensions: 1 to %d are accepted", in->ndim, QUERN_MAX_DIMS);
    const int32_t last = in->ndim - 1;
    int64_t k_out = in->shape[last];
    if (p->from > p->to && __builtin_mul_overflow(in->shape[last], p->from / p->to, &k_out))
        return error_argument(
            "in.shape[%d] is %lld: at most 2^63 - 1 entries after the expansion by %lld are accepted", last,
            (long long)in->shape[last], (long long)(p->from / p->to));
    call->like.dtype = QUERN_I32;
    call->lead[0].count = last;
    for (int32_t i = 0; i < last; i++) call->lead[0].extent[i] = in->shape[i];
    call->symbol[S_K_IN] = in->shape[last];
    call->symbol[S_K_OUT] = k_out;
    return QUERN_OK;
}

/* Leading dimensions from m->first on stand one after the other in all tensors. */
static void merge(merged *m)
{
    const quern_tensor *all = m->all;
    m->lists = 1;
    for (m->first = all[IN].ndim - 1; m->first > 0; m->first--) {
        const int32_t dim = m->first - 1;
        const int64_t extent = all[IN].shape[dim];
        for (int t = 0; t < TENSORS; t++)
            if (all[t].ndim > 0 && m->lists > 1 && extent > 1 &&
                all[t].strides[dim] != m->strides[t] * m->lists)
                return;
        for (int t = 0; t < TENSORS && m->lists == 1; t++)
            m->strides[t] = all[t].ndim > 0 ? all[t].strides[dim] : 0;
        m->lists *= extent;
    }
}

/* A tensor's merged dimensions at index 0 of the others; absent where the tensor is. */
static quern_tensor flat(const merged *m, int tensor)
{
    const int32_t last = m->all[IN].ndim - 1;
    quern_tensor t = m->all[tensor];
    if (t.ndim == 0) return t;
    t.ndim = tensor == COUNT ? 1 : 2;
    t.shape[1] = tensor == COUNT ? 0 : m->all[tensor].shape[last];
    t.shape[0] = m->lists;
    t.strides[0] = m->strides[tensor];
    t.strides[1] = 1;
    return t;
}

/* `view`, of the last step, moves on with the dimensions that are not merged. */
static void follow(op_build *b, const merged *m, int tensor, const quern_tensor *view)
{
    for (int32_t d = 0; d < m->first; d++) op_moves(b, view, d, m->all[tensor].strides[d]);
}

/* Notes entries outside the sequence in the caller's status word: each list is a head of one row. */
static void add_report(op_build *b, const merged *m)
{
    const quern_nsa_list_params *p = op_params(b->call);
    const quern_tensor in = flat(m, IN);
    validate_lists_args *args = OP_ADD(b, validate_lists);
    *args = (validate_lists_args){.seqs = {1, p->n, p->n, {0}, {0}},
                                  .blocks = in,
                                  .tile = p->n > 0 ? p->n : 1,
                                  .select_block = p->from,
                                  .block_size = 1,
                                  .stride = 1};
    quern_tensor *lists = &args->blocks;
    lists->ndim = 4;
    lists->shape[0] = lists->shape[2] = 1;
    lists->shape[1] = in.shape[0];
    lists->strides[1] = in.strides[0];
    lists->shape[3] = in.shape[1];
    lists->strides[3] = 1;
    lists->strides[0] = lists->strides[2] = 0;
    op_when_asked(b);
    follow(b, m, IN, lists);
}

static void build(op_build *b)
{
    const quern_nsa_list_params *p = op_params(b->call);
    merged m = {.lists = 0};
    for (int t = 0; t < TENSORS; t++) m.all[t] = op_view(b->call, t, false);
    merge(&m);
    if (m.lists == 0) return;
    if (m.first > 0) op_loop_begin(b, m.first, m.all[IN].shape);
    add_report(b, &m);
    list_convert_args *args = OP_ADD(b, list_convert);
    *args = (list_convert_args){.from = p->from,
                                .to = p->to,
                                .n = p->n,
                                .in = flat(&m, IN),
                                .out = flat(&m, OUT),
                                .count = flat(&m, COUNT)};
    follow(b, &m, IN, &args->in);
    follow(b, &m, OUT, &args->out);
    follow(b, &m, COUNT, &args->count);
    op_loop_end(b);
}

const op_family nsa_list_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nsa_list_tensors, QUERN_NSA_LIST_TENSORS_INIT),
    OP_CALL(quern_nsa_list_params, QUERN_NSA_LIST_PARAMS_INIT,
            OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(list_convert) +
                8 * QUERN_MAX_DIMS * sizeof(int64_t)),
    .first = QUERN_OP_NSA_LIST_CONVERT,
    .group = "list",
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_nsa_list_convert_workspace(quern_context *ctx, const quern_nsa_list_params *given,
                                              const quern_nsa_list_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nsa_list_family, 0, ctx, given, views, bytes);
}

quern_status quern_nsa_list_convert(quern_context *ctx, const quern_exec *exec,
                                    const quern_nsa_list_params *given, const quern_nsa_list_tensors *views,
                                    void *workspace, size_t workspace_bytes)
{
    return op_run(&nsa_list_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
