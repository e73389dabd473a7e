/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layout.c - conversions between layouts: checks, then one stage each. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"
#include "nvfp4/call.h"

enum { TILE_ROWS = 128, TILE_COLUMNS = 4 };

typedef struct swizzle_call {
    nvfp4_call base;
    swizzle_args args;
} swizzle_call;

typedef struct interleave_call {
    nvfp4_call base;
    interleave_args args;
} interleave_call;

static quern_status check_context(const quern_context *ctx)
{
    return ctx != NULL
               ? QUERN_OK
               : error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
}

/* A rule for a tensor of any shape, or with the leading extents of another and a last one. */
static view_rule any_shape(const char *name, const quern_tensor *t, uint32_t dtypes, bool output)
{
    view_rule rule = {name, t, dtypes, t != NULL ? t->ndim : 1, {0}, false, output};
    for (int32_t i = 0; i < QUERN_MAX_DIMS; i++) rule.shape[i] = VIEW_ANY;
    return rule;
}

static view_rule like_but_last(const char *name, const quern_tensor *t, uint32_t dtypes,
                               const quern_tensor *like, int64_t last, bool output)
{
    view_rule rule = {name, t, dtypes, like->ndim, {0}, false, output};
    for (int32_t i = 0; i + 1 < like->ndim; i++) rule.shape[i] = like->shape[i];
    rule.shape[like->ndim - 1] = last;
    return rule;
}

static quern_status check_last(const quern_tensor *t, const char *name)
{
    if (t->ndim >= 1) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has 0 dimensions: at least 1 is accepted", name);
}

static int64_t tiles(int64_t n, int64_t tile)
{
    return n / tile + (n % tile != 0);
}

/* Rows that the tiles of `rows` rows hold; with tokens, of each expert's. A bad count is an error. */
static quern_status padded_rows(const quern_nvfp4_swizzle_tensors *t, int64_t rows, bool run, int64_t *padded)
{
    const quern_tensor *tokens = t->tokens_per_expert;
    *padded = tokens == NULL ? tiles(rows, TILE_ROWS) * TILE_ROWS : 0;
    if (tokens == NULL || tokens->device != QUERN_CPU || !run) return QUERN_OK;
    int64_t sum = 0;
    for (int64_t e = 0; e < tokens->shape[0]; e++) {
        const int32_t n = ((const int32_t *)tokens->data)[e];
        if (n < 0 || n > rows - sum)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "tokens_per_expert[%lld] is %d: 0 to the %lld rows that are left is accepted",
                             (long long)e, n, (long long)(rows - sum));
        sum += n;
        *padded += tiles(n, TILE_ROWS) * TILE_ROWS;
    }
    return *padded <= INT32_MAX
               ? QUERN_OK
               : error_set(QUERN_ERR_INVALID_ARGUMENT,
                           "tokens_per_expert make %lld padded rows: at most %d are accepted",
                           (long long)*padded, INT32_MAX);
}

static quern_status check_swizzle(const quern_nvfp4_swizzle_params *p, const quern_nvfp4_swizzle_tensors *t,
                                  bool run)
{
    quern_status status;
    int64_t padded;
    const int32_t ndim = p->weight ? 3 : 2;
    const view_rule first = {"linear", t->linear, VIEW_SCALE, ndim, {VIEW_ANY, VIEW_ANY, VIEW_ANY},
                             false,    p->inverse};
    const view_rule counts = {
        "tokens_per_expert", t->tokens_per_expert, VIEW_I32, 1, {VIEW_ANY}, true, false};
    if ((status = view_check(&first, NULL, run)) != QUERN_OK ||
        (status = view_check(&counts, t->linear, run)) != QUERN_OK)
        return status;
    if (t->tokens_per_expert != NULL && p->weight)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "tokens_per_expert is given with weight: it is accepted for activations");
    if (t->pad_row_offsets != NULL && t->tokens_per_expert == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "pad_row_offsets is given without tokens_per_expert: both or neither are accepted");
    const int64_t *shape = t->linear->shape, columns = shape[1], rows = shape[p->weight ? 2 : 0];
    const int64_t experts = t->tokens_per_expert != NULL ? t->tokens_per_expert->shape[0] : 0;
    if ((status = padded_rows(t, rows, run, &padded)) != QUERN_OK) return status;
    const int64_t bytes =
        t->tokens_per_expert != NULL ? VIEW_ANY : padded * tiles(columns, TILE_COLUMNS) * TILE_COLUMNS;
    const view_rule rules[] = {
        {"linear", t->linear, VIEW_SCALE, ndim, {shape[0], shape[1], shape[2]}, false, p->inverse},
        {"swizzled",
         t->swizzled,
         VIEW_SCALE,
         p->weight ? 2 : 1,
         {p->weight ? shape[0] : bytes, bytes},
         false,
         !p->inverse},
        {"tokens_per_expert", t->tokens_per_expert, VIEW_I32, 1, {VIEW_ANY}, true, false},
        {"pad_row_offsets", t->pad_row_offsets, VIEW_I32, 1, {experts + 1}, true, true},
    };
    if ((status = view_check_all(rules, sizeof rules / sizeof *rules, t->linear, run)) != QUERN_OK)
        return status;
    const int64_t needed = padded * tiles(columns, TILE_COLUMNS) * TILE_COLUMNS;
    if (bytes == VIEW_ANY && t->swizzled->shape[0] < needed)
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "swizzled.shape[0] is %lld: at least the %lld bytes of the experts' tiles are accepted",
            (long long)t->swizzled->shape[0], (long long)needed);
    return QUERN_OK;
}

static quern_status plan_swizzle(quern_context *ctx, const quern_exec *exec,
                                 const quern_nvfp4_swizzle_params *params,
                                 const quern_nvfp4_swizzle_tensors *tensors, bool run, swizzle_call *call)
{
    quern_status status;
    quern_nvfp4_swizzle_params p = QUERN_NVFP4_SWIZZLE_PARAMS_INIT;
    quern_nvfp4_swizzle_tensors t = QUERN_NVFP4_SWIZZLE_TENSORS_INIT;
    *call = (swizzle_call){0};
    if ((status = check_context(ctx)) != QUERN_OK ||
        (status = op_struct(&p, params, "params", "QUERN_NVFP4_SWIZZLE_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_NVFP4_SWIZZLE_TENSORS_INIT")) != QUERN_OK ||
        (status = check_swizzle(&p, &t, run)) != QUERN_OK ||
        (status = nvfp4_begin(ctx, exec, t.linear, &call->base)) != QUERN_OK)
        return status;
    call->args = (swizzle_args){p.inverse,
                                p.weight,
                                *t.linear,
                                *t.swizzled,
                                view_or_absent(t.tokens_per_expert),
                                view_or_absent(t.pad_row_offsets)};
    return nvfp4_check_stage(&call->base, call->base.backend->swizzle.run != NULL, "swizzling of scales");
}

quern_status quern_nvfp4_swizzle_workspace(quern_context *ctx, const quern_nvfp4_swizzle_params *params,
                                           const quern_nvfp4_swizzle_tensors *tensors, size_t *bytes)
{
    swizzle_call call;
    const quern_status status = plan_swizzle(ctx, NULL, params, tensors, false, &call);
    return status != QUERN_OK ? status : nvfp4_give_bytes(0, bytes);
}

quern_status quern_nvfp4_swizzle(quern_context *ctx, const quern_exec *exec,
                                 const quern_nvfp4_swizzle_params *params,
                                 const quern_nvfp4_swizzle_tensors *tensors, void *workspace,
                                 size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    swizzle_call call;
    (void)workspace;
    (void)workspace_bytes;
    const quern_status status = plan_swizzle(ctx, exec, params, tensors, true, &call);
    return status != QUERN_OK ? status : call.base.backend->swizzle.run(&call.base.exec, &call.args, NULL);
}

static quern_status check_interleave(const quern_nvfp4_interleave_params *p,
                                     const quern_nvfp4_interleave_tensors *t, bool run)
{
    const uint32_t dtypes = VIEW_ACTIVATION | VIEW_SCALE;
    quern_status status;
    const view_rule first[] = {any_shape("x", t->x, dtypes, false), any_shape("out", t->out, dtypes, true)};
    if (p->granularity < 1 || p->granularity > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "granularity is %lld: 1 to %d is accepted",
                         (long long)p->granularity, INT32_MAX);
    if ((status = view_check(&first[0], NULL, run)) != QUERN_OK ||
        (status = view_check(&first[1], t->x, run)) != QUERN_OK ||
        (status = check_last(t->x, "x")) != QUERN_OK || (status = check_last(t->out, "out")) != QUERN_OK)
        return status;
    const quern_tensor *halves = p->inverse ? t->out : t->x;
    const int64_t width = halves->shape[halves->ndim - 1], x_last = t->x->shape[t->x->ndim - 1];
    if (width % 2 != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%s.shape[%d] is %lld: gate and up side by side, an even extent, is accepted",
                         p->inverse ? "out" : "x", halves->ndim - 1, (long long)width);
    const int64_t runs = 2 * p->granularity * tiles(width / 2, p->granularity);
    const view_rule rules[] = {
        like_but_last("x", t->x, dtypes, t->x, p->inverse ? runs : x_last, false),
        like_but_last("out", t->out, 1u << t->x->dtype, t->x, p->inverse ? width : runs, true)};
    return view_check_all(rules, 2, t->x, run);
}

static quern_status plan_interleave(quern_context *ctx, const quern_exec *exec,
                                    const quern_nvfp4_interleave_params *params,
                                    const quern_nvfp4_interleave_tensors *tensors, bool run,
                                    interleave_call *call)
{
    quern_status status;
    quern_nvfp4_interleave_params p = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT;
    quern_nvfp4_interleave_tensors t = QUERN_NVFP4_INTERLEAVE_TENSORS_INIT;
    *call = (interleave_call){0};
    if ((status = check_context(ctx)) != QUERN_OK ||
        (status = op_struct(&p, params, "params", "QUERN_NVFP4_INTERLEAVE_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_NVFP4_INTERLEAVE_TENSORS_INIT")) != QUERN_OK ||
        (status = check_interleave(&p, &t, run)) != QUERN_OK ||
        (status = nvfp4_begin(ctx, exec, t.x, &call->base)) != QUERN_OK)
        return status;
    call->args = (interleave_args){p.inverse, p.granularity, *t.x, *t.out};
    return nvfp4_check_stage(&call->base, call->base.backend->interleave.run != NULL, "interleaving");
}

quern_status quern_nvfp4_interleave_workspace(quern_context *ctx, const quern_nvfp4_interleave_params *params,
                                              const quern_nvfp4_interleave_tensors *tensors, size_t *bytes)
{
    interleave_call call;
    const quern_status status = plan_interleave(ctx, NULL, params, tensors, false, &call);
    return status != QUERN_OK ? status : nvfp4_give_bytes(0, bytes);
}

quern_status quern_nvfp4_interleave(quern_context *ctx, const quern_exec *exec,
                                    const quern_nvfp4_interleave_params *params,
                                    const quern_nvfp4_interleave_tensors *tensors, void *workspace,
                                    size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    interleave_call call;
    (void)workspace;
    (void)workspace_bytes;
    const quern_status status = plan_interleave(ctx, exec, params, tensors, true, &call);
    return status != QUERN_OK ? status : call.base.backend->interleave.run(&call.base.exec, &call.args, NULL);
}
