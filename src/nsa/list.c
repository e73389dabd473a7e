/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * list.c - lists of blocks in another block length. The stage takes 2-D lists: leading dimensions that stand one after
 * the other in all tensors are merged, and the stage runs for every index of the others.
 */
#include "core/context.h"
#include "core/error.h"
#include "core/view.h"

enum { IN, OUT, COUNT, TENSORS };

static quern_status check_blocks(int64_t from, int64_t to, int64_t n)
{
    if (from < 1 || to < 1 || (from % to != 0 && to % from != 0) || from > INT32_MAX || to > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "from %lld, to %lld: positive block sizes of which one divides the other are accepted",
                         (long long)from, (long long)to);
    if (n < 0 || n > INT32_MAX) return error_set(QUERN_ERR_INVALID_ARGUMENT, "n is %lld: 0 to %d is accepted", (long long)n, INT32_MAX);
    return QUERN_OK;
}

static quern_status check_tensors(const quern_tensor *const all[TENSORS], int64_t from, int64_t to)
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
    view_rule rules[TENSORS] = {{"in", in, VIEW_I32, in->ndim, {0}, false, false}, {"out", all[OUT], VIEW_I32, in->ndim, {0}, false, true},
                                {"count_out", all[COUNT], VIEW_I32, last, {0}, true, true}};
    for (int32_t i = 0; i < in->ndim; i++) {
        rules[IN].shape[i] = VIEW_ANY;
        rules[OUT].shape[i] = i == last ? k_out : in->shape[i];
        rules[COUNT].shape[i] = in->shape[i];
    }
    return view_check_all(rules, TENSORS, in, true);
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

quern_status quern_nsa_list_convert(quern_context *ctx, const quern_tensor *in, int64_t from, const quern_tensor *out, const quern_tensor *count_out,
                                    int64_t to, int64_t n, void *stream)
{
    const quern_tensor *const all[TENSORS] = {in, out, count_out};
    int64_t strides[TENSORS] = {0, 0, 0}, runs = 1;
    int32_t first;
    if (ctx == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    quern_status status = check_blocks(from, to, n);
    if (status == QUERN_OK) status = check_tensors(all, from, to);
    if (status != QUERN_OK) return status;
    const int64_t lists = merge(all, &first, strides);
    for (int32_t i = 0; i < first; i++) runs *= in->shape[i];
    quern_exec exec;
    const quern_backend *backend = context_backend(ctx, in->device, in->device_id, stream, &exec);
    if (backend == NULL) return error_status();
    list_convert_args args = {.from = from, .to = to, .n = n};
    quern_tensor *const flat[TENSORS] = {&args.in, &args.out, &args.count};
    char why[STAGE_WHY_BYTES];
    for (int64_t run = 0; run < runs && status == QUERN_OK; run++) {
        for (int t = 0; t < TENSORS; t++) {
            if (all[t] == NULL) continue;
            *flat[t] = *all[t];
            int64_t index = run;
            for (int32_t i = first - 1; i >= 0; index /= in->shape[i], i--) view_narrow(flat[t], i, index % in->shape[i], 1);
            flat[t]->ndim = t == COUNT ? 1 : 2;
            flat[t]->shape[0] = lists, flat[t]->strides[0] = strides[t];
            flat[t]->shape[1] = t == COUNT ? 0 : all[t]->shape[in->ndim - 1], flat[t]->strides[1] = 1;
        }
        if (!backend->list_convert.supports(&exec, &args, why)) return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
        status = backend->list_convert.run(&exec, &args, NULL);
    }
    return status;
}
